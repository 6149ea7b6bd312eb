"""Threads of a trainer on a CPU: what the engines beside it leave.

An engine waits for weights for about half of the time, so its threads count half. Measured on two cores with one engine and
a model of 135 million parameters: 12.3 s a step with two threads, 13.8 with one. The policy of a built-in task is so small
that a second thread takes longer to wake than it saves: 80 ms a step in place of 52.
"""

from __future__ import annotations

MOST = 32
"""Beyond it products of the sizes that fit a CPU gain nothing."""


def threads_left(cores: int, engine_threads: int, *, tiny: bool) -> int:
    """`cores`: that the process may use; `engine_threads`: of all engines there; `tiny`: as a built-in task's policy."""
    return 1 if tiny else max(1, min(MOST, cores - engine_threads // 2))

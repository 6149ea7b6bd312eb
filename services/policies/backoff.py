"""Restart policy with exponential back-off: how long to wait before a restart, and when to give up.

A process that lived `healthy_after_s` before it died starts again with a clean record. Otherwise the n-th restart in a
row (from 1) waits `first_delay_s · 2^(n−1)`, at most `longest_delay_s`, and after `max_restarts` of them the run fails.
Misuse (exit code 2) is never restarted: the same command line would fail the same way. Nor is a process that says that
the run has failed (exit code 3), however long it lived: started again, it would wait as long and fail as it did.
"""

from __future__ import annotations

from dataclasses import dataclass

MISUSE = 2
RUN_FAILED = 3


def growing_delay(time: int, first_s: float, longest_s: float) -> float:
    """How long to wait for the `time`-th time (from 1): twice as long each time, at most `longest_s`."""
    return min(first_s * 2.0 ** min(time - 1, 64), longest_s)


@dataclass(frozen=True)
class Restart:
    delay_s: float
    in_a_row: int


@dataclass(frozen=True)
class GiveUp:
    why: str


@dataclass(frozen=True)
class RestartPolicy:
    max_restarts: int = 5
    first_delay_s: float = 0.25
    longest_delay_s: float = 5.0
    healthy_after_s: float = 20.0

    def after_exit(self, exit_code: int, lived_s: float, in_a_row: int) -> Restart | GiveUp:
        """What follows when a process ended that should not have, after `in_a_row` restarts without a healthy life."""
        if exit_code == MISUSE:
            return GiveUp("it refuses its command line or environment variables")
        if exit_code == RUN_FAILED:
            return GiveUp("the run has failed")
        restart = 1 if lived_s >= self.healthy_after_s else in_a_row + 1
        if restart > self.max_restarts:
            return GiveUp(f"it died {restart} times in a row" if restart > 1 else "it is not started again")
        return Restart(growing_delay(restart, self.first_delay_s, self.longest_delay_s), in_a_row=restart)

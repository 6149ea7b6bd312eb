"""Decode step timing, and the stall of each weight commit.

What a stall is, `services.policies.stall` says. An undisturbed gap is one in no commit's window; the last ones before the
commit's end count. Gaps count only while the engine ran without a break: `break_off` ends a stretch when nothing is left to
decode or decoding was paused.

Pure: no clock inside, times are passed in. Memory is bounded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from services.policies.stall import QUIET, WINDOW, stall

_STALLS_KEPT = 1024


@dataclass
class _OpenCommit:
    """A commit whose window is not over yet. `gaps_ms`: those before it, later also its own and those after it."""

    gaps_ms: list[float]
    own_gap_seen: bool = False
    gaps_left: int = field(default=WINDOW + 1)


class StepTiming:
    """Feed it every decode step and every commit, in order of time (seconds of any steady clock)."""

    def __init__(self) -> None:
        self._last_step: float | None = None
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._unclaimed: deque[float] = deque()
        self._undisturbed: deque[float] = deque(maxlen=2 * QUIET)
        self._open: list[_OpenCommit] = []
        self._stalls: deque[float] = deque(maxlen=_STALLS_KEPT)
        self.tokens = 0
        self.commits = 0

    def step(self, time_s: float, tokens: int) -> None:
        """A decode step ended at `time_s` and sampled `tokens` tokens over all requests."""
        if tokens <= 0:
            return
        self.tokens += tokens
        if self._last_step is not None:
            self._gap((time_s - self._last_step) * 1e3)
        self._last_step = time_s

    def commit(self) -> None:
        """New weights were flipped to, now: after the last step seen and before the next one."""
        self.commits += 1
        if self._last_step is not None:
            self._open.append(_OpenCommit(list(self._recent)))

    def break_off(self) -> None:
        """Decoding stops for a reason that is not a commit: the next step starts a new stretch."""
        self._last_step = None
        self._recent.clear()
        self._undisturbed.extend(self._unclaimed)
        self._unclaimed.clear()
        for commit in self._open:
            self._close(commit)
        self._open.clear()

    def stalls_ms(self) -> list[float]:
        """One number a commit that fell into a running stretch and whose window is over, oldest first (at most 1024)."""
        return list(self._stalls)

    def _gap(self, gap_ms: float) -> None:
        self._recent.append(gap_ms)
        if not self._open:
            # A gap counts as undisturbed once no later commit can reach back to it.
            self._unclaimed.append(gap_ms)
            if len(self._unclaimed) > WINDOW:
                self._undisturbed.append(self._unclaimed.popleft())
            return
        self._unclaimed.clear()
        for commit in self._open:
            commit.gaps_ms.append(gap_ms)
            commit.own_gap_seen = True
            commit.gaps_left -= 1
        while self._open and self._open[0].gaps_left <= 0:
            self._close(self._open.pop(0))

    def _close(self, commit: _OpenCommit) -> None:
        if not commit.own_gap_seen:
            return
        self._stalls.append(stall(commit.gaps_ms, self._undisturbed or commit.gaps_ms))

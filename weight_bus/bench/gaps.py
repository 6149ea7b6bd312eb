"""What an update of the weights does to streams that decode: stall, tokens lost, pace. Pure: times come in as numbers.

    tokens   |   |   |   |   |         |   |   |   |        gaps between the tokens of one stream
    update         begin ┄┄┄ still ┄┄┄ end                  `still`: when decoding stood or may have stood
    window                 └───────────────┘                the gaps that touch `still`, one before them, one after
    quiet    └─────┘                         └──────┘       the undisturbed gaps next to it, `QUIET` on each side

What a **stall** is, `services.policies.stall` says; undisturbed is a gap outside of every update of the episode. With
`still` a moment (ours: when the engine said that it had flipped) and steps alike, it is what an engine's own status says.
**Tokens lost** = tokens that undisturbed decoding would have drawn from the update's begin until a gap after its end, less
those drawn. **Pace** = tokens drawn in a span ÷ those that undisturbed decoding would have drawn.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import fmean, median

from services.policies.stall import QUIET, WINDOW, stall
from weight_bus.bench.messages import Span


@dataclass(frozen=True)
class Update:
    """`whole`: from the first byte that moves until the new version is served. `staging`: only in our ways."""

    whole: Span
    still: Span
    staging: Span | None = None


@dataclass(frozen=True)
class Episode:
    """One arm's turn: streams that decoded the whole time, and the updates meanwhile.

    `streams`: when each token of each stream came, ascending; times before `settled` are left out of everything.
    """

    arm: str
    settled: float
    streams: Sequence[Sequence[float]]
    updates: Sequence[Update]

    @cached_property
    def times(self) -> list[float]:
        """Of the first stream, from `settled` on."""
        first = self.streams[0]
        return list(first[bisect_left(first, self.settled) :])

    @cached_property
    def _undisturbed(self) -> list[tuple[float, float]]:
        return [gap for gap in pairwise(self.times) if not self._disturbed(*gap)]

    @property
    def undisturbed_s(self) -> list[float]:
        """The gaps of the first stream that lie outside of every update. Raises ValueError when there is none."""
        if not self._undisturbed:
            raise ValueError(f"{self.arm}: no undisturbed gap in {len(self.times)} tokens: leave more quiet time")
        return [end - begin for begin, end in self._undisturbed]

    @property
    def usual_s(self) -> float:
        """The median undisturbed gap: one decode step."""
        return median(self.undisturbed_s)

    def quiet_s(self, update: Update) -> list[float]:
        """The undisturbed gaps next to an update, as many before as after it. Raises ValueError when there is none."""
        after = self._after(update)
        before = [end - begin for begin, end in self._undisturbed if end <= update.whole.begin]
        behind = [end - begin for begin, end in self._undisturbed if begin >= after]
        near = min(len(before), len(behind), QUIET)
        if not near:
            raise ValueError(
                f"{self.arm}: no undisturbed gap before an update, or none after it: leave more quiet time"
            )
        return before[-near:] + behind[:near]

    def stall_ms(self, update: Update) -> float:
        """Raises ValueError for an update that lies outside of the tokens seen, or has no quiet around it."""
        window = [end - begin for begin, end in pairwise(self.times[slice(*self._window(update))])]
        return stall(window, self.quiet_s(update)) * 1e3

    def own_gap_ms(self, update: Update) -> float:
        """What the gap in which the update was over had more than usual: of a moment, the one gap that it fell into."""
        after = bisect_left(self.times, update.still.end)
        if not 0 < after < len(self.times):
            raise ValueError(f"{self.arm}: an update lies outside of the tokens seen: leave more time around it")
        return (self.times[after] - self.times[after - 1] - median(self.quiet_s(update))) * 1e3

    def gaps_around(self, update: Update, reach_s: float) -> list[tuple[float, float]]:
        """`(seconds after the middle of its still span, gap in ms)` of the gaps that end within `reach_s` of it."""
        middle = (update.still.begin + update.still.end) / 2
        gaps = [(end - middle, (end - begin) * 1e3) for begin, end in pairwise(self.times)]
        return [gap for gap in gaps if -reach_s <= gap[0] <= reach_s]

    def tokens_lost(self, update: Update) -> float:
        """Of all streams together; below 0 where more were drawn than usual."""
        span = Span(update.whole.begin, self._after(update))
        return (span.seconds / fmean(self.quiet_s(update)) - self._drawn_in(span)) * len(self.streams)

    def pace(self, update: Update) -> float:
        """While an update is staged; 1.0 is undisturbed. Raises ValueError for one that is not staged."""
        if update.staging is None:
            raise ValueError(f"{self.arm}: an update without staging has no pace")
        return self._drawn_in(update.staging) * fmean(self.quiet_s(update)) / update.staging.seconds

    def _drawn_in(self, span: Span) -> float:
        """Tokens of the first stream; of one that comes within the span, the part of its gap counts that lies in it."""
        return self._drawn(span.end) - self._drawn(span.begin)

    def _drawn(self, at: float) -> float:
        """Tokens of the first stream until `at`; one under way counts by the part of its gap."""
        times = self.times
        after = bisect_right(times, at)
        if not 0 < after < len(times):
            raise ValueError(f"{self.arm}: {at} lies outside of the tokens seen")
        return after + (at - times[after - 1]) / (times[after] - times[after - 1])

    def _window(self, update: Update) -> tuple[int, int]:
        """The tokens between which the gaps of an update's window lie, as a slice."""
        first = bisect_right(self.times, update.still.begin) - 1
        last = bisect_left(self.times, update.still.end)
        if first < 0 or last >= len(self.times):
            raise ValueError(f"{self.arm}: an update lies outside of the tokens seen: leave more time around it")
        return max(0, first - WINDOW), last + WINDOW + 1

    def _after(self, update: Update) -> float:
        """When the window of an update is over: nothing of it is left in later gaps."""
        end = bisect_left(self.times, update.whole.end) + WINDOW
        return self.times[min(end, len(self.times) - 1)]

    def _disturbed(self, begin: float, end: float) -> bool:
        return any(begin <= self._after(update) and end > update.whole.begin for update in self.updates)

"""Benchmark arms: each way of updating the weights of an engine while it decodes, and the figures of an episode.

begin streams ─ quiet ─ update ─ quiet ─ update ─ … ─ quiet ─ end        `Ways.episode`

nixl, shm    publish ─► stage, while tokens are sampled ─► commit between two steps
file         save ─► pause · copy from the file over the live tensors · resume
prefetch     save ─► read into the engine's memory ─► pause · copy over the live tensors · resume
gloo         pause · receive a broadcast into the live tensors · resume
nothing      no update: how much the figures vary by themselves
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Literal

import msgspec

from benchmarks.harness.processes import Piped, free_port
from services.policies.stall import QUIET, WINDOW, stall

NOTHING = "nothing"
_NOTHING_S = 0.3


class Ways:
    """One engine and one publisher, and every way from the one to the other. `folder`: for the file that is saved."""

    def __init__(self, engine: Piped, publisher: Piped, folder: Path, transports: list[str]) -> None:
        self._engine = engine
        self._publisher = publisher
        self._file = str(folder / "update.safetensors")
        self._versions = count(1)
        self._updates: dict[str, Callable[[], Awaitable[Update]]] = {name: self._ours(name) for name in transports}
        self._updates |= {way: self._paused(way) for way in PAUSED_WAYS}
        self._updates[NOTHING] = _nothing

    @property
    def arms(self) -> list[str]:
        return list(self._updates)

    async def join(self) -> None:
        """Make the gloo group of the two processes."""
        join = Join(free_port())
        await asyncio.gather(self._publisher.ask(join, Done), self._engine.ask(join, Done))

    async def update(self, arm: str) -> Update:
        """Change the weights and bring them into the engine."""
        await self._publisher.ask(Change(), Done)
        return await self._updates[arm]()

    async def episode(self, arm: str, streams: Begin, *, updates: int, quiet_s: float, name: str = "") -> Episode:
        """One round of an arm; `name`: what to call it instead."""
        await self._engine.ask(streams, Done)
        settled = time.monotonic()
        done = []
        quiet = Quiet(quiet_s, WINDOW + 3)  # the token in which the update ends, its window, and the two of a gap
        for _ in range(updates):
            await self._engine.ask(quiet, Done)
            done.append(await self.update(arm))
        await self._engine.ask(quiet, Done)
        arrivals = await self._engine.ask(End(), Arrivals)
        return Episode(name or arm, settled, arrivals.streams, done)

    async def staged(self, transport: str) -> tuple[int, float, Span]:
        """Publish the weights as they are and stage them: version, when publishing began, when it was staged."""
        version, begin = next(self._versions), time.monotonic()
        published = await self._publisher.ask(Publish(transport, version), Published)
        span = await self._engine.ask(Stage(published.manifest), Span)
        return version, begin, span

    def _ours(self, transport: str) -> Callable[[], Awaitable[Update]]:
        async def update() -> Update:
            version, begin, staging = await self.staged(transport)
            committed = await self._engine.ask(Commit(version), Span)
            # The engine answers right after the flip, before the step that generates the next token has ended.
            return Update(Span(begin, committed.end), Span(committed.end, committed.end), staging)

        return update

    def _paused(self, way: PausedWay) -> Callable[[], Awaitable[Update]]:
        async def update() -> Update:
            begin = time.monotonic()
            if way == "gloo":
                # It waits in its broadcast before the engine pauses.
                sending = asyncio.ensure_future(self._publisher.ask(Broadcast(), Span))
                still = await self._engine.ask(Reload(way), Span)
                await sending
            else:
                await self._publisher.ask(Save(self._file), Span)
                if way == "prefetch":
                    await self._engine.ask(Prefetch(self._file), Span)
                still = await self._engine.ask(Reload(way, self._file), Span)
            return Update(Span(begin, still.end), still)

        return update


async def _nothing() -> Update:
    begin = time.monotonic()
    await asyncio.sleep(_NOTHING_S)
    end = time.monotonic()
    return Update(Span(begin, end), Span(end, end))


# Messages to the benchmark's two processes: the publisher (the trainer's side) and the engine under test. All times are
# of the host's monotonic clock, in seconds.

PausedWay = Literal["file", "gloo", "prefetch"]
PAUSED_WAYS: tuple[PausedWay, ...] = ("file", "gloo", "prefetch")


class Done(msgspec.Struct, frozen=True):
    """Done, without a result."""


class Span(msgspec.Struct, frozen=True):
    """An interval."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


# To both: rank 0 is the publisher.
class Join(msgspec.Struct, frozen=True, tag="join"):
    """Make the gloo group of two; the publisher serves its store at `port` on loopback. Answer: Done."""

    port: int


# To the publisher.
class Change(msgspec.Struct, frozen=True, tag="change"):
    """Change some numbers in every tensor, as a step of the optimizer would change all. Answer: Done."""


class Publish(msgspec.Struct, frozen=True, tag="publish"):
    """Publish as `version` over `transport` and make the manifest. Answer: Published."""

    transport: str
    version: int


class Published(msgspec.Struct, frozen=True):
    manifest: bytes


class TimePublishing(msgspec.Struct, frozen=True, tag="time_publishing"):
    """Publish so many times beside a memcpy of the same bytes, in turns. Answer: PublishRounds.

    `apart`: weights that are not contiguous, unlike our trainer's.
    """

    transport: str
    rounds: int
    apart: bool


class PublishRounds(msgspec.Struct, frozen=True):
    """Milliseconds, round by round."""

    memcpy_ms: list[float]
    publish_ms: list[float]


class Save(msgspec.Struct, frozen=True, tag="save"):
    """Write a safetensors file. Answer: Span."""

    path: str


class Broadcast(msgspec.Struct, frozen=True, tag="broadcast"):
    """Send every tensor to the engine over gloo. Answer: Span."""


# To the engine.
class Begin(msgspec.Struct, frozen=True, tag="begin"):
    """Decode so many streams at once until `End`. Answered (Done) when each has sampled a few tokens.

    `again`: a stream that reaches `max_tokens` starts over; else `End` fails if one has. `plain`: layers use their live
    weights, as they must where these are loaded in place; otherwise vLLM on a CPU uses packed copies.
    """

    prompts: list[list[int]]
    max_tokens: int
    again: bool = False
    plain: bool = False


class Quiet(msgspec.Struct, frozen=True, tag="quiet"):
    """Decode for so long, and until each stream has sampled at so many different times meanwhile. Answer: Done."""

    seconds: float
    times: int


class End(msgspec.Struct, frozen=True, tag="end"):
    """Stop decoding. Answer: Arrivals."""


class Arrivals(msgspec.Struct, frozen=True):
    """When each token of each stream arrived at its reader."""

    streams: list[list[float]]


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """Stage a version while decoding. Answer: Span."""

    manifest: bytes


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """Flip to a staged version. Answer: Span."""

    version: int


class Prefetch(msgspec.Struct, frozen=True, tag="prefetch"):
    """Read a safetensors file into this process's memory while decoding. Answer: Span."""

    path: str


class Reload(msgspec.Struct, frozen=True, tag="reload"):
    """Pause with requests kept, load over the live weights, resume. Answer: Span of all three."""

    way: PausedWay
    path: str = ""


class Greedy(msgspec.Struct, frozen=True, tag="greedy"):
    """Generate the likeliest tokens. Answer: Sampled."""

    prompts: list[list[int]]
    max_tokens: int


class AskHeld(msgspec.Struct, frozen=True, tag="held"):
    """What is held for updates. Answer: HeldBytes."""


class HeldBytes(msgspec.Struct, frozen=True):
    """Bytes beside the served weights; `host`: of those in the host's memory (`weight_bus.vllm.sets.Held`)."""

    beside: int
    host: int


class Sampled(msgspec.Struct, frozen=True):
    """Tokens of each prompt, and their logprobs."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]


ToPublisher = Join | Change | Publish | TimePublishing | Save | Broadcast
ToEngine = Join | Begin | Quiet | End | Stage | Commit | Prefetch | Reload | Greedy | AskHeld


@dataclass(frozen=True)
class Update:
    """One weight update. `whole`: from the first byte moved until the new version is served. `still`: while decoding was or
    may have been paused; for our commits the moment of the flip. `staging`: only for ours.
    """

    whole: Span
    still: Span
    staging: Span | None = None


@dataclass(frozen=True)
class Episode:
    """One turn of an arm: streams that decoded the whole time, and the updates meanwhile: stall, tokens lost, speed.

        tokens   |   |   |   |   |         |   |   |   |        gaps between the tokens of one stream
        update         begin ┄┄┄ still ┄┄┄ end
        window                 └───────────────┘                the gaps that touch `still`, one before them, one after
        quiet    └─────┘                         └──────┘       the undisturbed gaps next to it, `QUIET` on each side

    `services.policies.stall` defines the **stall**; a gap is undisturbed outside of every update. **Tokens lost**: those
    that undisturbed decoding would have sampled from the update's begin until a gap after its end, less those sampled.
    **Pace**: decode speed while staging, relative to undisturbed decoding.

    `streams`: when each token of each stream arrived, ascending; times before `settled` are ignored.
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
        return [(begin, end) for begin, end in pairwise(self.times) if not self._disturbed(begin, end)]

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
        first, last = self._window(update)
        window = [end - begin for begin, end in pairwise(self.times[first:last])]
        return stall(window, self.quiet_s(update)) * 1e3

    def own_gap_ms(self, update: Update) -> float:
        """The length over the usual of the gap in which the update ended; of a commit, the gap that the flip fell into."""
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
        """Of all streams together; below 0 where more were sampled than usual."""
        span = Span(update.whole.begin, self._after(update))
        return (span.seconds / fmean(self.quiet_s(update)) - self._sampled_in(span)) * len(self.streams)

    def pace(self, update: Update) -> float:
        """Decode speed while an update is staged; 1.0 is undisturbed. Raises ValueError for one that is not staged."""
        if update.staging is None:
            raise ValueError(f"{self.arm}: an update without staging has no pace")
        return self._sampled_in(update.staging) * fmean(self.quiet_s(update)) / update.staging.seconds

    def _sampled_in(self, span: Span) -> float:
        """Tokens of the first stream; of one that comes within the span, the part of its gap counts that lies in it."""
        return self._sampled(span.end) - self._sampled(span.begin)

    def _sampled(self, at: float) -> float:
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

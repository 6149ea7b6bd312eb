"""What the benchmark says to its two processes: the publisher (the trainer's side) and the engine under test.

All times are of the host's monotonic clock, in seconds: the same in every process.
"""

from __future__ import annotations

from typing import Literal

import msgspec

PausedWay = Literal["file", "gloo", "prefetch"]
PAUSED_WAYS: tuple[PausedWay, ...] = ("file", "gloo", "prefetch")


class Done(msgspec.Struct, frozen=True):
    """It is done, and there is nothing to tell."""


class Span(msgspec.Struct, frozen=True):
    """From when to when something took place."""

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

    `apart`: weights that lie wherever the allocator puts them, and not in one piece, as our trainer's.
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
    """Decode so many streams at once until `End`. Answered (Done) when each has drawn a few tokens.

    `again`: a stream that has come to `max_tokens` begins anew; else `End` fails if one has. `plain`: layers multiply their
    live weights, as they must where these are loaded in place; otherwise vLLM on a CPU multiplies packed copies.
    """

    prompts: list[list[int]]
    max_tokens: int
    again: bool = False
    plain: bool = False


class End(msgspec.Struct, frozen=True, tag="end"):
    """Stop decoding. Answer: Arrivals."""


class Arrivals(msgspec.Struct, frozen=True):
    """When each token of each stream came to whoever asked for it."""

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
    """Draw the likeliest tokens. Answer: Drawn."""

    prompts: list[list[int]]
    max_tokens: int


class Drawn(msgspec.Struct, frozen=True):
    """Tokens of each prompt, and their logprobs."""

    token_ids: list[list[int]]
    logprobs: list[list[float]]


ToPublisher = Join | Change | Publish | TimePublishing | Save | Broadcast
ToEngine = Join | Begin | End | Stage | Commit | Prefetch | Reload | Greedy

"""Protocol between the reward service and a worker: lines of JSON over the worker's standard input and output.

service ──Order──► worker   imports the function under its limits
        ◄──Ready | Refused──
        ──Call───►          forks a child for it, which is the first to look into it
        ◄──Value | Failed── once the child is gone
        ──(end of input)──► kills a child in flight, and ends

What a call's child writes is anybody's: `read` takes whatever bytes there are.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import msgspec

from services.policies.rewards import RewardFailure
from services.wire.errors import RollmeshError

MAX_REPLY_BYTES = 64 << 10
"""A longer line is no reply."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """`services.wire.reward_api.JudgeSample`, checked."""

    task: str
    prompt: str | None
    messages: list[dict[str, Any]] | None
    answer: str
    complete: bool
    metadata: dict[str, Any]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a call may take. `time_s` is wall time; processor time is bounded by it too."""

    time_s: float
    memory_mib: int
    network: bool
    processes: bool


class Files(msgspec.Struct, frozen=True, kw_only=True):
    """What a call may read besides the system and Python. All absolute paths.

    `folder`: where modules are looked for after Python's own path. `readable`: what settings add. `hidden`: keys, wherever
    they lie.
    """

    folder: str
    readable: list[str]
    hidden: list[str]


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """`function`: `module:function`. `must_hold`: nothing is imported where a limit cannot be enforced."""

    function: str
    files: Files
    limits: Limits
    must_hold: bool


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The function is imported. `held_by`: the kernel's means; `not_confined`: what they cannot enforce; in words."""

    held_by: str
    not_confined: list[str]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """There is no such function, or it cannot be called."""

    why: str
    remedy: str


class Call(msgspec.Struct, frozen=True):
    sample: Sample


class Value(msgspec.Struct, frozen=True, tag=True):
    """Finite."""

    value: float

    def __post_init__(self) -> None:
        if not math.isfinite(self.value):
            raise ValueError(f"{self.value} is no reward")


class Failed(msgspec.Struct, frozen=True, tag=True):
    """`said`: the end of what the function wrote to standard output and error."""

    cause: RewardFailure
    what: str
    said: str = ""


Started = Ready | Refused
Outcome = Value | Failed

order_decoder: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
call_decoder: msgspec.json.Decoder[Call] = msgspec.json.Decoder(Call)
started_decoder: msgspec.json.Decoder[Started] = msgspec.json.Decoder(Started)
outcome_decoder: msgspec.json.Decoder[Outcome] = msgspec.json.Decoder(Outcome)

MessageT = TypeVar("MessageT")


class ProtocolError(RollmeshError):
    """Bytes that are no message of this protocol."""


def read(line: bytes, decoder: msgspec.json.Decoder[MessageT]) -> MessageT:
    """Raises ProtocolError, whatever the bytes."""
    try:
        return decoder.decode(line)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"no message ({type(error).__name__}: {error})") from error

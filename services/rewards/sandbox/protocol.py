"""Protocol between the reward service and a worker: lines of JSON over the worker's standard input and output.

service ──Order──► worker   imports the function under its limits
        ◄──Ready | Refused──
        ──Call───►          forks a child for it
        ◄──Value | Failed── once the child is gone
        ──(end of input)──► kills a child in flight, and ends
"""

from __future__ import annotations

from typing import Any

import msgspec

from services.policies.rewards import RewardFailure

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


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """`function`: `module:function`. `folder`: where modules are looked for after Python's own path."""

    function: str
    folder: str
    limits: Limits


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The function is imported. `not_confined`: limits that this machine cannot enforce, in words."""

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


class Failed(msgspec.Struct, frozen=True, tag=True):
    """`said`: the end of what the function wrote to standard output and error."""

    cause: RewardFailure
    what: str
    said: str = ""


Started = Ready | Refused
Outcome = Value | Failed

"""Which earlier call does this one repeat? Pure.

| the call carries         | it is                                                                            |
|--------------------------|----------------------------------------------------------------------------------|
| the gateway's name       | the call that carried the same name before                                       |
| an Idempotency-Key       | the call that carried the same key before; with another body an error            |
| the SDK's retry count ≥ 1 | the oldest call of the same body that no retry of that count has claimed yet     |
| neither                  | a new sample, also when the body is the same: siblings share prompts             |

Two agents that send the same body at the same time and both try again thus each get back an answer of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from services.wire.errors import RollmeshError

Value = TypeVar("Value")


class KeyReusedError(RollmeshError):
    """An Idempotency-Key came again with another body."""

    status = 422
    code = "idempotency_key_reused"

    def __init__(self, key: str) -> None:
        super().__init__(f"Idempotency-Key {key!r} was used for another body", "give every new call a key of its own")


@dataclass(frozen=True, slots=True)
class Marks:
    """How a call is marked. `body`: a digest of route and body. `retry`: how often its client sent it before.

    `call`: the name that the gateway gave it, the same for each server that it tries.
    """

    body: bytes
    key: str | None = None
    retry: int = 0
    call: str | None = None


@dataclass(slots=True, eq=False)
class _Known(Generic[Value]):
    marks: Marks
    value: Value
    claimed: int


class Retries(Generic[Value]):
    """The calls of one session that may still be repeated, oldest first."""

    def __init__(self) -> None:
        self._known: list[_Known[Value]] = []

    def __len__(self) -> int:
        return len(self._known)

    def find(self, marks: Marks) -> Value | None:
        """What was added for the call that this one repeats; None for a new one. Raises KeyReusedError."""
        if marks.call is not None:
            for known in self._known:
                if known.marks.call == marks.call:
                    return known.value
        if marks.key is not None:
            for known in self._known:
                if known.marks.key == marks.key:
                    if known.marks.body != marks.body:
                        raise KeyReusedError(marks.key)
                    return known.value
            return None
        if marks.retry < 1:
            return None
        for known in self._known:
            if known.marks.key is None and known.marks.body == marks.body and known.claimed < marks.retry:
                known.claimed = marks.retry
                return known.value
        return None

    def named(self, call: str | None) -> bool:
        """Whether a call of this name is known."""
        return call is not None and any(known.marks.call == call for known in self._known)

    def add(self, marks: Marks, value: Value) -> None:
        self._known.append(_Known(marks, value, marks.retry))

    def forget(self, value: Value) -> None:
        self._known = [known for known in self._known if known.value is not value]

    def values(self) -> list[Value]:
        return [known.value for known in self._known]

"""Finding the longest remembered sequence that a new one extends, without keeping the sequences themselves.

    remembered   p q r            digest(p q r) ──► value
                 p q r s t        digest(p q r s t) ──► value
    longest(p q r s u v) = the value of `p q r`, and 3

Cost of a look-up: one hash over the new sequence, a digest at each remembered length. Pure.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from hashlib import blake2b
from typing import Generic, TypeVar

Value = TypeVar("Value")
_DIGEST_BYTES = 16


def digest_of(sequence: bytes) -> bytes:
    return blake2b(sequence, digest_size=_DIGEST_BYTES).digest()


class PrefixIndex(Generic[Value]):
    """Values by byte strings. Of two with the same bytes the first remembered is kept, so that a look-up stays stable."""

    def __init__(self) -> None:
        self._values: dict[bytes, Value] = {}
        self._lengths: list[int] = []

    def add(self, sequence: bytes, value: Value) -> None:
        self.add_digest(digest_of(sequence), len(sequence), value)

    def add_digest(self, digest: bytes, length: int, value: Value) -> None:
        """`add` for a sequence of which only the digest and the length are known."""
        if digest in self._values:
            return
        self._values[digest] = value
        at = bisect_right(self._lengths, length)
        if at == 0 or self._lengths[at - 1] != length:
            insort(self._lengths, length)

    def longest(self, sequence: bytes) -> tuple[Value, int] | None:
        """The value of the longest remembered byte string that `sequence` begins with, and its length in bytes."""
        hasher, hashed, found = blake2b(digest_size=_DIGEST_BYTES), 0, None
        view = memoryview(sequence)
        for length in self._lengths[: bisect_right(self._lengths, len(sequence))]:
            hasher.update(view[hashed:length])
            hashed = length
            value = self._values.get(hasher.copy().digest())
            if value is not None:
                found = value, length
        return found

"""Which examples are held out, and the order in which the others are trained on. Pure: the same inputs, the same choice.

An example is held out by a hash of itself: whatever else the data holds, whatever its order, and in whichever run, it is on
the same side, and two equal ones always are.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence

import msgspec
import numpy as np

from trainer.sft.columns import Example

_SCALE = 2.0**64


def place_of(example: Example) -> float:
    """Where an example lies in 0 … 1, by a hash of all that it holds."""
    content = msgspec.json.encode([type(example).__name__, dataclasses.asdict(example)], order="sorted")
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") / _SCALE


def held_out(places: Sequence[float], share: float) -> list[bool]:
    """Which examples are held out: those whose place is below `share`; of too few for that, the lowest alone (and its
    equals). None where the share is 0."""
    bound = max(share, math.nextafter(min(places, default=0.0), 1.0)) if share else 0.0
    return [place < bound for place in places]


def steps_of(examples: int, examples_per_step: int, epochs: int) -> int:
    """Optimizer steps in which each of so many examples is trained on `epochs` times; the last may hold fewer."""
    return math.ceil(examples * epochs / examples_per_step)


class Order:
    """Examples by number, shuffled anew for each epoch, in batches that go on from one epoch into the next."""

    def __init__(self, examples: int, examples_per_step: int, seed: int, last: int | None = None) -> None:
        """`last`: how many are given out in all; None: without end."""
        self._examples, self._size, self._seed, self._last = examples, examples_per_step, seed, last

    def batch(self, step: int) -> list[int]:
        """The examples of step 0, 1, …"""
        start = step * self._size
        stop = start + self._size if self._last is None else min(start + self._size, self._last)
        found: list[int] = []
        while start < stop:
            epoch, at = divmod(start, self._examples)
            taken = self._epoch(epoch)[at : at + stop - start]
            found += taken
            start += len(taken)
        return found

    def epoch(self, step: int) -> int:
        """Of the first example of a step, from 1."""
        return step * self._size // self._examples + 1

    def _epoch(self, number: int) -> list[int]:
        order = np.random.Generator(np.random.PCG64([self._seed, number])).permutation(self._examples)
        return [int(place) for place in order]

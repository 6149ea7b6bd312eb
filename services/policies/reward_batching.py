"""Batching of calls to a reward model: when waiting samples are sent, and how many together. Pure: the caller has a clock.

    offer ──► waiting, oldest first ──due: a full batch, or the oldest has waited long enough, and a place is free──► sent
      └─full─► refused                └──withdraw: its caller gave up                                       done ◄──────┘

Invariants: what was offered is sent once, withdrawn, or still waiting; batches hold 1 … `largest` samples, in the order
of their coming; at most `at_once` batches are out; at most `capacity` samples wait.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class BatchRules:
    """`linger_s`: how long the oldest sample waits for others to fill its batch. All others are counts, at least 1."""

    largest: int
    linger_s: float
    at_once: int
    capacity: int


class BatchQueue(Generic[ItemT]):
    """Items are told apart by identity. `now`: seconds of any clock that only goes forward."""

    def __init__(self, rules: BatchRules) -> None:
        self._rules = rules
        self._waiting: deque[tuple[float, ItemT]] = deque()
        self.out = 0
        """Batches that were sent and not answered."""

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self._rules.capacity

    def offer(self, item: ItemT, now: float) -> bool:
        """Let it wait; False where the queue is full."""
        if self.full:
            return False
        self._waiting.append((now, item))
        return True

    def withdraw(self, item: ItemT) -> None:
        """Forget an item that still waits; one that does not is no error."""
        self._waiting = deque(each for each in self._waiting if each[1] is not item)

    def due_in(self, now: float) -> float | None:
        """Seconds until a batch can be taken, 0 for now; None while nothing waits, or no place is free."""
        if not self._waiting or self.out >= self._rules.at_once:
            return None
        if len(self._waiting) >= self._rules.largest:
            return 0.0
        return max(0.0, self._waiting[0][0] + self._rules.linger_s - now)

    def take(self, now: float) -> list[ItemT]:
        """The batch that is due; empty where none is. `done` gives its place back."""
        if self.due_in(now) != 0.0:
            return []
        self.out += 1
        return [self._waiting.popleft()[1] for _ in range(min(self._rules.largest, len(self._waiting)))]

    def done(self) -> None:
        """A batch was answered, or given up."""
        self.out -= 1

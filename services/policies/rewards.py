"""Reward composition: named components to one reward, and how a component without a value is treated. Pure.

    sum        reward = Σ wᵢ·rᵢ
    product    reward = Π rᵢ^wᵢ

A component without a value is never taken for zero: either the reward fails with it, or the value that its settings name
stands in and is told apart as substituted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Literal, TypeVar

Combine = Literal["sum", "product"]


class RewardFailure(StrEnum):
    """Why a component has no value; counted by these."""

    TIMEOUT = "timeout"
    """The function ran longer than its time limit."""
    MEMORY = "memory"
    CRASH = "crash"
    """Its process ended by a signal or by itself."""
    RAISED = "raised"
    OUTPUT = "output"
    """It wrote more than it may."""
    VALUE = "value"
    """What it returned is no finite number, or one that the formula cannot take."""
    SAMPLE = "sample"
    """The sample lacks what the function asks for."""
    LATE = "late"
    """The component's deadline passed, waiting included."""
    REFUSED = "refused"
    """The reward model's server refused the sample."""
    UNREACHABLE = "unreachable"
    """The reward model's server did not answer, in time or as it should."""


@dataclass(frozen=True)
class Failure:
    """`what`: in words, with what the component wrote where it wrote anything."""

    cause: RewardFailure
    what: str


@dataclass(frozen=True)
class Term:
    """One component of the formula. `substitute`: stands in for a missing value; None: the reward fails with it.

    `clip`: the least and the largest value that count. `tasks`: those that it is part of; empty: all.
    """

    name: str
    weight: float = 1.0
    substitute: float | None = None
    clip: tuple[float, float] | None = None
    tasks: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """As it stands in the formula."""
        name = f"{self.name}[{', '.join(self.tasks)}]" if self.tasks else self.name
        return name if self.clip is None else f"clip({name}, {self.clip[0]:g}, {self.clip[1]:g})"

    def judges(self, task: str) -> bool:
        """Whether it is part of the reward of this task."""
        return not self.tasks or task in self.tasks


@dataclass(frozen=True)
class Composed:
    """`components`: unweighted, substitutes included; `substituted`: which of them are, and why."""

    reward: float
    components: Mapping[str, float]
    substituted: Mapping[str, RewardFailure] = field(default_factory=dict)


@dataclass(frozen=True)
class NotComposed:
    """The first component, in the formula's order, whose failure is the reward's."""

    component: str
    failure: Failure


def describe_formula(combine: Combine, terms: Sequence[Term]) -> str:
    """`reward = 1·exact + 0.2·helpful`."""
    if combine == "sum":
        return "reward = " + " + ".join(f"{term.weight:g}·{term.shown}" for term in terms)
    return "reward = " + " · ".join(
        term.shown if term.weight == 1.0 else f"{term.shown}^{term.weight:g}" for term in terms
    )


def compose(combine: Combine, terms: Sequence[Term], values: Mapping[str, float | Failure]) -> Composed | NotComposed:
    """The reward of one sample. `values` has an entry for each term, and only finite numbers."""
    components: dict[str, float] = {}
    substituted: dict[str, RewardFailure] = {}
    parts: list[float] = []
    for term in terms:
        value = values[term.name]
        part = value if isinstance(value, Failure) else _part(combine, term, value)
        if isinstance(part, Failure):
            if term.substitute is None:
                return NotComposed(term.name, part)
            value, substituted[term.name] = term.substitute, part.cause
            part = _part(combine, term, value)
            if isinstance(part, Failure):
                return NotComposed(term.name, part)
        assert not isinstance(value, Failure)
        components[term.name] = value
        parts.append(part)
    total = sum(parts) if combine == "sum" else math.prod(parts)
    if not math.isfinite(total):
        worst = max(zip(parts, terms, strict=True), key=lambda pair: abs(pair[0]))[1].name
        return NotComposed(worst, Failure(RewardFailure.VALUE, f"the reward would be {total:g}"))
    return Composed(total, components, substituted)


def _part(combine: Combine, term: Term, value: float) -> float | Failure:
    if term.clip is not None:
        value = min(max(value, term.clip[0]), term.clip[1])
    try:
        part = term.weight * value if combine == "sum" else math.pow(value, term.weight)
    except (ValueError, OverflowError):
        return Failure(RewardFailure.VALUE, f"{value:g}^{term.weight:g} is no number")
    return part if math.isfinite(part) else Failure(RewardFailure.VALUE, f"{term.weight:g}·{value:g} is too large")


ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class BatchRules:
    """`linger_s`: how long the oldest sample waits for others to fill its batch. All others are counts, at least 1."""

    largest: int
    linger_s: float
    at_once: int
    capacity: int


class BatchQueue(Generic[ItemT]):
    """Dynamic batching of calls to a reward model: when waiting samples are sent, and how many together.

        offer ──► waiting, oldest first ──due: full, or the oldest has waited long enough, and a place is free──► sent
          └─full─► refused    └──withdraw: its caller gave up                                          done ◄──────┘

    Invariants: what was offered is sent once, withdrawn, or still waiting; batches hold 1 … `largest` samples, in the order
    of their coming; at most `at_once` batches are out; at most `capacity` samples wait.

    Items are told apart by identity. `now`: seconds of any clock that only goes forward.
    """

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

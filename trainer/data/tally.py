"""Tally of what was trained: as the step log has it when a trainer starts, and as it settles from then on.

taken ──► in a batch ──settled──► trained: never taken again, however often Redis delivers it
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from services.policies.balance import Durable
from services.policies.batching import Group
from services.run_store.stream import stream_order
from services.wire.trajectory import Trajectory

_LATELY = 4096
"""Groups of which the names are kept: far more than are open at a time."""


class Tally:
    """`trained`: entries that were trained, from the last trim of the stream on. Its owner locks it."""

    def __init__(self) -> None:
        self.trained: set[str] = set()
        self._count = self._consumed = 0
        self._lately: OrderedDict[str, None] = OrderedDict()
        self._taken: dict[str, str] = {}

    def begin(self, trained: Collection[str], consumed: int) -> None:
        """What the step log holds: entries, and how many groups they were."""
        self.trained = set(trained)
        self._count, self._consumed = len(self.trained), consumed

    def take(self, batch: Sequence[Group[Trajectory]]) -> None:
        """These groups are in a batch."""
        for group in batch:
            self._taken |= {member.entry: group.group for member in group.members}

    def settle(self, entries: Sequence[str]) -> None:
        """Entries of a batch are settled as trained."""
        new = [entry for entry in entries if entry not in self.trained]
        self.trained.update(new)
        self._count += len(new)
        groups = {self._taken.pop(entry) for entry in new if entry in self._taken}
        self._consumed += len(groups)
        self._lately |= dict.fromkeys(groups)
        while len(self._lately) > _LATELY:
            self._lately.popitem(last=False)

    def drop(self, entries: Collection[str]) -> None:
        """Entries are settled as dropped."""
        for entry in entries:
            self._taken.pop(entry, None)

    def known(self, groups: Collection[str]) -> None:
        """Groups that an earlier incarnation of the trainer consumed."""
        self._lately |= dict.fromkeys(groups)

    def forget_before(self, stream_id: str) -> None:
        """Entries before this one are gone from the stream: nobody will deliver them."""
        horizon = stream_order(stream_id)
        self.trained = {entry for entry in self.trained if stream_order(entry) >= horizon}

    def durable(self, held: Collection[str]) -> Durable:
        """`held`: groups that wait for a batch."""
        return Durable(
            trained=self._count,
            consumed=self._consumed,
            consumed_lately=frozenset(self._lately),
            held=frozenset(held) | frozenset(self._taken.values()),
        )


@dataclass
class Arrivals:
    """What came of the stream since the metrics line before.

    `tokens`: sampled ones of the `trajectories` that were fit to be trained.
    `dropped`: trajectories by cause, unfit ones and their siblings.
    """

    trajectories: int = 0
    tokens: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    busy_s: float = 0.0
    """Spent on entries, not on waiting for them."""

"""Balance of a run's account: what Redis counts, against what follows from the stream and the trainer's step log. Pure.

    trained                      =  entries of the step log that are settled
    published                    =  trained + dropped + delivered and not settled
    opened − dropped groups      =  groups that steps consumed + groups that are held or open
    closed groups                =  opened − open

Redis may come back with less than it had: an append-only file that lost its end, a replica that was behind. All of it is
then as it once was, its counters too, so that they agree with each other and not with what was trained. The step log and
the stream are what a trainer goes on from, so the counters are corrected to them.

A held group is one of which the trainer has a trajectory that it will train or drop. An open group that is held, or that a
step consumed (its server is about to close it), is not counted twice; one that counts as dropped already not at all.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass


@dataclass(frozen=True)
class Counted:
    """What Redis says at one moment, when everything in the stream has been read.

    `dropped`: trajectories. `unsettled`: those that are delivered, and neither trained nor dropped. `open_groups`: how many
    are open; `standing`: those of them that do not count as dropped.
    """

    published: int
    trained: int
    dropped: int
    unsettled: int
    opened_groups: int
    closed_groups: int
    dropped_groups: int
    open_groups: int
    standing: Set[str]


@dataclass(frozen=True)
class Durable:
    """What the trainer knows at the same moment. `trained`: entries that are settled as such.

    `consumed`: groups of these, how many in the whole run; `consumed_lately`: the last of them, by name. `held`: groups.
    """

    trained: int
    consumed: int
    consumed_lately: Set[str]
    held: Set[str]


@dataclass(frozen=True)
class Corrections:
    """What is to be added to the counters; all 0 where the account balances."""

    published: int = 0
    trained: int = 0
    opened_groups: int = 0
    closed_groups: int = 0
    dropped_groups: int = 0

    @property
    def unaccounted(self) -> int:
        """By how many trajectories and groups the account was wrong."""
        return max(abs(self.published), abs(self.trained)) + abs(self.opened_groups) + abs(self.dropped_groups)

    def __bool__(self) -> bool:
        return self != BALANCED


BALANCED = Corrections()


def corrections(counted: Counted, durable: Durable) -> Corrections:
    """Counters only grow: groups that are lost count as dropped, groups that Redis forgot as opened."""
    standing = (counted.standing | durable.held) - durable.consumed_lately
    lacking = durable.consumed + len(standing) - (counted.opened_groups - counted.dropped_groups)
    opened = max(0, lacking)
    return Corrections(
        published=durable.trained + counted.dropped + counted.unsettled - counted.published,
        trained=durable.trained - counted.trained,
        opened_groups=opened,
        closed_groups=counted.opened_groups + opened - counted.open_groups - counted.closed_groups,
        dropped_groups=max(0, -lacking),
    )

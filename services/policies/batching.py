"""Batching: trajectories into groups, groups into batches. Pure: the caller brings the clock.

    trajectory ──add──► partial group ──last sibling──► complete group ──take──► batch
                              │                               (oldest opened first)
                              └── a sibling can never be trained, or never comes ──► spoiled: all its siblings are dropped

Advantages compare siblings, so a group is trained whole or not at all. A batch takes the complete groups that were opened
first; it does not wait for an older one that is still incomplete (a straggler would stop the run), so a straggler gets
staler with each step that passes it, and the staleness window judges it token by token when it comes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

Payload = TypeVar("Payload")


class DropCause(StrEnum):
    """Why a published trajectory is never trained; the ledger counts drops by these."""

    UNDECODABLE = "undecodable"
    FOREIGN_RUN = "foreign_run"
    FUTURE_VERSION = "future_version"
    SAMPLING = "sampling"
    """Drawn greedily or from a truncated distribution: its logprobs are not those of the policy."""
    UNKNOWN_TOKEN = "unknown_token"
    TOO_LONG = "too_long"
    DUPLICATE = "duplicate"
    """A second trajectory of the same sibling, or one of a group that is settled."""
    INCONSISTENT_GROUP = "inconsistent_group"
    SPOILED_GROUP = "spoiled_group"
    """Sound itself, but a sibling of it can never be trained."""
    INCOMPLETE_GROUP = "incomplete_group"
    """Siblings of it did not come in time."""
    RUN_CONCLUDED = "run_concluded"


@dataclass(frozen=True)
class Member(Generic[Payload]):
    """One trajectory: which entry of the stream it is, and its place among its siblings."""

    entry: str
    group: str
    ordinal: int
    group_size: int
    index: int
    payload: Payload


@dataclass(frozen=True)
class Group(Generic[Payload]):
    """A complete group: `members` by index, 0 … group_size − 1."""

    group: str
    ordinal: int
    members: list[Member[Payload]]


@dataclass(frozen=True)
class Drop:
    entry: str
    cause: DropCause


@dataclass(frozen=True)
class Partial:
    """A group that waits for siblings."""

    group: str
    ordinal: int
    have: int
    size: int
    since: float


@dataclass
class Verdict:
    """What became of entries: those to drop, and the groups that will therefore never be trained."""

    drops: list[Drop] = field(default_factory=list)
    spoiled: list[str] = field(default_factory=list)


@dataclass
class _Gathering(Generic[Payload]):
    ordinal: int
    size: int
    since: float
    members: dict[int, Member[Payload]] = field(default_factory=dict)


class GroupAssembler(Generic[Payload]):
    """Assembles groups and hands out batches. Each entry leaves exactly once: in a batch, or as a drop.

    `remember`: of how many settled groups the ids are kept, so that a late duplicate is known for one.
    """

    def __init__(self, remember: int = 65_536) -> None:
        self._remember = remember
        self._partial: dict[str, _Gathering[Payload]] = {}
        self._complete: dict[str, Group[Payload]] = {}
        self._settled: OrderedDict[str, DropCause] = OrderedDict()

    @property
    def complete(self) -> int:
        """How many groups could be taken now."""
        return len(self._complete)

    def add(self, member: Member[Payload], now: float) -> Verdict:
        """Take up one trajectory at the time `now` (seconds on any clock that only goes forward)."""
        late = self._settled.get(member.group)
        if late is not None or member.group in self._complete:
            return Verdict([Drop(member.entry, late or DropCause.DUPLICATE)])
        gathering = self._partial.get(member.group)
        if gathering is None:
            gathering = _Gathering(member.ordinal, member.group_size, now)
            self._partial[member.group] = gathering
        agrees = (member.ordinal, member.group_size) == (gathering.ordinal, gathering.size)
        if not agrees or not 0 <= member.index < gathering.size:
            verdict = self.spoil(member.group)
            verdict.drops.append(Drop(member.entry, DropCause.INCONSISTENT_GROUP))
            return verdict
        if member.index in gathering.members:
            return Verdict([Drop(member.entry, DropCause.DUPLICATE)])
        gathering.members[member.index] = member
        if len(gathering.members) == gathering.size:
            del self._partial[member.group]
            members = [gathering.members[index] for index in range(gathering.size)]
            self._complete[member.group] = Group(member.group, gathering.ordinal, members)
        return Verdict()

    def spoil(self, group: str, cause: DropCause = DropCause.SPOILED_GROUP) -> Verdict:
        """A sibling of `group` can never be trained: drop those that came, and those that will come."""
        if group in self._settled:
            return Verdict()
        gathering = self._partial.pop(group, None)
        complete = self._complete.pop(group, None)
        members = [*gathering.members.values()] if gathering else complete.members if complete else []
        self._settle(group, cause)
        return Verdict([Drop(member.entry, cause) for member in members], [group])

    def overdue(self, before: float) -> list[str]:
        """The incomplete groups whose first sibling came before the time `before`."""
        return [group for group, gathering in self._partial.items() if gathering.since < before]

    def expire(self, groups: Iterable[str]) -> Verdict:
        """Spoil those of `groups` that are still incomplete: the caller knows that nothing more comes of them."""
        verdict = Verdict()
        for group in [group for group in groups if group in self._partial]:
            expired = self.spoil(group, DropCause.INCOMPLETE_GROUP)
            verdict.drops += expired.drops
            verdict.spoiled += expired.spoiled
        return verdict

    def take(self, groups: int) -> list[Group[Payload]] | None:
        """The `groups` complete groups that were opened first, in order of opening; None while there are fewer."""
        if len(self._complete) < groups:
            return None
        chosen = sorted(self._complete.values(), key=lambda group: (group.ordinal, group.group))[:groups]
        for group in chosen:
            del self._complete[group.group]
            self._settle(group.group, DropCause.DUPLICATE)
        return chosen

    def settle(self, groups: Iterable[str]) -> None:
        """Groups that an earlier life of the trainer consumed: what still comes of them is a duplicate."""
        for group in groups:
            self._settle(group, DropCause.DUPLICATE)

    def rest(self) -> list[str]:
        """Entries that are still here, in no batch and not dropped."""
        gathered = [member.entry for gathering in self._partial.values() for member in gathering.members.values()]
        return gathered + [member.entry for group in self._complete.values() for member in group.members]

    def oldest_partial(self) -> Partial | None:
        """The incomplete group that was opened first."""
        if not self._partial:
            return None
        group, gathering = min(self._partial.items(), key=lambda item: item[1].ordinal)
        return Partial(group, gathering.ordinal, len(gathering.members), gathering.size, gathering.since)

    def partial_payload(self, group: str) -> Payload | None:
        """Any trajectory of an incomplete group, to say who should send its siblings."""
        gathering = self._partial.get(group)
        return next((member.payload for member in gathering.members.values()), None) if gathering else None

    def _settle(self, group: str, later: DropCause) -> None:
        self._settled[group] = later
        while len(self._settled) > self._remember:
            self._settled.popitem(last=False)

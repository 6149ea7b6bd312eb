"""Batching: trajectories into groups, groups into batches. Pure: the caller brings the clock.

    trajectory ──add──► partial group ──last sibling──► complete group ──take──► batch
                              │                          ▲    (oldest opened first)
                              ├── the rest never comes ──┤ enough came: complete without the rest
                              │                          └ too few: all its siblings are dropped
                              └── a sibling is unfit ──► spoiled: all its siblings are dropped

Advantages compare siblings, so a group is trained in one step or not at all; where siblings expired or were given up, with
those that finished, if they are at least `smallest`. A batch takes the complete groups that were opened first; it does not
wait for an older one that is still incomplete (a straggler would stop the run), so a straggler gets staler with each step
that passes it, and the staleness window judges it token by token when it comes. How far a run may pass its oldest group is
admission's to say (`services.policies.admission`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

Payload = TypeVar("Payload")


class DropCause(StrEnum):
    """Why a published trajectory is never trained; the ledger counts drops by these."""

    UNDECODABLE = "undecodable"
    """No trajectory, or one of another schema."""
    MALFORMED = "malformed"
    """Its arrays, mask, spans or times contradict each other."""
    BAD_NUMBER = "bad_number"
    """A logprob, a reward or a time that cannot be one: no number, infinite, of a probability above 1."""
    EMPTY = "empty"
    """The policy sampled nothing of it."""
    TOKENIZER = "tokenizer"
    """Its ids are of another vocabulary than the trainer's."""
    FOREIGN_RUN = "foreign_run"
    FUTURE_VERSION = "future_version"
    SAMPLING = "sampling"
    """Sampled greedily, or from a distribution that was changed or truncated in a way that is not known."""
    NO_BLOB = "no_blob"
    """What its engine chose beside the tokens is missing in the blob store, or is not what its entry names."""
    UNKNOWN_TOKEN = "unknown_token"
    TOO_LONG = "too_long"
    DUPLICATE = "duplicate"
    """A second trajectory of the same sibling, or one of a group that is settled."""
    LATE = "late"
    """Its group is trained without it: it was believed to be lost."""
    INCONSISTENT_GROUP = "inconsistent_group"
    SPOILED_GROUP = "spoiled_group"
    """Sound itself, but a sibling of it can never be trained."""
    INCOMPLETE_GROUP = "incomplete_group"
    """Siblings of it expired or were given up, and too few finished."""
    EQUAL_REWARDS = "equal_rewards"
    """All siblings got the same reward, so that none is better than another (`services.policies.batching`)."""
    NO_BASELINE = "no_baseline"
    """Its group lost the sibling that the others are compared with."""
    NO_COST = "no_cost"
    """It lacks the reward component that is the run's cost."""
    ANOMALY = "anomaly"
    """The loss or the gradient of its batch was not finite (`trainer.on_anomaly=skip`)."""
    UNTRAINABLE = "untrainable"
    """Its batch ended the trainer each time that it was tried."""
    LOST = "lost"
    """Redis came back without a sibling of it."""
    RUN_CONCLUDED = "run_concluded"

    @property
    def fault(self) -> bool:
        """Something went wrong, so that somebody may want to look at it; else it is the run's ordinary course."""
        return self not in (DropCause.EQUAL_REWARDS, DropCause.RUN_CONCLUDED)


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
    """A complete group: `members` in order of their index, all of 0 … group_size − 1 unless siblings of it were lost."""

    group: str
    ordinal: int
    members: list[Member[Payload]]

    @property
    def lost(self) -> int:
        """Siblings that it is trained without."""
        return self.members[0].group_size - len(self.members)


Objection = tuple[DropCause, str]
"""A cause, and the cause in words."""


@dataclass(frozen=True)
class Drop:
    """`why`: the cause in words."""

    entry: str
    cause: DropCause
    why: str


@dataclass(frozen=True)
class Partial:
    """A group that waits for siblings."""

    group: str
    ordinal: int
    have: int
    size: int
    since: float
    lacking: tuple[int, ...]
    """The siblings that have not come, by their place in the group."""


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

    `smallest`: siblings that a group is trained with at the least, where others of it are lost. `remember`: of how many
    settled groups the ids are kept, so that a late duplicate is known for one. `judge`: says of a complete group why it is
    dropped all the same. Raises ValueError for `smallest` < 2: one alone has nobody to be compared with.
    """

    def __init__(
        self,
        smallest: int = 2,
        remember: int = 65_536,
        judge: Callable[[Group[Payload]], Objection | None] | None = None,
    ) -> None:
        if smallest < 2:
            raise ValueError(f"a group of at least {smallest}: there must be two to compare")
        self._smallest = smallest
        self._remember = remember
        self._judge = judge
        self._partial: dict[str, _Gathering[Payload]] = {}
        self._complete: dict[str, Group[Payload]] = {}
        self._settled: OrderedDict[str, DropCause] = OrderedDict()

    @property
    def complete(self) -> int:
        """How many groups could be taken now."""
        return len(self._complete)

    def add(self, member: Member[Payload], now: float) -> Verdict:
        """Take up one trajectory at the time `now` (seconds on any clock that only goes forward)."""
        late = self._settled.get(member.group) or self._complete_cause(member.group)
        if late is not None:
            return Verdict([Drop(member.entry, late, f"group {member.group} is settled")])
        gathering = self._partial.get(member.group)
        if gathering is None:
            gathering = _Gathering(member.ordinal, member.group_size, now)
            self._partial[member.group] = gathering
        agrees = (member.ordinal, member.group_size) == (gathering.ordinal, gathering.size)
        if not agrees or not 0 <= member.index < gathering.size:
            said = f"sibling {member.index} of {member.group_size} in group {member.group}, number {member.ordinal}"
            why = f"{said}: others of it are of {gathering.size}, number {gathering.ordinal}"
            verdict = self.spoil(member.group, why=why)
            verdict.drops.append(Drop(member.entry, DropCause.INCONSISTENT_GROUP, why))
            return verdict
        if member.index in gathering.members:
            first = gathering.members[member.index].entry
            why = f"sibling {member.index} of group {member.group} came before, as {first}"
            return Verdict([Drop(member.entry, DropCause.DUPLICATE, why)])
        gathering.members[member.index] = member
        return self._close(member.group) if len(gathering.members) == gathering.size else Verdict()

    def spoil(self, group: str, cause: DropCause = DropCause.SPOILED_GROUP, why: str = "a sibling is unfit") -> Verdict:
        """A sibling of `group` can never be trained: drop those that came, and those that will come."""
        if group in self._settled:
            return Verdict()
        gathering = self._partial.pop(group, None)
        complete = self._complete.pop(group, None)
        members = [*gathering.members.values()] if gathering else complete.members if complete else []
        self._settle(group, cause)
        return Verdict([Drop(member.entry, cause, f"group {group}: {why}") for member in members], [group])

    def overdue(self, before: float) -> list[str]:
        """The incomplete groups whose first sibling came before the time `before`."""
        return [group for group, gathering in self._partial.items() if gathering.since < before]

    def expire(self, groups: Iterable[str]) -> Verdict:
        """Those of `groups` that are still incomplete stay so: the caller knows that nothing more comes of them.

        With `smallest` siblings or more they are complete as they are, else they are dropped.
        """
        verdict = Verdict()
        for group in [group for group in groups if group in self._partial]:
            gathering = self._partial[group]
            have = len(gathering.members)
            why = f"{have} of {gathering.size} siblings finished, {self._smallest} are wanted"
            enough = have >= self._smallest
            expired = self._close(group) if enough else self.spoil(group, DropCause.INCOMPLETE_GROUP, why)
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
            self._settle(group.group, _late(group))
        return chosen

    def settle(self, groups: Iterable[str]) -> None:
        """Groups that an earlier incarnation of the trainer consumed: what still comes of them is a duplicate."""
        for group in groups:
            self._settle(group, DropCause.DUPLICATE)

    def rest(self) -> list[str]:
        """Entries that are still here, in no batch and not dropped."""
        gathered = [member.entry for gathering in self._partial.values() for member in gathering.members.values()]
        return gathered + [member.entry for group in self._complete.values() for member in group.members]

    def held(self) -> set[str]:
        """Groups of which entries are still here."""
        return {*self._partial, *self._complete}

    def lose(self, entries: Collection[str]) -> Verdict:
        """These entries are gone from the stream: a batch with them could not be made again. Their groups are dropped."""
        verdict, gone = Verdict(), frozenset(entries)
        members = {name: list(gathering.members.values()) for name, gathering in self._partial.items()}
        members |= {name: group.members for name, group in self._complete.items()}
        for name, siblings in members.items():
            if lost := [member for member in siblings if member.entry in gone]:
                why = f"Redis came back without {len(lost)} of its {len(siblings)} siblings"
                spoiled = self.spoil(name, DropCause.LOST, why)
                verdict.drops += spoiled.drops
                verdict.spoiled += spoiled.spoiled
        return verdict

    def oldest_partial(self) -> Partial | None:
        """The incomplete group that was opened first."""
        if not self._partial:
            return None
        group, gathering = min(self._partial.items(), key=lambda item: item[1].ordinal)
        have, size = len(gathering.members), gathering.size
        lacking = tuple(index for index in range(size) if index not in gathering.members)
        return Partial(group, gathering.ordinal, have, size, gathering.since, lacking)

    def partial_payload(self, group: str) -> Payload | None:
        """Any trajectory of an incomplete group, to say who should send its siblings."""
        gathering = self._partial.get(group)
        return next((member.payload for member in gathering.members.values()), None) if gathering else None

    def _close(self, group: str) -> Verdict:
        gathering = self._partial.pop(group)
        members = [gathering.members[index] for index in sorted(gathering.members)]
        self._complete[group] = Group(group, gathering.ordinal, members)
        objection = None if self._judge is None else self._judge(self._complete[group])
        return Verdict() if objection is None else self.spoil(group, *objection)

    def _complete_cause(self, group: str) -> DropCause | None:
        """What one more trajectory of a complete group is dropped for; None where it is not complete."""
        complete = self._complete.get(group)
        return None if complete is None else _late(complete)

    def _settle(self, group: str, later: DropCause) -> None:
        self._settled[group] = later
        while len(self._settled) > self._remember:
            self._settled.popitem(last=False)


def _late(group: Group[Payload]) -> DropCause:
    """What one more trajectory of a group that is trained is dropped for."""
    return DropCause.LATE if group.lost else DropCause.DUPLICATE


class GroupFilter:
    """Which complete groups enter a batch: DAPO's dynamic sampling (Yu et al. 2025, arXiv:2503.14476, equation 11).

        group complete ──► its baseline came? ──► rewards differ? ──► may be taken
                                 │ no                  │ no, and fewer than `most_equal` were dropped since the last batch
                                 └─────────────────────┴──► dropped, counted by cause; admission makes up for it

    A group whose rewards are all equal has advantages of 0. Where a task is solved, or hopeless, every group is such a one,
    and without a bound the run would open groups for ever: beyond `most_equal` of them between two batches (0: none is
    dropped) they are trained as they are. `baseline`: sibling 0 is what the others are compared with; without it a group is
    dropped.
    """

    def __init__(self, *, most_equal: int = 0, baseline: bool = False) -> None:
        self._most_equal, self._baseline = most_equal, baseline
        self._dropped = 0

    def judge(self, rewards: Mapping[int, float]) -> tuple[DropCause, str] | None:
        """`rewards`: of each sibling that finished, by its number. Why the group is dropped; None where it may be taken."""
        if self._baseline and (0 not in rewards or len(rewards) < 2):
            return DropCause.NO_BASELINE, "its greedy sibling was lost, or is alone"
        if self._dropped < self._most_equal and len(set(rewards.values())) == 1:
            self._dropped += 1
            reward = next(iter(rewards.values()))
            return DropCause.EQUAL_REWARDS, f"all {len(rewards)} rewards are {reward:g}: nothing to compare"
        return None

    def batch_taken(self) -> None:
        """The next batch begins."""
        self._dropped = 0

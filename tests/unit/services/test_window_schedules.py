"""K means K: ten thousand random schedules of a mesh through the policies that the live services call.

Servers generate, lag behind, stop and come back; siblings finish, are lost, come late; admission, assembling and the window
are the real modules. What a step may train on is judged against each token's own version, one by one.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from random import Random

from services.policies.admission import Account, AdmissionRules, places
from services.policies.batching import Group, GroupAssembler, Member
from services.wire.trajectory import VersionSpan
from trainer.data.staleness import NOT_SAMPLED, OVER_K, StalenessTally, count_only, judge

SCHEDULES = 10_000
EVENTS = 100


@dataclass
class Sibling:
    """`versions`: of each token, None where the environment wrote it."""

    group: str
    ordinal: int
    size: int
    index: int
    server: int
    versions: list[int | None]
    pace: float
    """How likely it is to be the next, beside others: some are stragglers."""

    def spans(self) -> list[VersionSpan]:
        found: list[VersionSpan] = []
        for place, version in enumerate(self.versions):
            if version is None:
                continue
            if found and found[-1].version == version and found[-1].start + found[-1].length == place:
                found[-1] = VersionSpan(found[-1].start, found[-1].length + 1, version)
            else:
                found.append(VersionSpan(place, 1, version))
        return found


@dataclass
class Mesh:
    chance: Random
    k: int
    rules: AdmissionRules
    engines: list[int]
    assembler: GroupAssembler[Sibling]
    stopped: set[int] = field(default_factory=set)
    playing: list[Sibling] = field(default_factory=list)
    open: dict[str, int] = field(default_factory=dict)
    version: int = 0
    opened: int = 0
    dropped: int = 0
    came: Counter[str] = field(default_factory=Counter)
    trained: list[str] = field(default_factory=list)
    masked: int = 0
    fresh: int = 0

    def run(self) -> None:
        for clock in range(EVENTS):
            event = self.chance.choices(
                (self.open_group, self.draw, self.end, self.step, self.commit, self.stop), (12, 8, 24, 12, 3, 1)
            )[0]
            event(clock)

    def open_group(self, clock: int) -> None:
        server = self.chance.randrange(len(self.engines))
        account = Account(self.opened, self.dropped, len(self.open), min(self.open.values(), default=self.opened))
        if server in self.stopped or not places(account, self.rules, self.engines[server]).admit(0):
            return
        group, size = f"g{self.opened}", self.chance.choice((2, 2, 3))
        pace = 0.05 if self.chance.random() < 0.2 else 1.0
        self.open[group] = self.opened
        self.playing += [Sibling(group, self.opened, size, index, server, [None], pace) for index in range(size)]
        self.opened += 1

    def _one_in_play(self) -> Sibling | None:
        living = [one for one in self.playing if one.server not in self.stopped]
        return self.chance.choices(living, [one.pace for one in living])[0] if living else None

    def draw(self, clock: int) -> None:
        one = self._one_in_play()
        if one is not None:
            one.versions += [self.engines[one.server]] * self.chance.randint(1, 4)
            one.versions += [None] * self.chance.randint(0, 1)

    def end(self, clock: int) -> None:
        """A sibling finishes, or is lost; the group's account is closed with its last one."""
        one = self._one_in_play()
        if one is None:
            return
        self.playing.remove(one)
        if self.chance.random() < 0.8:
            self.came[one.group] += 1
            entry = f"{one.group}/{one.index}"
            self.assembler.add(Member(entry, one.group, one.ordinal, one.size, one.index, one), now=clock)
        if all(sibling.group != one.group for sibling in self.playing):
            del self.open[one.group]
            self.assembler.expire([one.group])
            self.dropped += self.came[one.group] < 2

    def commit(self, clock: int) -> None:
        server = self.chance.randrange(len(self.engines))
        if server not in self.stopped:
            self.engines[server] = self.chance.randint(self.engines[server], self.version)

    def stop(self, clock: int) -> None:
        self.stopped ^= {self.chance.randrange(len(self.engines))}

    def step(self, clock: int) -> None:
        batch = self.assembler.take(self.rules.batch)
        if batch is None:
            return
        assert [group.ordinal for group in batch] == sorted(group.ordinal for group in batch)
        self.train(batch)
        self.version += 1
        if self.chance.random() < 0.8:
            self.commit(clock)

    def train(self, batch: list[Group[Sibling]]) -> None:
        tally, counted = StalenessTally(), StalenessTally()
        expected: Counter[int] = Counter()
        over = 0
        for group in batch:
            assert len(group.members) >= 2
            self.trained.append(group.group)
            for one in (member.payload for member in group.members):
                ages = judge(one.spans(), len(one.versions), self.version, self.k, tally)
                count_only(one.spans(), self.version, self.k, counted)
                assert len(ages.values) == len(one.versions), "context stays"
                for value, version in zip(ages.values.tolist(), one.versions, strict=True):
                    if version is None:
                        assert value == NOT_SAMPLED
                    elif self.version - version > self.k:
                        assert value == OVER_K
                        over += 1
                    else:
                        assert value == self.version - version
                        expected[value] += 1
        assert (tally.histogram, tally.masked) == (expected, over)
        assert counted == tally
        assert tally.largest <= self.k
        self.masked += tally.masked
        self.fresh += tally.fresh


def schedule(seed: int) -> Mesh:
    chance = Random(seed)
    k, batch = chance.choice((0, 1, 1, 2, 3)), chance.choice((1, 1, 2))
    rules = AdmissionRules(base_version=0, k=k, batch=batch, lookahead=chance.randint(2, 8))
    mesh = Mesh(chance, k, rules, [0] * chance.randint(1, 3), GroupAssembler())
    mesh.run()
    return mesh


def test_no_token_over_k_reaches_the_loss_under_ten_thousand_schedules() -> None:
    meshes = [schedule(seed) for seed in range(SCHEDULES)]
    for mesh in meshes:
        assert len(set(mesh.trained)) == len(mesh.trained), "a group is trained in one step"
    # The schedules must reach what they are about: steps, tokens over K, and such that are just not.
    assert sum(mesh.version for mesh in meshes) > 3 * SCHEDULES
    assert sum(mesh.masked > 0 for mesh in meshes) > SCHEDULES / 100
    assert sum(mesh.fresh > 0 for mesh in meshes) > SCHEDULES / 2

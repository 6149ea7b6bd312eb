"""Admission: its three bounds hold under any schedule, and nobody waits for ever."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policies.admission import Account, AdmissionRules, Closed, Places, most_updates, places
from services.policies.staleness import staleness
from tests.support.examples import examples


def account(opened: int, *, dropped: int = 0, open_: int = 0, oldest: int | None = None) -> Account:
    return Account(opened=opened, dropped=dropped, open=open_, oldest=opened - open_ if oldest is None else oldest)


def rules(k: int = 0, batch: int = 4, lookahead: int = 2, base_version: int = 0) -> AdmissionRules:
    return AdmissionRules(base_version=base_version, k=k, batch=batch, lookahead=lookahead)


def test_k_zero_is_exactly_synchronous() -> None:
    """The next batch is admitted only by an engine that serves the step before."""
    assert places(account(3), rules(), 0).free == 1
    assert places(account(4), rules(), 0).free == 0
    assert places(account(4), rules(), 1).free == 4


@given(st.integers(0, 3), st.integers(1, 4), st.integers(0, 5), st.integers(1, 9))
def test_versions_that_a_restart_skipped_admit_nobody(k: int, batch: int, steps: int, skipped: int) -> None:
    """The last group let in is K steps old when its step consumes it, whether the engine serves a version before the skip
    or after it."""
    counted = Account(opened=steps * batch, dropped=0, open=0, oldest=steps * batch, skipped=skipped * batch)
    for engine in (steps, steps + skipped):
        free = places(counted, rules(k, batch, 99), engine).staleness
        last = counted.opened + free - 1
        consumed_from = skipped + last // batch
        assert staleness(consumed_from, engine) == k if free > 0 else skipped > k


def test_a_resumed_run_counts_from_its_base_version() -> None:
    assert rules(k=2, batch=16, base_version=40).limit(40) == 48
    with pytest.raises(ValueError, match="version 39 is older than the run's first version 40"):
        rules(base_version=40).limit(39)


@pytest.mark.parametrize(("k", "batch", "lookahead"), [(-1, 4, 1), (0, 0, 1), (0, 1, 0)])
def test_nonsense_is_refused(k: int, batch: int, lookahead: int) -> None:
    with pytest.raises(ValueError, match="K must be"):
        rules(k, batch, lookahead)


def test_each_rule_is_named_where_it_closes_admission() -> None:
    assert places(account(8), rules(k=1), 0).closed_by is Closed.STALENESS
    assert places(account(40, open_=8), rules(k=1), 9).closed_by is Closed.OPEN_GROUPS
    assert places(account(40, open_=1, oldest=24), rules(k=1), 9) == Places(staleness=4, open_groups=7, lookahead=0)
    assert places(account(40, open_=1, oldest=24), rules(k=1), 9).closed_by is Closed.LOOKAHEAD


def test_a_place_is_owed_to_those_who_came_before() -> None:
    left = places(account(2), rules(), 0)
    assert [left.admit(ahead) for ahead in range(4)] == [True, True, False, False]


@given(st.integers(0, 5), st.integers(1, 3), st.integers(1, 8), st.data())
def test_a_batch_of_several_steps_is_sampled_whole_and_never_too_old(
    k: int, batch: int, updates: int, data: st.DataObject
) -> None:
    """Steps of `batch` groups each, `updates` of them a batch; engines only ever serve the version after a whole one."""
    engine, opened, finished, age = 0, [], 0, []
    for _ in range(6 * batch * updates):
        if places(account(len(opened), open_=len(opened) - finished), rules(k, batch, 8), engine).free > 0:
            opened.append(engine)
        # Those that are open finish sooner or later: in order here, as many as the schedule says.
        finished = data.draw(st.integers(finished, len(opened)))
        trained = engine * batch
        if finished - trained >= updates * batch:
            steps = range(engine, engine + updates)
            age += [step - opened[step * batch + place] for step in steps for place in range(batch)]
            engine += updates
    starved = len(opened) - engine * batch == (k + 1) * batch < updates * batch
    assert starved == (updates > most_updates(k))
    assert max(age, default=0) <= k


@dataclass
class _Group:
    ordinal: int
    version: int
    open: bool = True
    complete: bool = False


@dataclass
class _Run:
    """A mesh of two rollout servers and a trainer, as far as admission can tell."""

    rules: AdmissionRules
    engines: list[int] = field(default_factory=lambda: [0, 0])
    trainer: int = 0
    opened: int = 0
    dropped: int = 0
    groups: list[_Group] = field(default_factory=list)
    """Those that are open, or wait for the trainer; by ordinal."""
    waiting: list[int] = field(default_factory=list)
    """The servers at which somebody waits, first come first."""

    @property
    def open(self) -> list[_Group]:
        return [group for group in self.groups if group.open]

    def account(self) -> Account:
        return account(
            self.opened,
            dropped=self.dropped,
            open_=len(self.open),
            oldest=min((group.ordinal for group in self.open), default=self.opened),
        )

    def admit(self) -> None:
        refused: list[int] = []
        for server in self.waiting:
            ahead = sum(self.engines[other] == max(self.engines) for other in refused)
            if places(self.account(), self.rules, self.engines[server]).admit(ahead):
                self.groups.append(_Group(self.opened, self.engines[server]))
                self.opened += 1
            else:
                refused.append(server)
        self.waiting = refused

    def step(self) -> None:
        """The trainer takes the complete groups that were opened first, and passes those that are not complete."""
        complete = [group for group in self.groups if group.complete][: self.rules.batch]
        if len(complete) < self.rules.batch:
            return
        for group in complete:
            group.complete = False
        self.trainer += 1
        self.forget()

    def forget(self) -> None:
        self.groups = [group for group in self.groups if group.open or group.complete]

    def act(self, action: int, pick: int) -> None:
        playing = [group for group in self.open if not group.complete]
        match action:
            case 0 | 1 | 2:
                self.waiting.append(pick % 2)
            case 3 if playing:  # finished in good order
                group = playing[pick % len(playing)]
                group.open, group.complete = False, True
            case 4 if playing:  # all of it is in the stream, and its server has not closed it yet
                playing[pick % len(playing)].complete = True
            case 5 if playing:  # given up
                playing[pick % len(playing)].open = False
                self.dropped += 1
            case 6 if self.open:  # found unfit by the trainer while it is open, or after
                group = self.open[pick % len(self.open)]
                if group.complete:
                    group.complete = False
                    self.dropped += 1
            case 7 if self.open:  # closed late
                group = self.open[pick % len(self.open)]
                if group not in playing:
                    group.open = False
            case 8 | 9:
                self.step()
            case 10 | 11:
                self.engines[pick % 2] = self.trainer
        self.forget()
        self.admit()

    def check(self) -> None:
        assert len(self.open) <= self.rules.most_open
        if self.open:
            assert self.open[-1].ordinal - self.open[0].ordinal < self.rules.window
        consumed = (max(self.engines) - self.rules.base_version) * self.rules.batch
        assert self.opened - self.dropped - consumed <= self.rules.most_open

    def end_fairly(self) -> Iterator[int]:
        """Every group ends, every step that can be taken is, every engine commits; the number waiting after each round."""
        while True:
            for group in self.groups:
                group.complete = group.complete or group.open
                group.open = False
            for _ in range(self.opened):
                self.step()
            self.engines = [self.trainer] * 2
            self.admit()
            self.check()
            yield len(self.waiting)


@examples(10_000)
@given(k=st.integers(0, 3), batch=st.integers(1, 4), lookahead=st.integers(1, 3), schedule=st.binary(max_size=160))
def test_under_any_schedule_the_bounds_hold_and_everybody_is_admitted(
    k: int, batch: int, lookahead: int, schedule: bytes
) -> None:
    """Whatever two servers, their agents and the trainer do, in any order; then everything that goes on comes to an end."""
    run = _Run(rules(k, batch, lookahead))
    for byte in schedule:
        run.act(byte % 12, byte // 12)
        run.check()
    waiting = len(run.waiting)
    for rounds, left in enumerate(run.end_fairly(), start=1):
        if left == 0:
            break
        assert left <= waiting - rounds * batch + 2 * batch, "a round that admits nobody"


@examples(300)
@given(k=st.integers(0, 4), batch=st.integers(1, 5), schedule=st.binary(max_size=200))
def test_without_stragglers_no_token_is_older_than_k_when_it_is_consumed(k: int, batch: int, schedule: bytes) -> None:
    """First in, first out: a step waits for the oldest groups, as long as they are all sound."""
    run = _Run(rules(k, batch))
    for byte in schedule:
        match byte % 5:
            case 0 | 1:
                run.waiting.append(0)
            case 2 if run.groups:
                group = run.groups[byte // 5 % len(run.groups)]
                group.open, group.complete = False, True
            case 3 if len(run.groups) >= batch and all(group.complete for group in run.groups[:batch]):
                assert all(staleness(run.trainer, group.version) <= k for group in run.groups[:batch])
                run.step()
            case 4:
                run.engines = [min(run.trainer, run.engines[0] + 1)] * 2
        run.admit()
        run.check()


@pytest.mark.parametrize(("k", "passed"), [(0, 1), (1, 16), (3, 32)])
def test_a_straggler_is_passed_as_far_as_the_look_ahead_and_no_farther(k: int, passed: int) -> None:
    """K = 0 waits for it at once; otherwise the others go on to the bound, and past it once it has ended."""
    bounds = rules(k, batch=1 if k == 0 else 4, lookahead=2)
    run = _Run(bounds, waiting=[0] * 100)
    run.admit()
    straggler = run.groups[0]
    for _ in range(100):
        for group in run.groups:
            group.complete = group is not straggler
            group.open = group is straggler
        run.step()
        run.engines = [run.trainer] * 2
        run.admit()
        run.check()
    assert run.opened == passed
    straggler.open, straggler.complete = False, True
    for left in run.end_fairly():
        if left == 0:
            break
    assert run.opened == 100

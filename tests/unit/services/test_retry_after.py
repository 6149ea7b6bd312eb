"""Retry-After tells the truth: whoever comes back when he was told is let in, and could not have come much sooner."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count

import pytest

from services.policies.admission import Account, AdmissionRules, Closed, Places, places
from services.policies.retry_after import LONGEST_S, UNKNOWN_S, ExpectedRate, RetryEstimate, remaining_s

RULES = AdmissionRules(base_version=0, k=1, batch=4)
NO_COMMIT = Places(staleness=0, open_groups=8, lookahead=40)


def test_without_history_a_stated_default_is_told() -> None:
    assert RetryEstimate(RULES, 0, 0.0).refused(NO_COMMIT, 0, None, 500.0) == UNKNOWN_S


def test_what_is_told_is_the_rest_of_the_interval_and_whole_ones_for_those_behind() -> None:
    estimate = RetryEstimate(RULES, 0, 0.0)
    for version in range(1, 5):
        estimate.serves(version, 10.0 * version)
    assert estimate.refused(NO_COMMIT, 0, None, 43.0) == pytest.approx(7.0)
    assert estimate.refused(NO_COMMIT, 8, None, 43.0) == pytest.approx(27.0)


def test_those_who_were_told_to_come_back_come_before_whoever_is_refused_after_them() -> None:
    estimate = RetryEstimate(RULES, 0, 0.0)
    for version in range(1, 5):
        estimate.serves(version, 10.0 * version)
    told = [estimate.refused(NO_COMMIT, 0, None, 42.0) for _ in range(12)]
    assert told == pytest.approx([8.0] * 4 + [18.0] * 4 + [28.0] * 4)
    assert [estimate.refused(NO_COMMIT, 0, None, 100.0) for _ in range(1)] == [
        pytest.approx(30.0)
    ]  # overdue: half its age


def test_each_rule_is_judged_by_what_opens_it() -> None:
    estimate = RetryEstimate(RULES, 0, 0.0)
    estimate.serves(1, 10.0)
    estimate.serves(2, 110.0)
    for now in (108.0, 110.0, 112.0):
        estimate.closed([30.0], now)
    full, ahead = Places(5, 0, 5), Places(5, 5, 0)
    assert (full.closed_by, ahead.closed_by) == (Closed.OPEN_GROUPS, Closed.LOOKAHEAD)
    assert estimate.refused(full, 2, None, 113.0) == pytest.approx(1.0 + 2 * 2.0)
    assert estimate.refused(ahead, 0, 12.0, 113.0) == pytest.approx(18.0)
    assert estimate.refused(NO_COMMIT, 0, None, 113.0) == pytest.approx(97.0)


def test_nobody_is_told_more_than_the_longest() -> None:
    estimate = RetryEstimate(RULES, 0, 0.0)
    estimate.serves(1, 1.0)
    estimate.serves(2, 1e6)
    assert estimate.refused(NO_COMMIT, 0, None, 1e6) == LONGEST_S


def test_several_versions_at_once_are_several_intervals() -> None:
    pace = ExpectedRate(0.0)
    pace.note(10.0)
    assert pace.until(1, 12.0) is None
    pace.note(30.0, times=4)
    assert pace.until(3, 31.0) == pytest.approx(4.0 + 10.0)


def test_what_outlasts_all_before_it_is_told_by_its_age() -> None:
    assert remaining_s([1.0, 2.0, 3.0], 0.5) == 2.5
    assert remaining_s([1.0, 2.0, 3.0], 8.0) == 4.0
    assert remaining_s([], 8.0) is None


@dataclass
class _Told:
    """One refusal. `needs`: the version whose commit would have let him in, those told before him going first."""

    at: float
    seconds: int
    needs: int


@dataclass
class _Play:
    """A server, its trainer and clients that do not wait but come back when they are told, on a clock of their own."""

    seed: int
    group_s: Callable[[random.Random], float]
    step_s: Callable[[random.Random], float]
    clients: int
    now: float = 0.0
    opened: int = 0
    complete: int = 0
    version: int = 0
    training: bool = False
    open: dict[int, float] = field(default_factory=dict)
    commits: list[float] = field(default_factory=lambda: [0.0])
    told: list[_Told] = field(default_factory=list)
    back: list[bool] = field(default_factory=list)
    all_told: list[_Told] = field(default_factory=list)

    def run(self, until_s: float) -> None:
        self.draw, self.order = random.Random(self.seed), count()
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.estimate = RetryEstimate(RULES, 0, 0.0)
        for _ in range(self.clients):
            self.later(self.draw.random(), lambda: self.ask(None))
        while self.events and self.now < until_s:
            self.now, _, event = heapq.heappop(self.events)
            event()

    def later(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.order), event))

    def ask(self, told: _Told | None) -> None:
        oldest = min(self.open, default=self.opened)
        account = Account(opened=self.opened, dropped=0, open=len(self.open), oldest=oldest)
        left = places(account, RULES, self.version)
        if told is not None and len(self.commits) > 10:
            self.back.append(left.admit(0))
        if left.admit(0):
            ordinal, lasts = self.opened, self.group_s(self.draw)
            self.open[ordinal] = self.now
            self.opened += 1
            self.later(lasts, lambda: self.close(ordinal))
            return
        age_s = self.now - self.open[oldest] if self.open else None
        before = min(RULES.most_open, sum(each.at + each.seconds > self.now for each in self.all_told))
        seconds = max(1, math.ceil(self.estimate.refused(left, 0, age_s, self.now)))
        refusal = _Told(self.now, seconds, self.version + math.ceil((before + 1 - left.staleness) / RULES.batch))
        self.all_told = [each for each in self.all_told if each.at + each.seconds > self.now] + [refusal]
        if left.closed_by is Closed.STALENESS and len(self.commits) > 10:
            self.told.append(refusal)
        self.later(seconds, lambda: self.ask(refusal))

    def close(self, ordinal: int) -> None:
        self.estimate.closed([self.now - self.open.pop(ordinal)], self.now)
        self.complete += 1
        self.train()
        self.ask(None)

    def train(self) -> None:
        if not self.training and self.complete >= RULES.batch:
            self.training = True
            self.complete -= RULES.batch
            self.later(self.step_s(self.draw), self.commit)

    def commit(self) -> None:
        self.training, self.version = False, self.version + 1
        self.commits.append(self.now)
        self.estimate.serves(self.version, self.now)
        self.train()


def even(least: float, most: float) -> Callable[[random.Random], float]:
    return lambda draw: draw.uniform(least, most)


def with_stragglers(draw: random.Random) -> float:
    return draw.uniform(1.0, 3.0) * (20.0 if draw.random() < 0.1 else 1.0)


@pytest.mark.parametrize(
    ("group_s", "step_s", "clients", "kept", "longer"),
    [
        pytest.param(even(1.0, 3.0), even(7.0, 9.0), 5, 0.9, 1.25, id="a trainer that is the bottleneck"),
        pytest.param(even(1.0, 3.0), even(7.0, 9.0), 8, 0.8, 1.2, id="as many clients as places"),
        pytest.param(even(1.0, 3.0), even(18.0, 22.0), 5, 0.8, 1.2, id="long steps"),
        pytest.param(with_stragglers, even(7.0, 9.0), 5, 0.75, 1.8, id="one group in ten takes twenty times as long"),
    ],
)
def test_who_comes_back_as_told_is_admitted_then(
    group_s: Callable[[random.Random], float],
    step_s: Callable[[random.Random], float],
    clients: int,
    kept: float,
    longer: float,
) -> None:
    """`kept`: the share that is let in on that try. `longer`: what was told, rounding to seconds included, is on average at
    most so many times what it took until the commit that made room."""
    back: list[bool] = []
    told_s, took_s = [], []
    for seed in range(5):
        play = _Play(seed, group_s, step_s, clients)
        play.run(3000.0)
        back += play.back
        known = [told for told in play.told if told.needs < len(play.commits)]
        told_s += [told.seconds for told in known]
        took_s += [play.commits[told.needs] - told.at for told in known]
    assert len(told_s) > 1000, "the play refuses too few to judge by"
    assert sum(back) / len(back) >= kept
    assert sum(told_s) / sum(took_s) <= longer

"""Admission on a real Valkey: the script decides as the policy does, one queue for all servers, accounts that balance."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Iterator
from itertools import count
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from redis.asyncio import Redis

from services.policies.admission import Account, AdmissionRules, places
from services.run_store.admission_queue import ADMISSION_CLOSED, OPENED_BEFORE, AdmissionAccount, Asking
from services.run_store.client import connect
from services.run_store.keys import RunKeys
from services.run_store.ledger import Ledger
from services.run_store.publishing import TrajectoryWriter
from services.run_store.stream import TrajectoryReader
from services.wire.trajectory import decode_trajectory
from tests.support.examples import examples
from tests.support.rollout_host import until
from tests.support.trajectories import a_rollout, a_segment

Result = TypeVar("Result")


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
def loop_and_redis(redis_url: str) -> Iterator[tuple[asyncio.Runner, Redis]]:
    """For tests that hypothesis calls again and again."""
    with asyncio.Runner() as runner:

        async def connected() -> Redis:
            return connect(redis_url)

        client = runner.run(connected())
        yield runner, client
        runner.run(client.aclose())


async def put(
    redis: Redis, run_id: str, opened: int, dropped: int, ordinals: list[int], oldest_known: int, skipped: int = 0
) -> None:
    """Write an account as others may have left it."""
    keys = RunKeys(run_id)
    await redis.delete(keys.accounts, keys.open_groups)
    counters = {"opened_groups": opened, "dropped_groups": dropped, "oldest_open": oldest_known}
    await redis.hset(keys.accounts, mapping={name: str(value) for name, value in counters.items()})
    if skipped:
        await Ledger(redis, run_id).skip_groups(skipped)
    for ordinal in ordinals:
        await redis.hset(keys.open_groups, f"old-{ordinal}", json.dumps([ordinal, "s9", "1.5"]))


@settings(examples(400), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), asking=st.integers(1, 9))
def test_the_script_decides_as_the_policy_does(
    loop_and_redis: tuple[asyncio.Runner, Redis], run_id: str, data: st.DataObject, asking: int
) -> None:
    runner, redis = loop_and_redis
    rules = AdmissionRules(
        base_version=data.draw(st.integers(0, 3), "base"),
        k=data.draw(st.integers(0, 2), "k"),
        batch=data.draw(st.integers(1, 4), "batch"),
        lookahead=data.draw(st.integers(1, 3), "lookahead"),
    )
    version = rules.base_version + data.draw(st.integers(0, 9), "steps")
    opened = data.draw(st.integers(0, rules.limit(version) + 4), "opened")
    dropped = data.draw(st.integers(0, opened), "dropped")
    skipped = data.draw(st.integers(0, 6), "skipped")
    ordinals = data.draw(
        st.lists(st.integers(0, opened - 1), max_size=9, unique=True) if opened else st.just([]), "open"
    )
    oldest = min(ordinals, default=opened)
    known = data.draw(st.integers(0, oldest), "oldest known")

    async def decided() -> list[int]:
        await put(redis, run_id, opened, dropped, ordinals, known, skipped)
        names = [Asking(f"new-{i}", float(i)) for i in range(asking)]
        admitted = await AdmissionAccount(redis, run_id).admit(names, "s0", rules=rules, engine_version=version)
        left = places(admitted.account, rules, version)
        counted = await Ledger(redis, run_id).accounts()
        assert counted.opened_groups == admitted.account.opened
        assert counted.skipped_groups == admitted.account.skipped == skipped
        assert (admitted.account.dropped, admitted.account.open) == (
            dropped,
            len(await Ledger(redis, run_id).open_groups()),
        )
        if any(answer.ordinal == ADMISSION_CLOSED for answer in admitted.answers):
            assert left.free <= 0
            if (straggler := admitted.straggler) is not None:
                assert straggler.ordinal == oldest
        return [answer.ordinal for answer in admitted.answers]

    account = Account(opened=opened, dropped=dropped, open=len(ordinals), oldest=oldest, skipped=skipped)
    free = places(account, rules, version).free
    let_in = min(max(free, 0), asking)
    expected = [opened + i for i in range(let_in)] + [ADMISSION_CLOSED] * (asking - let_in)
    assert runner.run(decided()) == expected


RULES = AdmissionRules(base_version=0, k=0, batch=2)


async def ask(
    account: AdmissionAccount, name: str, at: float, server: str = "s0", version: int = 0, **how: bool
) -> int:
    asking = [Asking(name, at, **{"stays": True} | how)]
    return (await account.admit(asking, server, rules=RULES, engine_version=version)).answers[0].ordinal


async def fill(ledger: Ledger) -> None:
    for name in ("a", "b"):
        assert await ask(ledger.admission, name, 0.0) >= 0


async def test_who_waits_at_one_server_is_not_passed_at_another(redis: Redis, run_id: str) -> None:
    ledger = Ledger(redis, run_id)
    await fill(ledger)
    assert await ask(ledger.admission, "first", 10.0, "s0") == ADMISSION_CLOSED
    assert await ask(ledger.admission, "second", 11.0, "s1") == ADMISSION_CLOSED
    await ledger.close_group("a", dropped=True)
    assert await ask(ledger.admission, "second", 11.0, "s1") == ADMISSION_CLOSED
    assert await ask(ledger.admission, "hasty", 12.0, "s1", stays=False) == ADMISSION_CLOSED
    assert await ask(ledger.admission, "first", 10.0, "s0") == 2
    await ledger.close_group("b", dropped=True)
    assert await ask(ledger.admission, "hasty", 12.0, "s1", stays=False) == ADMISSION_CLOSED
    assert await ask(ledger.admission, "second", 11.0, "s1") == 3


async def test_who_gives_up_or_whose_server_died_holds_nobody_back(redis: Redis, run_id: str) -> None:
    ledger, short = Ledger(redis, run_id), AdmissionAccount(redis, run_id, lease_s=0.3)
    await fill(ledger)
    assert await ask(short, "of a dead server", 10.0, "s7") == ADMISSION_CLOSED
    assert await ask(ledger.admission, "gave up", 11.0, "s1") == ADMISSION_CLOSED
    await ledger.admission.leave(["gave up"])
    await ledger.close_group("a", dropped=True)

    async def admitted() -> bool:
        return await ask(ledger.admission, "patient", 12.0) == 2

    assert not await admitted()
    await until(admitted)
    assert await redis.zcard(RunKeys(run_id).admission_queue) == 0


async def test_a_server_that_is_behind_holds_no_place_that_it_could_not_use(redis: Redis, run_id: str) -> None:
    ledger = Ledger(redis, run_id)
    await fill(ledger)
    assert await ask(ledger.admission, "behind", 10.0, "s0", version=0) == ADMISSION_CLOSED
    await ledger.close_groups(["a", "b"])
    assert (
        await ask(ledger.admission, "other", 11.0, "s1", version=1) == 2
    )  # there are two places: one is owed to `behind`
    assert await ask(ledger.admission, "behind", 10.0, "s0", version=0) == ADMISSION_CLOSED
    assert await ask(ledger.admission, "newest", 12.0, "s1", version=1) == 3


async def test_a_lost_answer_is_given_again_and_to_nobody_else(redis: Redis, run_id: str) -> None:
    account = AdmissionAccount(redis, run_id)
    assert [await ask(account, "a", 1.0) for _ in range(2)] == [0, 0]
    assert await ask(account, "a", 1.0, "s1") == OPENED_BEFORE


class _Mesh(RuleBasedStateMachine):
    """Servers, killed and taken over from, and trainers, killed and succeeded, on one run's accounts."""

    runner: asyncio.Runner
    redis: Redis
    run_ids: Iterator[str]
    bounds = AdmissionRules(base_version=0, k=1, batch=2, lookahead=2)

    def __init__(self) -> None:
        super().__init__()
        self.run_id = next(self.run_ids)
        self.ledger = Ledger(self.redis, self.run_id)
        self.writer = TrajectoryWriter(self.redis, self.run_id)
        self.names = count()
        self.open: dict[str, tuple[int, int]] = {}  # ordinal, siblings published
        self.published: dict[str, int] = {}
        self.ordinals: list[int] = []
        self.lost: set[str] = set()
        self.counted: set[str] = set()  # of those, the ones that whoever is to count them has counted
        self.consumed: set[str] = set()
        self.version = 0
        self.wait(self.start_trainer())

    def wait(self, awaitable: Awaitable[Result]) -> Result:
        async def run() -> Result:
            return await awaitable

        return self.runner.run(run())

    async def start_trainer(self) -> None:
        self.reader = TrajectoryReader(self.redis, self.run_id)
        await self.reader.open()

    def pick(self, number: int) -> str:
        return sorted(self.open)[number % len(self.open)]

    @rule(server=st.sampled_from(["s0", "s1"]), asking=st.integers(1, 3))
    def open_groups(self, server: str, asking: int) -> None:
        names = [f"g{next(self.names)}" for _ in range(asking)]
        admit = self.ledger.admission.admit(
            [Asking(name, 0.0) for name in names], server, rules=self.bounds, engine_version=self.version
        )
        for name, answer in zip(names, self.wait(admit).answers, strict=True):
            if answer.ordinal != ADMISSION_CLOSED:
                self.open[name] = answer.ordinal, 0
                self.ordinals.append(answer.ordinal)

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 99), again=st.booleans())
    def publish_a_sibling(self, number: int, again: bool) -> None:
        name = self.pick(number)
        ordinal, siblings = self.open[name]
        member = siblings - 1 if again and siblings else siblings
        if member < 2:
            segment = a_segment([5], [6], [-1.0], [0])
            rollout = a_rollout([segment], 1.0, run_id=self.run_id, group=name, ordinal=ordinal, size=2, member=member)
            self.wait(self.writer.publish([rollout]))
            self.open[name] = ordinal, member + 1
            self.published[name] = member + 1

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 99), twice=st.booleans())
    def close_a_group(self, number: int, twice: bool) -> None:
        name = self.pick(number)
        _, siblings = self.open.pop(name)
        if siblings < 2:
            self.lost.add(name)
        if siblings == 0:
            self.counted.add(name)
        for _ in range(1 + twice):
            self.wait(self.ledger.close_group(name, dropped=siblings < 2))

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 99))
    def take_over_a_group_of_a_killed_server(self, number: int) -> None:
        """Another server takes it over: its ordinal and its time stay."""
        key, name = RunKeys(self.run_id).open_groups, self.pick(number)
        record = json.loads(self.wait(self.redis.hget(key, name)) or "null")
        self.wait(self.redis.hset(key, name, json.dumps([record[0], f"{record[1]}+", record[2]])))

    @precondition(lambda self: self.published)
    @rule(number=st.integers(0, 99))
    def the_trainer_finds_a_group_unfit(self, number: int) -> None:
        name = sorted(self.published)[number % len(self.published)]
        if name not in self.consumed:
            self.lost.add(name)
            self.counted.add(name)
            self.wait(self.ledger.drop_group(name))

    @rule()
    def the_trainer_takes_a_step(self) -> None:
        whole = [name for name, siblings in self.published.items() if siblings == 2]
        fit = [name for name in whole if name not in self.lost | self.consumed]
        if len(fit) >= self.bounds.batch:
            self.consumed.update(fit[: self.bounds.batch])
            self.version += 1

    @rule()
    def the_trainer_is_killed(self) -> None:
        """Its successor finds what was not settled once more, and drops once more whatever can never be trained."""
        self.wait(self.start_trainer())
        self.counted |= self.lost & self.published.keys()
        for name in self.lost & self.published.keys():
            self.wait(self.ledger.drop_group(name))

    @invariant()
    def accounts_balance(self) -> None:
        accounts = self.wait(self.ledger.accounts())
        open_groups = self.wait(self.ledger.open_groups())
        assert {name: record.ordinal for name, record in open_groups.items()} == {
            name: ordinal for name, (ordinal, _) in self.open.items()
        }
        assert self.ordinals == list(range(accounts.opened_groups))
        assert accounts.opened_groups == accounts.closed_groups + len(open_groups)
        assert accounts.published == sum(self.published.values())
        assert accounts.dropped_groups == len(self.counted)
        assert accounts.dropped_groups <= accounts.opened_groups
        assert len(open_groups) <= self.bounds.most_open
        if open_groups:
            oldest = min(record.ordinal for record in open_groups.values())
            assert max(record.ordinal for record in open_groups.values()) - oldest < self.bounds.window

    def teardown(self) -> None:
        """The run concludes: what was consumed is acknowledged as trained, the rest as dropped."""
        entries = self.wait(self.reader.read(1000, 1))
        kinds: dict[bool, list[str]] = {True: [], False: []}
        for entry in entries:
            kinds[decode_trajectory(entry.payload).group_id in self.consumed].append(entry.stream_id)
        self.wait(self.reader.acknowledge_trained(kinds[True]))
        self.wait(self.reader.acknowledge_dropped("run_concluded", kinds[False]))
        accounts = self.wait(self.ledger.accounts())
        assert accounts.trained == 2 * len(self.consumed)
        assert accounts.published == accounts.trained + accounts.dropped_total()


def test_accounts_balance_whoever_opens_closes_drops_dies_and_takes_over(
    loop_and_redis: tuple[asyncio.Runner, Redis], run_id: str
) -> None:
    runner, redis = loop_and_redis
    attributes: dict[str, Any] = {"runner": runner, "redis": redis, "run_ids": (f"{run_id}-{i}" for i in count())}
    mesh = type("Mesh", (_Mesh,), attributes)
    run_state_machine_as_test(mesh, settings=settings(examples(60), stateful_step_count=40))


async def test_a_group_that_was_written_down_is_not_opened_again(redis: Redis, run_id: str) -> None:
    account, keys = AdmissionAccount(redis, run_id), RunKeys(run_id)
    await redis.rpush(keys.journal("ended"), b"its first record")
    assert await ask(account, "ended", 1.0) == OPENED_BEFORE
    assert not await redis.hexists(keys.open_groups, "ended")
    assert await ask(account, "other", 2.0) == 0, "it took no place"

"""The two queues in front of Redis, alone: admission and publishing, beside a real Valkey that may fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from msgspec.structs import replace
from redis.asyncio import Redis

from rollout_server.lifecycle.admission import AdmissionGate
from rollout_server.lifecycle.publish import Publisher
from services.policies.admission import AdmissionRules, StoreUse
from services.run_store.admission_queue import Admitted
from services.run_store.client import connect
from services.run_store.keys import RunKeys
from services.run_store.ledger import Ledger
from services.run_store.publishing import TrajectoryWriter
from services.run_store.status import WaitBoard
from services.wire.errors import CapacityError, ConcludedError, NotReadyError, RollmeshError
from services.wire.packed import pack_logprobs, pack_mask, pack_tokens
from services.wire.sampling import SamplingParams
from services.wire.trajectory import Segment, Trajectory, VersionSpan
from tests.conftest import free_port
from tests.support.rollout_host import until

FOREVER = 600.0


class Serving:
    """What an engine serves, to be changed by a test."""

    version = 0


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


@asynccontextmanager
async def gate_of(
    redis: Redis,
    run_id: str,
    serving: Serving,
    *,
    base_version: int = 0,
    batch: int = 2,
    poll_s: float = FOREVER,
    ledger: Ledger | None = None,
    lookahead: int = 8,
    store: Callable[[], StoreUse | None] = lambda: None,
) -> AsyncIterator[AdmissionGate]:
    gate = AdmissionGate(
        ledger or Ledger(redis, run_id),
        WaitBoard(redis, run_id, "s0"),
        server_id="s0",
        rules=AdmissionRules(base_version=base_version, k=0, batch=batch, lookahead=lookahead),
        engine_version=lambda: serving.version,
        store=store,
        poll_s=poll_s,
    )
    pump = asyncio.create_task(gate.run())
    gate.running = lambda: not pump.done()  # type: ignore[attr-defined]
    try:
        yield gate
    finally:
        pump.cancel()
        await asyncio.gather(pump, return_exceptions=True)


async def test_a_gate_that_is_closed_or_cannot_reach_redis_says_so_at_once(redis: Redis, run_id: str) -> None:
    async with gate_of(redis, run_id, Serving()) as gate, asyncio.timeout(15):
        gate.close()
        with pytest.raises(NotReadyError, match="shutting down"):
            await gate.open("late", FOREVER)
    away = connect(f"redis://127.0.0.1:{free_port()}/0")
    try:
        async with gate_of(redis, run_id, Serving(), ledger=Ledger(away, run_id)) as gate, asyncio.timeout(15):
            with pytest.raises(NotReadyError):
                await gate.open("a", FOREVER)
    finally:
        await away.aclose()


async def test_a_commit_opens_the_gate_without_a_poll(redis: Redis, run_id: str) -> None:
    serving = Serving()
    async with gate_of(redis, run_id, serving) as gate, asyncio.timeout(5):
        assert [await gate.open(name, FOREVER) for name in "ab"] == [0, 1]
        waiting = asyncio.create_task(gate.open("c", FOREVER))
        await until(lambda: gate.waiting == 1)
        await Ledger(redis, run_id).close_groups(["a", "b"])
        serving.version = 1
        gate.notify()
        assert await waiting == 2


async def test_a_group_that_is_given_up_here_makes_room_without_a_poll(redis: Redis, run_id: str) -> None:
    ledger = Ledger(redis, run_id)
    async with gate_of(redis, run_id, Serving(), ledger=ledger) as gate, asyncio.timeout(5):
        assert [await gate.open(name, FOREVER) for name in "ab"] == [0, 1]
        waiting = asyncio.create_task(gate.open("c", FOREVER))
        await until(lambda: gate.waiting == 1)
        await ledger.close_group("a", dropped=True)
        assert await waiting == 2


async def test_a_straggler_is_named_and_its_end_lets_the_others_in_without_a_poll(redis: Redis, run_id: str) -> None:
    serving, ledger = Serving(), Ledger(redis, run_id)
    serving.version = 9
    async with gate_of(redis, run_id, serving, ledger=ledger, lookahead=2) as gate, asyncio.timeout(5):
        assert await gate.open("straggler", FOREVER) == 0
        for ordinal in range(1, 4):
            assert await gate.open(f"g{ordinal}", FOREVER) == ordinal
            await ledger.close_group(f"g{ordinal}")
        with pytest.raises(CapacityError, match="until group 0 of server s0 is closed, the run being 4 ahead"):
            await gate.open("hasty", 0.0)
        waiting = asyncio.create_task(gate.open("next", FOREVER))
        await until(lambda: gate.waiting == 1)
        await ledger.close_group("straggler")
        assert await waiting == 4


async def test_who_is_refused_is_told_by_the_pace_of_commits(redis: Redis, run_id: str) -> None:
    serving = Serving()
    async with gate_of(redis, run_id, serving) as gate, asyncio.timeout(10):
        assert [await gate.open(name, 0.0) for name in "ab"] == [0, 1]
        with pytest.raises(CapacityError, match="serves version 0; a trainer must take groups, or open with purpose="):
            await gate.open("early", 0.0)
        commits = []
        for version in range(1, 4):
            serving.version = version
            gate.notify()
            commits.append(time.monotonic())
            await asyncio.sleep(0.4)
        await gate_is_used_up(redis, run_id, version=3)
        with pytest.raises(CapacityError, match="serves version 3: try again") as refused:
            await gate.open("late", 0.0)
        longest = max(later - earlier for earlier, later in pairwise(commits))
        assert 0.0 < refused.value.retry_after_s <= longest


async def gate_is_used_up(redis: Redis, run_id: str, version: int) -> None:
    """Others have opened, and finished, as many groups as that version allows."""
    ledger = Ledger(redis, run_id)
    await ledger.close_groups(["a", "b"])
    for number in range(2, 2 * (version + 1)):
        assert await ledger.open_group(f"o{number}", "s1", engine_version=version, base_version=0, k=0, batch=2) >= 0
        await ledger.close_group(f"o{number}")


async def test_many_who_wait_cost_one_call_and_come_in_order(redis: Redis, run_id: str) -> None:
    serving = Serving()
    async with gate_of(redis, run_id, serving, batch=100) as gate, asyncio.timeout(10):
        waiting = [asyncio.create_task(gate.open(f"g{i}", FOREVER)) for i in range(100)]
        assert await asyncio.gather(*waiting) == list(range(100))
        with pytest.raises(CapacityError):
            await gate.open("late", 0.0)


async def test_nobody_is_refused_untried_although_he_does_not_wait(redis: Redis, run_id: str) -> None:
    serving = Serving()
    async with gate_of(redis, run_id, serving, batch=20) as gate, asyncio.timeout(10):

        async def come(number: int) -> int:
            for _ in range(number):  # each at another moment of the calls for those before him
                await asyncio.sleep(0)
            return await gate.open(f"g{number}", 0.0)

        assert sorted(await asyncio.gather(*(come(number) for number in range(20)))) == list(range(20))


async def test_a_late_joiner_admits_nobody_until_it_serves_the_runs_first_version(redis: Redis, run_id: str) -> None:
    serving = Serving()
    async with gate_of(redis, run_id, serving, base_version=5) as gate, asyncio.timeout(5):
        with pytest.raises(CapacityError):
            await gate.open("a", 0.0)
        serving.version = 5
        assert await gate.open("a", 0.0) == 0


async def test_a_caller_cancelled_at_any_moment_of_admission_leaves_no_group_open(redis: Redis, run_id: str) -> None:
    for moment in range(200):  # turns of the event loop between the call and its cancellation
        run = f"{run_id}-{moment}"
        ledger = Ledger(redis, run)

        async def settled(ledger: Ledger = ledger) -> bool:
            accounts = await ledger.accounts()
            return accounts.opened_groups == accounts.dropped_groups

        async with gate_of(redis, run, Serving(), poll_s=0.01) as gate, asyncio.timeout(5):
            hasty = asyncio.create_task(gate.open("hasty", FOREVER))
            for _ in range(moment):
                await asyncio.sleep(0)
            if hasty.done():
                return  # so every earlier moment has been tried
            hasty.cancel()
            await asyncio.gather(hasty, return_exceptions=True)
            await gate.open("patient", FOREVER)  # by now the pump has heard of whatever it sent for the first
            await ledger.close_group("patient", dropped=True)
            await until(settled)
    pytest.fail("admission took more than 200 turns of the loop")


class SlowAccount:
    """Redis's account of admissions, whose answers are on their way for as long as a test wants."""

    def __init__(self, ledger: Ledger) -> None:
        self.asked = asyncio.Event()
        self.answered = asyncio.Event()
        self._admit = ledger.admission.admit
        ledger.admission.admit = self.admit  # type: ignore[method-assign]

    async def admit(self, *arguments: Any, **options: Any) -> Admitted:
        admitted = await self._admit(*arguments, **options)
        self.asked.set()
        await self.answered.wait()
        return admitted


@pytest.mark.parametrize("place", [True, False], ids=["a place", "no place"])
async def test_a_gate_that_is_closed_while_redis_is_asked_leaves_nothing_behind(
    redis: Redis, run_id: str, place: bool
) -> None:
    ledger, keys = Ledger(redis, run_id), RunKeys(run_id)
    if not place:
        for name in "ab":
            await ledger.open_group(name, "s1", engine_version=0, base_version=0, k=0, batch=2)
    account = SlowAccount(ledger)
    async with gate_of(redis, run_id, Serving(), ledger=ledger, poll_s=0.01) as gate, asyncio.timeout(5):
        waiting = asyncio.create_task(gate.open("late", FOREVER))
        await account.asked.wait()
        gate.close()
        account.answered.set()
        with pytest.raises(NotReadyError, match="shutting down"):
            await waiting
        await until(lambda: _forgotten(redis, keys, "late"))
        assert gate.running(), "closing ended the task that serves the queue"


async def _forgotten(redis: Redis, keys: RunKeys, group_id: str) -> bool:
    queued = await redis.zscore(keys.admission_queue, group_id)
    return queued is None and not await redis.hexists(keys.open_groups, group_id)


async def test_who_gives_up_on_a_group_of_another_server_does_not_close_it(redis: Redis, run_id: str) -> None:
    ledger = Ledger(redis, run_id)
    await ledger.open_group("theirs", "s1", engine_version=0, base_version=0, k=0, batch=2)
    account = SlowAccount(ledger)
    async with gate_of(redis, run_id, Serving(), ledger=ledger, poll_s=0.01) as gate, asyncio.timeout(5):
        hasty = asyncio.create_task(gate.open("theirs", FOREVER))
        await account.asked.wait()
        hasty.cancel()
        await asyncio.gather(hasty, return_exceptions=True)
        account.answered.set()
        assert await gate.open("mine", FOREVER) == 1
    assert set(await ledger.open_groups()) == {"theirs", "mine"}


def trajectory(run_id: str, group_id: str, member: int = 0) -> Trajectory:
    segment = Segment(
        token_ids=pack_tokens([3, 4]),
        loss_mask=pack_mask([0, 1]),
        logprobs=pack_logprobs([0.0, -1.0]),
        version_spans=[VersionSpan(1, 1, 0)],
    )
    return Trajectory(
        run_id=run_id,
        trajectory_id=f"{group_id}.{member}",
        group_id=group_id,
        group_ordinal=0,
        group_size=2,
        member=member,
        task="sums",
        segments=[segment],
        reward=1.0,
        samplings=[SamplingParams(max_tokens=1)],
        server_id="s0",
        opened_at=0.0,
        finished_at=0.0,
    )


@asynccontextmanager
async def publisher_of(redis: Redis, run_id: str) -> AsyncIterator[Publisher]:
    publisher = Publisher(TrajectoryWriter(redis, run_id), Ledger(redis, run_id))
    writing = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


async def test_a_batch_that_meets_the_end_of_the_run_is_judged_group_by_group(redis: Redis, run_id: str) -> None:
    ledger = Ledger(redis, run_id)
    for group_id in "ab":
        await ledger.open_group(group_id, "s0", engine_version=0, base_version=0, k=0, batch=2)
    async with publisher_of(redis, run_id) as publisher, asyncio.timeout(5):
        early = [trajectory(run_id, "a", member) for member in range(2)]
        first = await publisher.publish("a", early)
        await ledger.conclude(0)
        again, late = await asyncio.gather(
            publisher.publish("a", early), publisher.publish("b", [trajectory(run_id, "b")]), return_exceptions=True
        )
        assert again == first
        assert isinstance(late, ConcludedError)
    accounts = await ledger.accounts()
    assert (accounts.published, accounts.closed_groups, accounts.dropped_groups) == (2, 2, 1)


async def test_a_group_that_cannot_be_encoded_fails_alone(redis: Redis, run_id: str) -> None:
    async with publisher_of(redis, run_id) as publisher, asyncio.timeout(5):
        broken = replace(trajectory(run_id, "b"), metadata={"a": object()})  # type: ignore[dict-item]
        first, failed, last = await asyncio.gather(
            publisher.publish("a", [trajectory(run_id, "a")]),
            publisher.publish("b", [broken]),
            publisher.publish("c", [trajectory(run_id, "c")]),
            return_exceptions=True,
        )
        assert isinstance(failed, RollmeshError) and "group b cannot be published" in str(failed)
        assert isinstance(first, list) and isinstance(last, list)
        assert await publisher.publish("a", [trajectory(run_id, "a")]) == first


async def test_a_stream_that_cannot_be_written_says_so_and_the_repeat_succeeds(redis: Redis, run_id: str) -> None:
    keys = RunKeys(run_id)
    await redis.set(keys.stream, "not a stream")
    async with publisher_of(redis, run_id) as publisher, asyncio.timeout(5):
        with pytest.raises(NotReadyError, match="finish the group again"):
            await publisher.publish("a", [trajectory(run_id, "a")])
        await redis.delete(keys.stream)
        assert len(await publisher.publish("a", [trajectory(run_id, "a")])) == 1

"""The intake on a real Valkey: batches in order, drops counted by cause, nothing lost when a trainer dies."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from itertools import chain, repeat

import msgspec
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import OutOfMemoryError, RedisError

from services.policies.batching import Drop, DropCause, GroupFilter
from services.policies.length_stats import Lengths
from services.policies.training.deadlines import batch_within
from services.run_store.keys import RunKeys
from services.run_store.ledger import Ledger
from services.run_store.stream import DeadLetters, TrajectoryReader
from services.wire.errors import DeadlineError, NoBatchError
from services.wire.sampling import SamplingParams
from services.wire.trajectory import TRAJECTORY_SCHEMA, encode_trajectory
from tests.support.intake_bench import Bench, answers, intake_benches, until
from tests.support.trajectories import a_segment, random_trajectories
from tests.weight_parts import eventually


@pytest.fixture
async def make_bench(redis_url: str, run_id: str) -> AsyncIterator[Callable[..., Bench]]:
    async with intake_benches(redis_url, run_id) as make:
        yield make


async def test_batches_come_in_order_of_opening(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    for ordinal in (2, 0, 3, 1):
        await bench.writer.publish(answers(bench, f"g{ordinal}", ordinal))
    await eventually(lambda: bench.intake._assembler.complete == 4)
    batch = await bench.take(3)
    assert batch is not None
    assert [group.ordinal for group in batch] == [0, 1, 2]
    assert [member.payload.member for member in batch[0].members] == [0, 1]


async def test_the_last_group_of_a_batch_wakes_who_waits_for_it(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once: not when it next looks by itself, which is put off here beyond the test's patience."""
    monkeypatch.setattr("trainer.data.stream_reader._SLICE_S", 60.0)
    bench = make_bench()
    waiting = asyncio.create_task(bench.take(3, deadline_s=100.0))
    await eventually(lambda: bench.intake._wanted == 3)
    for ordinal in range(3):
        assert not waiting.done()
        await bench.writer.publish(answers(bench, f"g{ordinal}", ordinal))
    async with asyncio.timeout(10):
        batch = await waiting
    assert batch is not None and [group.ordinal for group in batch] == [0, 1, 2]


async def test_what_cannot_be_trained_is_dropped_by_cause_and_admission_makes_up_for_it(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench()
    future = [a_segment([5], [6], [-1.0], [4])]
    strange = [a_segment([5], [64], [-1.0], [3])]
    long = [a_segment([5] * 32, [6], [-1.0], [3])]
    for number, (cause, changes) in enumerate(
        {
            "future_version": {"segments": future},
            "unknown_token": {"segments": strange},
            "too_long": {"segments": long},
            "sampling": {"samplings": [SamplingParams(max_tokens=4, temperature=0.0)]},
            "foreign_run": {"run_id": "another"},
        }.items()
    ):
        first, second = answers(bench, cause, number)
        await bench.writer.publish([msgspec.structs.replace(first, **changes), second])
    truncated = SamplingParams(max_tokens=4, top_p=0.9)
    await bench.writer.publish(answers(bench, "both", 7, samplings=[truncated]))
    garbled = encode_trajectory(answers(bench, "garbled", 8)[0]).replace(
        b"schema" + bytes([TRAJECTORY_SCHEMA]), b"schema\x63"
    )
    await bench.redis.xadd(RunKeys(bench.run_id).stream, {"t": garbled})
    await bench.redis.xadd(RunKeys(bench.run_id).stream, {"t": b"no trajectory at all"})
    await bench.writer.publish(answers(bench, "sound", 9))
    batch = await bench.take(1)
    assert batch is not None and batch[0].group == "sound"
    await bench.dropped(
        {
            "future_version": 1,
            "unknown_token": 1,
            "too_long": 1,
            "sampling": 3,
            "foreign_run": 1,
            "spoiled_group": 5,
            "undecodable": 2,
        }
    )
    # Five with one bad sibling, one with two, one whose only sibling here was garbled: seven groups.
    await until(lambda accounts: accounts.dropped_groups == 7, bench.ledger)


async def test_a_group_that_never_completes_expires(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(expire_after_s=0.2)
    await bench.writer.publish(answers(bench, "half", 0)[:1])
    await bench.dropped({"incomplete_group": 1})
    assert (await bench.ledger.accounts()).dropped_groups == 1


async def test_siblings_that_are_still_being_played_are_waited_for(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(expire_after_s=0.05)
    rules = {"engine_version": 0, "base_version": 0, "k": 9, "batch": 9}
    await bench.ledger.open_group("slow", "s0", **rules)
    first, second = answers(bench, "slow", 0)
    await bench.writer.publish([first])
    with pytest.raises(DeadlineError):
        await bench.take(1, deadline_s=1.0)
    await bench.writer.publish([second])
    await bench.ledger.close_group("slow")
    batch = await bench.take(1)
    assert batch is not None and batch[0].group == "slow"


async def test_a_group_that_its_server_closed_without_a_sibling_is_dropped_at_once(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(expire_after_s=0.05)
    rules = {"engine_version": 0, "base_version": 0, "k": 9, "batch": 9}
    await bench.ledger.open_group("half", "s0", **rules)
    await bench.writer.publish(answers(bench, "half", 0)[:1])
    await bench.ledger.close_group("half", dropped=True)
    await bench.dropped({"incomplete_group": 1})
    # The server and the trainer both know of the drop; it is counted once.
    assert (await bench.ledger.accounts()).dropped_groups == 1


async def test_a_group_with_an_expired_sibling_is_trained_with_those_that_finished(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(expire_after_s=0.05)
    rules = {"engine_version": 0, "base_version": 0, "k": 9, "batch": 9}
    await bench.ledger.open_group("short", "s0", **rules)
    first, never, third = answers(bench, "short", 0, size=3)
    await bench.writer.publish([third, first])
    await bench.ledger.close_group("short", dropped=True)
    batch = await bench.take(1)
    assert batch is not None
    assert [member.index for member in batch[0].members] == [0, 2] and batch[0].lost == 1
    await bench.intake.settle_trained([member.entry for member in batch[0].members])
    # Its server was wrong, and it comes after all: the group is trained once.
    await bench.writer.publish([never])
    await bench.dropped({"late": 1})
    accounts = await bench.ledger.accounts()
    assert (accounts.trained, accounts.dropped_groups) == (2, 0)


async def test_a_restarted_trainer_does_not_make_a_group_of_the_sibling_that_its_batch_went_without(
    make_bench: Callable[..., Bench],
) -> None:
    first = make_bench(expire_after_s=0.05)
    trained = await first.writer.publish(answers(first, "short", 0, size=3)[:2])
    assert await first.take(1) is not None
    await first.stop()
    successor = make_bench(expire_after_s=0.05, trained_before=frozenset(trained))
    await until(lambda accounts: accounts.trained == 2, successor.ledger)
    await successor.writer.publish(answers(successor, "short", 0, size=3)[2:])
    await successor.dropped({"duplicate": 1})
    assert (await successor.ledger.accounts()).dropped_groups == 0


class OnceOutOfReach(Ledger):
    """Redis goes away in the middle of a drop, once."""

    failed = False

    error: RedisError = RedisConnectionError("gone")

    async def drop_group(self, group_id: str) -> bool:
        if not self.failed:
            self.failed = True
            raise self.error
        return await super().drop_group(group_id)


class OnceFull(OnceOutOfReach):
    error = OutOfMemoryError("command not allowed when used memory > 'maxmemory'")


@pytest.mark.parametrize("ledger", [OnceOutOfReach, OnceFull])
async def test_a_drop_that_redis_fails_for_is_settled_when_it_is_back(
    make_bench: Callable[..., Bench], ledger: type[Ledger]
) -> None:
    bench = make_bench(ledger=ledger)
    await bench.writer.publish(answers(bench, "greedy", 0, samplings=[SamplingParams(max_tokens=4, temperature=0.0)]))
    await bench.dropped({"sampling": 2})
    assert (await bench.ledger.accounts()).dropped_groups == 1


async def test_an_acknowledgement_is_repeated_while_redis_is_away(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = make_bench()
    ids = await bench.writer.publish(answers(bench, "g", 0))
    assert await bench.take(1) is not None
    acknowledge, failures = (
        TrajectoryReader.acknowledge_trained,
        [RedisConnectionError("gone"), OutOfMemoryError("full")],
    )

    async def failing(reader: TrajectoryReader, entries: Sequence[str]) -> int:
        if failures:
            raise failures.pop()
        return await acknowledge(reader, entries)

    monkeypatch.setattr(TrajectoryReader, "acknowledge_trained", failing)
    await bench.intake.settle_trained(ids)
    assert (await bench.ledger.accounts()).trained == 2


async def test_lengths_of_what_was_sampled_are_counted_once(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    published = random_trajectories(1, groups=3, size=2, version=3, run_id=bench.run_id)
    await bench.writer.publish(published)
    await bench.writer.publish(published)
    await bench.ledger.count_given_up(1000)
    lengths = await bench.ledger.lengths()
    sampled = [one.sampled_tokens() for one in published] + [1000]
    assert lengths == Lengths.of(Counter(sampled))


async def test_a_batch_of_ten_minutes_is_waited_for_where_earlier_ones_took_long_too(
    make_bench: Callable[..., Bench],
) -> None:
    """By a clock that jumps: ten minutes have passed as soon as the wait begins."""
    bench = make_bench()

    def ten_minutes_later() -> Callable[[], float]:
        times = chain([0.0], repeat(600.0))
        return lambda: next(times)

    with pytest.raises(NoBatchError, match=r"no batch within 120 s.*trainer.batch_timeout_s gives it longer"):
        await bench.take(1, batch_within(120.0, 20.0), ten_minutes_later())
    taking = asyncio.create_task(bench.take(1, batch_within(120.0, 200.0), ten_minutes_later()))
    await eventually(lambda: bool(bench.posted))
    assert "groups 0/1 ready" in bench.posted[0]
    await bench.writer.publish(answers(bench, "late", 4))
    batch = await taking
    assert batch is not None and [group.group for group in batch] == ["late"]


async def test_a_wait_says_what_is_missing_and_ends_at_its_deadline(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    await bench.writer.publish(answers(bench, "whole", 4) + answers(bench, "half", 5)[:1])
    with pytest.raises(NoBatchError, match=r"groups 1/2 ready; group 5 of server s0: 1 of 2 siblings \(missing: 1\)"):
        await bench.take(2, deadline_s=0.5)
    assert bench.posted == ["groups 1/2 ready; group 5 of server s0: 1 of 2 siblings (missing: 1)"]


async def test_a_stopped_trainer_gets_no_batch(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    stopped = threading.Event()
    waiting = asyncio.create_task(
        asyncio.to_thread(bench.intake.take, 1, 30.0, post=lambda _: None, stopped=stopped.is_set)
    )
    stopped.set()
    assert await asyncio.wait_for(waiting, 15.0) is None


async def test_a_successor_takes_up_what_was_pending_and_settles_what_the_log_holds(
    make_bench: Callable[..., Bench],
) -> None:
    first = make_bench()
    ids = await first.writer.publish(random_trajectories(1, groups=3, size=2, version=3, run_id=first.run_id))
    assert await first.take(2) is not None
    successor = make_bench(trained_before=frozenset(ids[:2]))
    batch = await successor.take(2)
    assert batch is not None
    assert [group.ordinal for group in batch] == [1, 2]
    await until(lambda accounts: accounts.trained == 2, successor.ledger)


async def test_the_groups_of_a_batch_that_cannot_be_trained_are_dropped_and_made_up_for(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench()
    await bench.writer.publish(answers(bench, "bad", 0) + answers(bench, "sound", 1))
    batch = await bench.take(2)
    assert batch is not None
    bad, sound = batch
    drops = {one.entry: Drop(one.entry, DropCause.ANOMALY, "the loss is nan") for one in bad.members}
    await bench.intake.settle_dropped(["bad"], drops)
    await bench.intake.settle_trained([one.entry for one in sound.members])
    accounts = await bench.ledger.accounts()
    assert (accounts.trained, accounts.dropped, accounts.dropped_groups) == (2, {"anomaly": 2}, 1)
    assert accounts.published == accounts.trained + accounts.dropped_total()
    letters = await DeadLetters(bench.redis, bench.run_id).newest(9)
    assert {(letter.cause, letter.why) for letter in letters} == {("anomaly", "the loss is nan")}
    assert bench.intake.take_arrivals().dropped == {"anomaly": 2}


async def test_a_successor_settles_what_the_log_says_was_dropped(make_bench: Callable[..., Bench]) -> None:
    """The trainer ended between its log's word and the settling."""
    first = make_bench()
    ids = await first.writer.publish(answers(first, "given up", 0, size=3)[:2] + answers(first, "sound", 1))
    await first.stop()
    drops = {entry: Drop(entry, DropCause.UNTRAINABLE, "it ended the trainer") for entry in ids[:2]}
    for _ in range(2):
        successor = make_bench(dropped_before=drops)
        await successor.dropped({"untrainable": 2})
        await successor.stop()
    successor = make_bench(dropped_before=drops)
    batch = await successor.take(1)
    assert batch is not None and batch[0].group == "sound"
    assert (await successor.ledger.accounts()).dropped_groups == 1


class _StuckLedger(Ledger):
    """Gets no group dropped until `free` is set."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        super().__init__(redis, run_id)
        self.free = asyncio.Event()

    async def drop_group(self, group_id: str) -> bool:
        await self.free.wait()
        return await super().drop_group(group_id)


@pytest.mark.parametrize("read_before", [False, True])
async def test_draining_settles_what_the_log_says_was_dropped_by_its_own_cause(
    make_bench: Callable[..., Bench], read_before: bool
) -> None:
    """The run ended before the intake had read it, or before it had settled what it read."""
    first = make_bench()
    ids = await first.writer.publish(answers(first, "given up", 0) + answers(first, "left over", 1))
    await first.stop()
    drops = {entry: Drop(entry, DropCause.UNTRAINABLE, "it ended the trainer") for entry in ids[:2]}
    successor = make_bench(dropped_before=drops, ledger=_StuckLedger)
    if read_before:
        await eventually(lambda: successor.intake._assembler.complete == 1)
    else:
        await asyncio.sleep(0)  # `run` begins
    await successor.stop()
    assert isinstance(successor.ledger, _StuckLedger)
    successor.ledger.free.set()
    assert await successor.intake.drain() == 2
    accounts = await successor.ledger.accounts()
    assert (accounts.dropped, accounts.dropped_groups) == ({"untrainable": 2, "run_concluded": 2}, 1)


async def test_what_a_lost_reply_took_along_is_found_again(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Delivered to this consumer, never received by it: as when a connection breaks between read and reply."""
    monkeypatch.setattr("trainer.data.stream_reader._CLAIM_AFTER_S", 0.2)
    bench = make_bench()
    reader = TrajectoryReader(bench.redis, bench.run_id)
    await reader.open()
    await bench.writer.publish(answers(bench, "taken along", 0))
    batch = await bench.take(1)
    assert batch is not None


async def test_draining_drops_all_that_is_left(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    await bench.writer.publish(answers(bench, "a", 0) + answers(bench, "b", 1) + answers(bench, "c", 2)[:1])
    batch = await bench.take(1)
    assert batch is not None
    await bench.intake.settle_trained([member.entry for member in batch[0].members])
    assert await bench.intake.drain() == 3
    accounts = await bench.ledger.accounts()
    assert (accounts.published, accounts.trained, accounts.dropped) == (5, 2, {"run_concluded": 3})


async def test_groups_of_equal_rewards_are_dropped_and_made_up_for_until_the_bound(
    make_bench: Callable[..., Bench],
) -> None:
    bench = make_bench(group_filter=GroupFilter(most_equal=2))
    same = [answers(bench, f"same{ordinal}", ordinal, reward=1.0) for ordinal in range(3)]
    for group in (*same, answers(bench, "differs", 3)):
        await bench.writer.publish(group)
    batch = await bench.take(2)
    # Two were dropped; the third is trained as it is: a task that is solved must come to its end.
    assert batch is not None and [group.group for group in batch] == ["same2", "differs"]
    await bench.dropped({"equal_rewards": 4})
    assert await DeadLetters(bench.redis, bench.run_id).newest(9) == [], "nothing was wrong with them"
    accounts = await bench.ledger.accounts()
    assert accounts.dropped_groups == 2
    # The next batch has its own bound.
    await bench.writer.publish(answers(bench, "same4", 4, reward=0.0))
    await bench.dropped({"equal_rewards": 6})

"""Dead letters on a real Valkey: what cannot be trained is kept with its reason, and training goes on."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from services.run_store.keys import RunKeys
from services.run_store.stream import KEPT, LARGEST, DeadLetters
from services.wire.trajectory import encode_trajectory
from tests.support.intake_bench import Bench, answers, intake_benches
from tests.support.mesh_command import run_command
from tests.support.trajectories import a_segment


@pytest.fixture
async def make_bench(redis_url: str, run_id: str) -> AsyncIterator[Callable[..., Bench]]:
    async with intake_benches(redis_url, run_id) as make:
        yield make


async def test_a_group_of_which_too_few_finished_is_a_dead_letter(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(expire_after_s=0.05, smallest=3)
    await bench.writer.publish(answers(bench, "short", 0, size=4)[:2] + answers(bench, "enough", 1, size=4)[:3])
    batch = await bench.take(1)
    assert batch is not None and (batch[0].group, batch[0].lost) == ("enough", 1)
    await bench.dropped({"incomplete_group": 2})
    letters = await DeadLetters(bench.redis, bench.run_id).newest(9)
    assert {letter.why for letter in letters} == {"group short: 2 of 4 siblings finished, 3 are wanted"}
    assert (await bench.ledger.accounts()).dropped_groups == 1


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "a NaN logprob": ("bad_number", {"segments": [a_segment([5], [6], [math.nan], [3])]}),
    "a NaN reward": ("bad_number", {"reward": math.nan}),
    "nothing sampled": ("empty", {"segments": []}),
    "a mask longer than its tokens": (
        "malformed",
        {"segments": [msgspec.structs.replace(a_segment([5], [6], [-1.0], [3]), loss_mask=bytes([0, 1, 1]))]},
    ),
    "an array cut off": (
        "malformed",
        {"segments": [msgspec.structs.replace(a_segment([5], [6], [-1.0], [3]), token_ids=b"12345")]},
    ),
    "a version from the future": ("future_version", {"segments": [a_segment([5], [6], [-1.0], [4])]}),
    "another tokenizer": ("tokenizer", {"tokenizer": "theirs"}),
}


@pytest.mark.parametrize("what", BAD)
async def test_a_bad_batch_is_dead_lettered_with_its_reason_and_training_goes_on(
    what: str, make_bench: Callable[..., Bench]
) -> None:
    cause, changes = BAD[what]
    bench = make_bench()
    sound, poisoned = answers(bench, "bad", 0)
    bad = msgspec.structs.replace(poisoned, **changes)
    ids = await bench.writer.publish([sound, bad])
    await bench.writer.publish(answers(bench, "next", 1))
    batch = await bench.take(1)
    assert batch is not None and batch[0].group == "next"
    await bench.dropped({cause: 1, "spoiled_group": 1})
    accounts = await bench.ledger.accounts()
    assert accounts.dropped_groups == 1
    arrivals = bench.intake.take_arrivals()
    assert (dict(arrivals.dropped), arrivals.trajectories, arrivals.tokens) == (accounts.dropped, 3, 6)
    letters = {letter.entry: letter for letter in await DeadLetters(bench.redis, bench.run_id).newest(9)}
    assert letters.keys() == set(ids)
    letter = letters[ids[1]]
    assert (letter.cause, letter.payload, letter.size) == (cause, encode_trajectory(bad), len(letter.payload))
    assert "trajectory bad/1" in letter.why
    assert letters[ids[0]].why == f"group bad: {letter.why}"


async def test_dead_letters_are_bounded(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench()
    stream = RunKeys(bench.run_id).stream
    large = b"x" * (LARGEST + 1)
    async with bench.redis.pipeline() as pipe:
        for number in range(KEPT + 40):
            pipe.xadd(stream, {"t": b"no trajectory, number %d" % number})
        pipe.xadd(stream, {"t": large})
        await pipe.execute()
    await bench.dropped({"undecodable": KEPT + 41})
    letters = await DeadLetters(bench.redis, bench.run_id).newest(KEPT + 50)
    assert len(letters) == KEPT
    assert (letters[0].size, letters[0].payload) == (len(large), b"")
    assert letters[-1].payload == b"no trajectory, number 41"


async def test_dead_letters_are_listed_by_a_command(make_bench: Callable[..., Bench], redis_url: str) -> None:
    bench = make_bench()
    (entry,) = await bench.writer.publish(answers(bench, "bad", 0, reward=math.inf)[:1])
    await bench.dropped({"bad_number": 1})
    command = ["dead-letters", "--run-id", bench.run_id, "--redis-url", redis_url]
    listed = await asyncio.to_thread(run_command, [*command, "--json"])
    assert listed.code == 0, listed.err
    letter = json.loads(listed.out)
    assert (letter["entry"], letter["cause"], letter["why"]) == (
        entry,
        "bad_number",
        "trajectory bad/0 has the reward inf",
    )
    shown = await asyncio.to_thread(run_command, command)
    assert (shown.code, shown.out.splitlines()[-1]) == (0, "dropped of 1 published: 1 bad_number")
    assert entry in shown.out
    unknown = await asyncio.to_thread(run_command, ["dead-letters", "--run-id", "nosuch", "--redis-url", redis_url])
    assert (unknown.code, unknown.out) == (2, "")
    assert "Redis knows no run 'nosuch'" in unknown.err

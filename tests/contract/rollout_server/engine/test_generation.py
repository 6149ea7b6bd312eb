"""Requests and their answers: what a rollout server may rely on, whichever engine is inside."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from rollout_server.engines.base import Engine, EngineStatus
from services.wire.errors import ConflictError, ContextLengthError, RollmeshError, UsageError
from tests.contract.rollout_server import engine_harness as harness
from tests.contract.rollout_server.engine_harness import (
    LOGPROB_GAP,
    MAX_RUNNING,
    EngineCase,
    check_spans,
    prompts,
    request,
    sample_of,
)
from tests.support.rollout_host import until

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_it_is_an_engine_and_describes_itself(case: EngineCase) -> None:
    assert isinstance(case.engine, Engine)
    assert case.engine.max_model_len == 256
    assert case.engine.eos_token_ids == (harness.END,)
    status = case.engine.status()
    assert isinstance(status, EngineStatus)
    assert (status.policy_version, status.paused, status.failure) == (case.version, False, None)


async def test_every_sampled_token_is_counted(case: EngineCase) -> None:
    before = case.engine.status().tokens_generated
    answers = await case.many([request(prompt, 7, n=3, temperature=1.0) for prompt in prompts(5, seed=21)])
    sampled = sum(len(sample.token_ids) for samples in answers for sample in samples)
    assert case.engine.status().tokens_generated - before == sampled


async def test_how_much_of_its_memory_requests_hold_is_told_where_the_engine_knows(case: EngineCase) -> None:
    if case.engine.status().name == "http":
        assert case.engine.status().kv_use is None
        return
    seen = 0.0
    # vLLM tells it every half second: a round may end before.
    async with asyncio.timeout(20.0):
        while not seen:
            round_ = asyncio.create_task(case.many([request(prompts(1, seed=22)[0], 200, n=8, ignore_eos=True)]))
            while not round_.done():
                seen = max(seen, case.engine.status().kv_use or 0.0)
                await asyncio.sleep(0.01)
            await round_
        assert 0.0 < seen <= 1.0
        await until(lambda: case.engine.status().kv_use == 0.0)


async def test_siblings_differ_and_each_comes_once(case: EngineCase) -> None:
    samples = await case.one(request(prompts(1, seed=5)[0], 16, n=8, ignore_eos=True))
    assert [sample.index for sample in samples] == list(range(8))
    assert len({tuple(sample.token_ids) for sample in samples}) == 8
    for sample in samples:
        assert sample.finish_reason == "length"
        assert len(sample.token_ids) == 16


async def test_stop_tokens_end_a_sample_and_belong_to_it(case: EngineCase) -> None:
    prompt = prompts(1, seed=9)[0]
    greedy = sample_of(await case.one(request(prompt, 12, temperature=0.0, ignore_eos=True))).token_ids
    stop = greedy[-1]
    asked = request(prompt, 50, temperature=0.0, ignore_eos=True, stop_token_ids=(stop,))
    sample = sample_of(await case.one(asked))
    assert sample.token_ids == greedy[: greedy.index(stop) + 1]
    assert sample.finish_reason == "stop"


async def test_the_models_length_ends_a_sample(case: EngineCase) -> None:
    prompt = prompts(1, seed=10, shortest=250, longest=250)[0]
    sample = sample_of(await case.one(request(prompt, 50, ignore_eos=True)))
    assert len(sample.token_ids) == 6
    assert sample.finish_reason == "length"


async def test_more_requests_than_rows_all_end(case: EngineCase) -> None:
    asked = [request(prompt, 8, n=8, ignore_eos=True) for prompt in prompts(10, seed=12, shortest=2, longest=30)]
    answers = await case.many(asked)
    assert [len(samples) for samples in answers] == [8] * 10
    assert all(len(sample.token_ids) == 8 for samples in answers for sample in samples)


async def test_a_request_for_more_siblings_than_rows_ends(case: EngineCase) -> None:
    samples = await case.one(request(prompts(1, seed=13)[0], 4, n=MAX_RUNNING + 5, ignore_eos=True))
    assert [sample.index for sample in samples] == list(range(MAX_RUNNING + 5))


async def test_every_token_is_stamped_with_the_version_that_drew_it(case: EngineCase) -> None:
    samples = await case.one(request(prompts(1, seed=14)[0], 10, n=4))
    for sample in samples:
        check_spans(sample)
        assert [span.version for span in sample.versions] == [case.version]
    assert case.engine.policy_version == case.version


async def test_streamed_deltas_add_up(case: EngineCase) -> None:
    # So many that they take several times as long as tokens may be gathered into one delta.
    asked = request(prompts(1, seed=15)[0], 200, n=2, stream=True, ignore_eos=True)
    with case.in_flight(asked) as (reading, task):
        samples = await asyncio.wait_for(task, 60.0)
    assert len(reading.deltas) > 4
    for delta in reading.deltas:
        check_spans(delta)
    for sample in samples:
        check_spans(sample)
        assert len(sample.token_ids) == 200
        expected = harness.teacher_forced(case.folder, asked.prompt_token_ids, sample.token_ids)
        assert float((torch.tensor(sample.logprobs) - expected).abs().mean()) <= LOGPROB_GAP


@pytest.mark.parametrize("bad", [[], [harness.VOCABULARY], [-1]], ids=["empty", "outside", "negative"])
async def test_a_prompt_that_no_model_can_read_is_refused(case: EngineCase, bad: list[int]) -> None:
    with pytest.raises(UsageError):
        await case.one(request(bad, 4))
    assert len(await case.one(request([5], 4))) == 1


@pytest.mark.parametrize("length", [256, 300])
async def test_a_prompt_that_leaves_no_room_is_refused_in_the_words_clients_look_for(
    case: EngineCase, length: int
) -> None:
    with pytest.raises(ContextLengthError, match="maximum context length is 256 tokens"):
        await case.one(request([5] * length, 4))


@pytest.mark.parametrize(
    "absurd",
    [
        {"temperature": -0.5},
        {"temperature": 0.001},
        {"temperature": 2.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": float("nan")},
        {"top_k": -2},
        {"min_p": 1.5},
        {"min_p": float("nan")},
        {"presence_penalty": 2.5},
        {"frequency_penalty": -2.5},
        {"repetition_penalty": 0.0},
        {"repetition_penalty": 1e-30},
        {"repetition_penalty": float("inf")},
        {"min_tokens": -1},
        {"min_tokens": 5},
        {"min_tokens": 4, "stop_token_ids": tuple(range(harness.VOCABULARY))},
        {"seed": 1 << 64},
        {"top_logprobs": 21},
        {"top_logprobs": -1},
    ],
    ids=str,
)
async def test_parameters_that_cannot_be_sampled_with_are_refused_and_harm_no_neighbour(
    case: EngineCase, absurd: dict[str, Any]
) -> None:
    neighbour = asyncio.create_task(case.one(request([5, 6], 40, ignore_eos=True)))
    with pytest.raises(UsageError):
        await case.one(request([5], 4, **absurd))
    assert len(sample_of(await neighbour).token_ids) == 40


async def test_an_id_in_flight_is_refused(case: EngineCase) -> None:
    asked = request(prompts(1, seed=16)[0], 200, stream=True, ignore_eos=True)
    with case.in_flight(asked) as (reading, task):
        await asyncio.wait_for(reading.started.wait(), 30.0)
        with pytest.raises(ConflictError):
            await case.one(asked)
        assert await case.engine.abort([asked.request_id]) == 1
        await asyncio.wait_for(task, 30.0)


async def test_an_error_is_always_typed(case: EngineCase) -> None:
    for failing in (case.engine.commit(10_000), case.engine.stage(b"")):
        with pytest.raises(RollmeshError):
            await failing

"""A request goes on where an earlier try of it was broken off, and tells what it generates in steps of a given size."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import msgspec
import pytest

from rollout_server.engines.base import GenerationDelta, GenerationRequest
from services.wire.errors import UsageError
from tests.contract.rollout_server.engine_harness import EngineCase, InFlight, check_spans, prompts, request, sample_of

pytestmark = pytest.mark.asyncio(loop_scope="package")
_LENGTH = 40


def broken_off(asked: GenerationRequest, sampled: list[int], index: int = 0) -> GenerationRequest:
    """What is asked of an engine after an earlier try of sample `index` of `asked` sampled these tokens."""
    return dataclasses.replace(
        asked,
        request_id=f"{asked.request_id}-{index}-after-{len(sampled)}",
        prompt_token_ids=[*asked.prompt_token_ids, *sampled],
        sampling=msgspec.structs.replace(asked.sampling, max_tokens=asked.sampling.max_tokens - len(sampled)),
        n=1,
        resumed=len(sampled),
        first_index=index,
    )


async def continuations(case: EngineCase, asked: GenerationRequest) -> list[tuple[GenerationDelta, GenerationDelta]]:
    """The samples of `asked`, each with the rest of it that is sampled after some of its own tokens."""
    unbroken = await case.one(asked)
    breaks = [(sample, cut) for sample in unbroken for cut in (1, 7, len(sample.token_ids) - 1)]
    rest = await case.many([broken_off(asked, sample.token_ids[:cut], sample.index) for sample, cut in breaks])
    return [(sample, sample_of(answer)) for (sample, _), answer in zip(breaks, rest, strict=True)]


def check_same_end(pairs: list[tuple[GenerationDelta, GenerationDelta]]) -> None:
    for whole, rest in pairs:
        check_spans(rest)
        assert 0 < len(rest.token_ids) < len(whole.token_ids)
        assert rest.token_ids == whole.token_ids[-len(rest.token_ids) :]
        assert rest.logprobs == pytest.approx(whole.logprobs[-len(rest.logprobs) :], abs=1e-4)
        assert rest.finish_reason == whole.finish_reason


async def test_a_greedy_continuation_is_that_of_the_unbroken_answer(case: EngineCase) -> None:
    asked = request(prompts(1, seed=61)[0], _LENGTH, temperature=0.0, ignore_eos=True)
    check_same_end(await continuations(case, asked))


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"n": 3},
        {"temperature": 0.7, "top_p": 0.9},
        {"presence_penalty": 1.5, "frequency_penalty": 0.7},
        {"repetition_penalty": 1.8},
    ],
    ids=str,
)
async def test_a_seeded_continuation_is_that_of_the_unbroken_answer(case: EngineCase, sampling: dict[str, Any]) -> None:
    if case.engine.status().name == "vllm":
        pytest.skip("vLLM cannot advance a seed")
    asked = request(prompts(1, seed=62)[0], _LENGTH, ignore_eos=True, seed=5, **sampling)
    check_same_end(await continuations(case, asked))


async def test_a_repetition_penalty_is_continued(case: EngineCase) -> None:
    asked = request(prompts(1, seed=63)[0], _LENGTH, temperature=0.0, ignore_eos=True, repetition_penalty=1.8)
    check_same_end(await continuations(case, asked))


async def test_min_tokens_count_those_of_the_earlier_try(case: EngineCase) -> None:
    prompt = prompts(1, seed=64)[0]
    free = sample_of(await case.one(request(prompt, _LENGTH, temperature=0.0, ignore_eos=True))).token_ids
    stop = free[12]
    asked = request(prompt, _LENGTH, temperature=0.0, ignore_eos=True, min_tokens=20, stop_token_ids=(stop,))
    check_same_end(await continuations(case, asked))
    for cut in (3, 19):
        barred = broken_off(asked, free[:cut])
        whole = [*free[:cut], *sample_of(await case.one(barred)).token_ids]
        assert stop not in whole[cut:20]
    # All of them were sampled: nothing bars the stop token any more.
    allowed = request(prompt, _LENGTH, temperature=0.0, ignore_eos=True, min_tokens=12, stop_token_ids=(stop,))
    rest = sample_of(await case.one(broken_off(allowed, free[:12])))
    assert (rest.token_ids, rest.finish_reason) == ([stop], "stop")


@pytest.mark.parametrize("absurd", [{"resumed": 3}, {"resumed": -1}, {"delta_every": 0}, {"first_index": -1}], ids=str)
async def test_a_continuation_of_nothing_is_refused(case: EngineCase, absurd: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        await case.one(dataclasses.replace(request([5, 6, 7], 4), **absurd))


@pytest.mark.parametrize("n", [1, 3])
async def test_deltas_come_in_steps_and_lose_nothing(case: EngineCase, n: int) -> None:
    # So many tokens take several times as long as they may be gathered into one delta.
    plain = request(prompts(1, seed=65)[0], 200, n=n, temperature=0.0, ignore_eos=True, top_logprobs=2)
    expected = await case.one(plain)
    stepwise = dataclasses.replace(plain, request_id=f"{plain.request_id}-steps", stream=True, delta_every=8)
    reading = InFlight(stepwise.request_id)
    answer = await asyncio.wait_for(reading.read(case.engine, stepwise), 60.0)
    for delta in reading.deltas:
        check_spans(delta)
        assert len(delta.token_ids) >= 8 or delta.finish_reason is not None
    assert len(reading.deltas) >= 3 * n
    for sample, whole in zip(answer, expected, strict=True):
        assert sample.token_ids == whole.token_ids
        assert sample.finish_reason == whole.finish_reason == "length"
        assert sample.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
        assert sample.top_logprobs is not None and len(sample.top_logprobs) == 200


async def test_an_aborted_request_hands_out_what_its_steps_held_back(case: EngineCase) -> None:
    asked = request(prompts(1, seed=66)[0], 240, stream=True, ignore_eos=True)
    asked = dataclasses.replace(asked, delta_every=16)
    with case.in_flight(asked) as (reading, task):
        await asyncio.wait_for(reading.started.wait(), 30.0)
        assert await case.engine.abort([asked.request_id]) == 1
        sample = sample_of(await asyncio.wait_for(task, 30.0))
    check_spans(sample)
    assert sample.finish_reason == "abort"
    assert len(sample.token_ids) == sum(len(delta.token_ids) for delta in reading.deltas) >= 16

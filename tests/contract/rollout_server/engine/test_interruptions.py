"""Abort, pause and hanging up: what was sampled comes back, and the engine goes on."""

from __future__ import annotations

import asyncio

import pytest
import torch

from tests.contract.rollout_server import engine_harness as harness
from tests.contract.rollout_server.engine_harness import (
    LOGPROB_GAP,
    EngineCase,
    check_spans,
    prompts,
    request,
    sample_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="package")


@pytest.mark.parametrize("by_id", [True, False])
async def test_abort_returns_what_was_sampled(case: EngineCase, by_id: bool) -> None:
    asked = request(prompts(1, seed=30)[0], 240, n=2, stream=True, ignore_eos=True)
    with case.in_flight(asked) as (reading, task):
        await asyncio.wait_for(reading.started.wait(), 30.0)
        assert await case.engine.abort([asked.request_id] if by_id else None) == 1
        samples = await asyncio.wait_for(task, 30.0)
    assert len(samples) == 2
    assert any(sample.token_ids for sample in samples)  # one sibling may have been admitted a step before the other
    for sample in samples:
        assert sample.finish_reason == "abort"
        assert len(sample.token_ids) < 240
        check_spans(sample)
        if not sample.token_ids:
            continue
        expected = harness.teacher_forced(case.folder, asked.prompt_token_ids, sample.token_ids)
        assert float((torch.tensor(sample.logprobs) - expected).abs().mean()) <= LOGPROB_GAP
    assert await case.engine.abort([asked.request_id]) == 0


async def test_a_reader_that_leaves_aborts_its_request(case: EngineCase) -> None:
    deltas = case.engine.generate(request(prompts(1, seed=31)[0], 240, n=2, stream=True, ignore_eos=True))
    await anext(deltas)
    assert case.engine.status().running > 0
    await deltas.aclose()  # type: ignore[attr-defined]
    async with asyncio.timeout(10.0):
        while case.engine.status().running:  # noqa: ASYNC110 - the engine offers no event for it
            await asyncio.sleep(0.001)


async def test_pause_keep_freezes_and_resume_goes_on(case: EngineCase) -> None:
    asked = request(prompts(1, seed=32)[0], 240, stream=True, temperature=0.0, ignore_eos=True)
    whole = sample_of(await case.one(asked)).token_ids
    asked = request(asked.prompt_token_ids, 240, stream=True, temperature=0.0, ignore_eos=True)
    with case.in_flight(asked) as (reading, task):
        await asyncio.wait_for(reading.started.wait(), 30.0)
        await case.engine.pause("keep")
        assert case.engine.status().paused
        await asyncio.sleep(0)
        frozen = reading.seen
        later = asyncio.create_task(case.one(request([5, 6], 4)))
        await asyncio.wait({later}, timeout=0.1)
        assert reading.seen == frozen < 240
        assert not later.done()
        await case.engine.resume()
        assert not case.engine.status().paused
        sample = sample_of(await asyncio.wait_for(task, 60.0))
        assert len(sample_of(await later).token_ids) > 0
    assert sample.token_ids == whole


async def test_pause_wait_lets_requests_end(case: EngineCase) -> None:
    asked = request(prompts(1, seed=33)[0], 200, stream=True, ignore_eos=True)
    with case.in_flight(asked) as (reading, task):
        await asyncio.wait_for(reading.started.wait(), 30.0)
        await asyncio.wait_for(case.engine.pause("wait"), 60.0)
        sample = sample_of(await asyncio.wait_for(task, 10.0))
    assert (len(sample.token_ids), sample.finish_reason) == (200, "length")
    later = asyncio.create_task(case.one(request([5, 6], 4)))
    await asyncio.wait({later}, timeout=0.1)
    assert not later.done()
    await case.engine.resume()
    await asyncio.wait_for(later, 30.0)


async def test_pause_abort_ends_requests_with_what_they_have(case: EngineCase) -> None:
    asked = request(prompts(1, seed=34)[0], 240, stream=True, ignore_eos=True)
    with case.in_flight(asked) as (reading, task):
        await asyncio.wait_for(reading.started.wait(), 30.0)
        await case.engine.pause("abort")
        sample = sample_of(await asyncio.wait_for(task, 30.0))
    assert sample.finish_reason == "abort"
    assert 0 < len(sample.token_ids) < 240
    await case.engine.resume()
    assert len(await case.one(request([5, 6], 4))) == 1

"""Many versions under load, one after the other: at the end every byte is the last one's, and so is every token."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from tests.contract.rollout_server import engine_harness as harness
from tests.contract.rollout_server.engine_harness import EngineCase, check_spans, prompts, request, sample_of

pytestmark = pytest.mark.asyncio(loop_scope="package")
UPDATES = 20
EXACT = 1e-5


async def test_after_many_updates_under_load_the_last_weights_answer_exactly(case: EngineCase, tmp_path: Path) -> None:
    async def stream(number: int) -> int:
        """Requests, one after the other, until it is cancelled."""
        for prompt in prompts(1000, seed=300 + number):
            sample = sample_of(await case.one(request(prompt, 48, stream=True, ignore_eos=True)))
            check_spans(sample)
            versions = [span.version for span in sample.versions]
            assert versions == sorted(set(versions))
        raise AssertionError("more updates than requests")

    load = [asyncio.create_task(stream(number)) for number in range(2)]
    try:
        for number in range(UPDATES):
            folder = tmp_path / str(number)
            await case.commit(await case.stage_next(400 + number, folder), folder)
            for task in load:
                assert not task.done() or task.result()
    finally:
        for task in load:
            task.cancel()
        await asyncio.wait(load)
    for prompt in prompts(4, seed=500):
        sample = sample_of(await case.one(request(prompt, 16, temperature=0.0)))
        assert sample.token_ids == harness.greedy_tokens(folder, prompt, 16)
        expected = harness.teacher_forced(folder, prompt, sample.token_ids)
        assert float((torch.tensor(sample.logprobs) - expected).abs().max()) <= EXACT

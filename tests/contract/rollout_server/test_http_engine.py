"""The engine behind a URL, as a plain `vllm serve` is one: what it says is judged, what it cannot do is said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rollout_server.engines.base import GenerationDelta, collect
from rollout_server.engines.http.client import EngineLostError
from rollout_server.engines.http.engine import HttpEngine
from rollout_server.engines.http.wire import OtherWeightsError
from services.wire.errors import (
    CapacityError,
    ContextLengthError,
    NotFoundError,
    NotReadyError,
    RollmeshError,
    UnauthenticatedError,
    UsageError,
    WireError,
)
from tests.contract.rollout_server.engine_harness import InFlight, request, sample_of
from tests.support.rollout_host import until
from tests.support.scripted_engine_server import ScriptedEngineServer, manifest
from weight_bus.errors import StageError

SCALE_OUT = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."


@asynccontextmanager
async def engine_at(url: str, folder: Path, *, key: str | None = None) -> AsyncIterator[HttpEngine]:
    engine = HttpEngine(folder, url=url, key=key, run_id="run", transport="shm")
    try:
        await asyncio.wait_for(engine.start(), 20.0)
        yield engine
    finally:
        await engine.close()


@pytest.fixture
async def server() -> AsyncIterator[ScriptedEngineServer]:
    async with ScriptedEngineServer().serving() as server:
        yield server


@pytest.fixture
async def engine(server: ScriptedEngineServer, tiny_policy: Path) -> AsyncIterator[HttpEngine]:
    async with engine_at(server.url, tiny_policy) as engine:
        yield engine


async def sampled(engine: HttpEngine, max_tokens: int = 4, **sampling: Any) -> GenerationDelta:
    asked = request([5, 6], max_tokens, ignore_eos=True, **sampling)
    return sample_of(await asyncio.wait_for(collect(engine.generate(asked)), 20.0))


async def test_a_commit_ends_what_is_in_flight_and_no_token_is_of_two_versions(
    server: ScriptedEngineServer, engine: HttpEngine
) -> None:
    server.step.clear()
    server.free = 3
    asked = request([5, 6], 200, stream=True, ignore_eos=True)
    reading = InFlight(asked.request_id)
    task = asyncio.create_task(reading.read(engine, asked))
    await until(lambda: reading.seen == 3)
    await engine.stage(manifest(7))
    committing = asyncio.create_task(engine.commit(7))
    sample = sample_of(await asyncio.wait_for(task, 10.0))
    # Sent while the version changes: it waits for the new one.
    later = asyncio.create_task(sampled(engine))
    report = await asyncio.wait_for(committing, 10.0)
    server.step.set()
    after = await asyncio.wait_for(later, 10.0)

    assert sample.finish_reason == "abort"
    assert sample.token_ids == [5, 6, 7]
    assert [(span.start, span.length, span.version) for span in sample.versions] == [(0, 3, 0)]
    assert [(span.length, span.version) for span in after.versions] == [(4, 7)]
    assert (engine.policy_version, report.version, report.requests_in_flight) == (7, 7, 1)
    update = server.log[server.log.index("/update_weights") + 1 :]
    assert update == ["/pause?mode=abort&clear_cache=true", "/finish_weight_update", "/resume", "generate"]


async def test_a_commit_that_the_engine_refuses_leaves_the_old_version_serving(
    server: ScriptedEngineServer, engine: HttpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await engine.stage(manifest(7))

    async def refuse(version: int) -> None:
        raise RollmeshError(f"no version {version} today")

    monkeypatch.setattr(engine._client, "finish_update", refuse)
    with pytest.raises(RollmeshError, match="no version 7 today"):
        await engine.commit(7)
    assert (engine.policy_version, engine.status().failure) == (0, None)
    assert [span.version for span in (await sampled(engine)).versions] == [0]
    assert server.log[-2:] == ["/resume", "generate"]


async def test_weights_that_nobody_committed_are_found_out_and_a_commit_mends_it(
    server: ScriptedEngineServer, engine: HttpEngine
) -> None:
    server.said = "12"
    with pytest.raises(OtherWeightsError, match="version 12 where 0 was committed"):
        await sampled(engine)
    server.said = None
    assert "unknown weights" in (engine.status().failure or "")
    with pytest.raises(OtherWeightsError):
        await sampled(engine)
    await engine.stage(manifest(13))
    await engine.commit(13)
    assert engine.status().failure is None
    assert [span.version for span in (await sampled(engine)).versions] == [13]


async def test_a_probe_finds_other_weights_without_a_request(server: ScriptedEngineServer, engine: HttpEngine) -> None:
    server.label = "5"
    await until(lambda: engine.status().failure is not None)
    with pytest.raises(OtherWeightsError, match="says version 5 where 0 was committed"):
        await sampled(engine)


async def test_an_engine_that_goes_away_ends_its_requests_and_is_found_again(tiny_policy: Path) -> None:
    server = ScriptedEngineServer()
    async with server.serving():
        port = int(server.url.rpartition(":")[2])
        engine = HttpEngine(tiny_policy, url=server.url, key=None, run_id="run", transport="shm")
        await engine.start()
        server.step.clear()
        server.free = 3
        asked = request([5, 6], 200, stream=True, ignore_eos=True)
        reading = InFlight(asked.request_id)
        task = asyncio.create_task(reading.read(engine, asked))
        await asyncio.wait_for(reading.started.wait(), 10.0)
    try:
        with pytest.raises(EngineLostError):
            await asyncio.wait_for(task, 10.0)
        assert "does not answer" in (engine.status().failure or "")
        with pytest.raises(NotReadyError):
            await sampled(engine)
        server.step.set()
        async with server.serving(port):
            await until(lambda: engine.status().failure is None, 10.0)
            assert len((await sampled(engine)).token_ids) == 4
    finally:
        await engine.close()


async def test_logprobs_of_the_plain_softmax_are_taken_only_where_they_are_those_sampled_from(
    tiny_policy: Path,
) -> None:
    async with ScriptedEngineServer(processed=False).serving() as server, engine_at(server.url, tiny_policy) as engine:
        assert (await sampled(engine)).logprobs == [-0.5] * 4
        assert len((await sampled(engine, temperature=0.0)).token_ids) == 4
        for other in ({"temperature": 0.7}, {"top_k": 3}, {"repetition_penalty": 1.1}, {"min_tokens": 2}):
            with pytest.raises(UsageError, match="--logprobs-mode processed_logprobs"):
                await sampled(engine, **other)


async def test_an_engine_without_routes_for_operators_serves_fixed_weights_and_says_what_it_lacks(
    tiny_policy: Path,
) -> None:
    async with ScriptedEngineServer(operated=False).serving() as server, engine_at(server.url, tiny_policy) as engine:
        assert [span.version for span in (await sampled(engine)).versions] == [0]
        with pytest.raises(StageError, match="VLLM_SERVER_DEV_MODE=1"):
            await engine.stage(manifest(1))
        with pytest.raises(UsageError, match="VLLM_SERVER_DEV_MODE=1"):
            await engine.pause("keep")
        with pytest.raises(NotFoundError):
            await engine.weights_digest()
        assert not engine.status().paused
        await engine.pause("wait")
        later = asyncio.create_task(sampled(engine))
        await asyncio.wait({later}, timeout=0.1)
        assert not later.done()
        await engine.resume()
        assert len((await later).token_ids) == 4


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (403, {"error": {"message": SCALE_OUT, "type": "PermissionDeniedError", "code": 403}}, UsageError),
        (401, {"error": "Unauthorized"}, UnauthenticatedError),
    ],
)
async def test_an_engine_that_cannot_serve_is_refused_at_the_start(
    server: ScriptedEngineServer, tiny_policy: Path, status: int, body: dict[str, Any], kind: type[RollmeshError]
) -> None:
    server.refusal = (status, body)
    with pytest.raises(kind, match=r"scale-out|Unauthorized"):
        async with engine_at(server.url, tiny_policy):
            pass


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, {"error": {"message": "maximum context length is 256 tokens", "code": 400}}, ContextLengthError),
        (400, {"error": {"message": "top_p must be in (0, 1]", "code": 400}}, UsageError),
        (429, {"error": {"message": "later", "type": "rate_limit_error", "code": "capacity"}}, CapacityError),
        (503, {"error": {"message": "leaving", "type": "server_error", "code": "draining"}}, NotReadyError),
        (500, {"error": {"message": "broken", "code": 500}}, RollmeshError),
    ],
)
async def test_refusals_come_typed_and_the_engine_goes_on(
    server: ScriptedEngineServer, engine: HttpEngine, status: int, body: dict[str, Any], kind: type[RollmeshError]
) -> None:
    server.refusal = (status, body)
    with pytest.raises(kind, match=body["error"]["message"].replace("(", r"\(").replace("]", r"\]")):
        await sampled(engine)
    server.refusal = None
    assert engine.status().failure is None
    assert len((await sampled(engine)).token_ids) == 4


@pytest.mark.parametrize(
    ("event", "kind"),
    [
        ({"error": {"message": "out of memory", "code": 500}}, RollmeshError),
        ({"choices": [{"index": 0, "token_ids": [7], "logprobs": None}]}, WireError),
        ({"choices": [{"index": 3, "token_ids": []}]}, WireError),
        (
            {
                "choices": [
                    {"index": 0, "token_ids": [7], "logprobs": {"content": [{"token_id": 7, "logprob": -9999.0}]}}
                ]
            },
            WireError,
        ),
    ],
    ids=["error", "no logprobs", "too many samples", "no number"],
)
async def test_what_goes_wrong_in_mid_stream_ends_that_request_alone(
    server: ScriptedEngineServer, engine: HttpEngine, event: dict[str, Any], kind: type[RollmeshError]
) -> None:
    server.event = event
    with pytest.raises(kind):
        await sampled(engine)
    server.event = None
    assert engine.status().failure is None
    assert len((await sampled(engine)).token_ids) == 4
    assert engine.status().running == engine.status().waiting == 0


async def test_greedy_siblings_are_generated_once(server: ScriptedEngineServer, engine: HttpEngine) -> None:
    samples = await collect(engine.generate(request([5, 6], 4, n=3, temperature=0.0, ignore_eos=True)))
    assert [sample.token_ids for sample in samples] == [[5, 6, 7, 8]] * 3
    assert server.calls[-1]["sampling_params"]["n"] == 1


async def test_closing_a_stream_closes_the_engines_connection(server: ScriptedEngineServer, engine: HttpEngine) -> None:
    server.step.clear()
    deltas = engine.generate(request([5, 6], 200, stream=True, ignore_eos=True))
    waiting = asyncio.ensure_future(anext(deltas))
    await until(lambda: server.in_flight == 1)
    waiting.cancel()
    await asyncio.wait({waiting})
    await deltas.aclose()  # type: ignore[attr-defined]
    await until(lambda: server.in_flight == 0)
    assert engine.status().waiting == 0

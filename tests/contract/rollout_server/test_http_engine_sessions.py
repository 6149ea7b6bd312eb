"""Sessions and capture over an engine behind a URL: a rollout server in a process of its own, killed and started again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI

from rollout_server.engines.base import collect
from rollout_server.engines.factory import make_engine
from rollout_server.engines.http.client import EngineLostError
from rollout_server.engines.http.engine import HttpEngine
from rollout_server.engines.http.wire import OtherWeightsError
from services.wire.packed import unpack_logprobs, unpack_tokens
from services.wire.trajectory import Trajectory
from tests.conftest import free_port
from tests.contract.rollout_server import engine_harness as harness
from tests.contract.rollout_server.engine_harness import InFlight, WeightPublisher, request, sample_of
from tests.support.chat_policy import save_chat_policy
from tests.support.engine_process import rollout_server_process
from tests.support.rollout_host import Host, hosting, small_batch, until
from tests.support.scripted_engine_server import ScriptedEngineServer, manifest
from tests.third_party.sessions import Opened, opened

TOLERANCE = 1e-4
SESSIONS = 4


async def talk(session: Opened) -> list[list[int]]:
    """Three turns, the second streamed, with the `openai` package; the token ids that the client was told of each."""
    told: list[list[int]] = []
    messages: list[Any] = [{"role": "user", "content": "hello there"}]
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as client:
        for turn in range(3):
            asked: dict[str, Any] = {
                "model": "any",
                "messages": messages,
                "max_tokens": 24,
                "extra_body": {"return_token_ids": True},
            }
            if turn != 1:
                answer = await client.chat.completions.create(**asked)
                choice = answer.choices[0]
                told.append((choice.model_extra or {})["token_ids"])
                said = choice.message.content or ""
            else:
                said, ids = "", []
                async for chunk in await client.chat.completions.create(**asked, stream=True):
                    for part in chunk.choices:
                        said += part.delta.content or ""
                        ids += (part.model_extra or {}).get("token_ids") or []
                told.append(ids)
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": f"and {turn}?"}]
    return told


def check_logprobs(trajectory: Trajectory, folder: Path) -> int:
    """Recorded logprobs against a plain forward of each segment; returns how many were compared."""
    model, compared = harness.reference(folder), 0
    for segment in trajectory.segments:
        ids = torch.tensor(unpack_tokens(segment.token_ids).tolist())
        with torch.no_grad():
            logprobs = model(input_ids=ids[None], use_cache=False).logits[0].log_softmax(-1)
        recorded = torch.from_numpy(unpack_logprobs(segment.logprobs).copy())
        for span in segment.version_spans:
            rows = slice(span.start, span.start + span.length)
            expected = logprobs[span.start - 1 : rows.stop - 1].gather(1, ids[rows, None]).squeeze(1)
            assert float((expected - recorded[rows]).abs().max()) <= TOLERANCE
            compared += span.length
    return compared


async def sessions_are_captured(host: Host, folder: Path) -> None:
    """Agents talk in sessions; what is published is what they were told, with the model's own logprobs."""
    sessions = [await opened(host) for _ in range(SESSIONS)]
    told = await asyncio.gather(*(talk(session) for session in sessions))
    for session in sessions:
        answer = await host.http.post(f"/sessions/{session.session_id}/finish", json={"reward": 1.0})
        assert answer.status_code == 200, answer.text
    published = {trajectory.trajectory_id: trajectory for trajectory in await host.published()}
    for session, turns in zip(sessions, told, strict=True):
        trajectory = published[session.session_id]
        sampled = [
            unpack_tokens(segment.token_ids)[span.start : span.start + span.length].tolist()
            for segment in trajectory.segments
            for span in segment.version_spans
        ]
        assert [token for part in sampled for token in part] == [token for turn in turns for token in turn]
        assert check_logprobs(trajectory, folder) == sum(map(len, turns)) > 0


async def test_sessions_over_a_rollout_server_are_captured_as_over_its_engine(
    redis_url: str, run_id: str, tmp_path: Path
) -> None:
    folder = tmp_path / "chat"
    save_chat_policy(folder)
    settings = small_batch(batch=64)
    async with AsyncExitStack() as stack:
        behind = stack.enter_async_context(
            hosting(
                make_engine("torch", folder, run_id, settings),
                redis_url=redis_url,
                run_id=f"{run_id}-behind",
                model=folder,
                settings=settings,
            )
        )
        engine = make_engine("http", folder, run_id, settings, url=(await behind).url)
        async with hosting(engine, redis_url=redis_url, run_id=run_id, model=folder, settings=settings) as host:
            await sessions_are_captured(host, folder)
            assert (await host.report())["name"] == "http"
            session = await opened(host)
            await stack.aclose()
            # The engine is gone: the server says so, and a call ends with a typed error.
            await until(lambda: engine.status().failure is not None)
            ready = await host.http.get("/readyz")
            assert ready.status_code == 503 and "does not answer" in ready.text
            url, headers = session.base_url, {"Authorization": f"Bearer {session.api_key}"}
            body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8}
            answer = await host.http.post(f"{url}/chat/completions", json=body, headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, EngineLostError.code)


async def test_an_agent_sees_nothing_of_a_commit_that_ended_its_request_in_the_engine(
    redis_url: str, run_id: str, tmp_path: Path
) -> None:
    save_chat_policy(tmp_path / "chat")
    server = ScriptedEngineServer()
    server.step.clear()
    server.free = 3
    async with server.serving():
        engine = make_engine("http", tmp_path / "chat", run_id, small_batch(), url=server.url)
        async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tmp_path / "chat") as host:
            session = await opened(host)
            url, headers = session.base_url, {"Authorization": f"Bearer {session.api_key}"}
            body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8, "return_token_ids": True}
            call = asyncio.create_task(host.http.post(f"{url}/chat/completions", json=body, headers=headers))
            await until(lambda: engine.status().tokens_generated == 3)
            # As the weight bus does it.
            assert (await host.http.post("/weights/stage", content=manifest(7))).status_code == 200
            assert (await host.http.post("/weights/commit", json={"version": 7})).status_code == 200
            server.step.set()
            choice = (await asyncio.wait_for(call, 10.0)).json()["choices"][0]
            assert choice["finish_reason"] == "length"
            assert choice["policy_versions"] == [[0, 0], [7, 3]]
            # The scripted engine begins at 5 again: what it sampled before the commit was not sampled anew.
            assert choice["token_ids"] == [5, 6, 7, 5, 6, 7, 8, 9]
            first, second = (each for each in server.calls if each["sampling_params"]["top_k"] != 1)
            assert second["token_ids"] == [*first["token_ids"], 5, 6, 7]


@pytest.fixture
async def publisher(run_id: str) -> AsyncIterator[WeightPublisher]:
    publisher = WeightPublisher(run_id, "shm")
    yield publisher
    publisher.close()


async def test_an_engine_killed_and_started_anew_serves_again_once_its_weights_are_known(
    redis_url: str, run_id: str, tmp_path: Path, publisher: WeightPublisher
) -> None:
    folder, newer = harness.save_sharp_policy(tmp_path / "model", 11), harness.save_sharp_policy(tmp_path / "new", 12)
    port = free_port()
    async with rollout_server_process(folder, redis_url, run_id, port, tmp_path / "log") as first:
        engine = HttpEngine(folder, url=first.url, key=None, run_id=run_id, transport="shm")
        await engine.start()
        try:
            await engine.stage(publisher.publish(1, newer))
            await engine.commit(1)
            reading = InFlight("long")
            task = asyncio.create_task(reading.read(engine, request([5, 6], 240, stream=True, ignore_eos=True)))
            await asyncio.wait_for(reading.started.wait(), 20.0)
            first.kill()
            with pytest.raises(EngineLostError):
                await asyncio.wait_for(task, 10.0)
            assert "does not answer" in (engine.status().failure or "")
            anew = make_engine("torch", folder, run_id, small_batch())
            async with hosting(anew, redis_url=redis_url, run_id=run_id, model=folder, server_id="behind", port=port):
                await until(lambda: "unknown weights" in (engine.status().failure or ""), 20.0)
                with pytest.raises(OtherWeightsError):
                    await collect(engine.generate(request([5, 6], 4)))
                await engine.stage(publisher.publish(2, newer))
                await engine.commit(2)
                assert engine.status().failure is None
                prompt = harness.prompts(1, seed=3)[0]
                sample = sample_of(await collect(engine.generate(request(prompt, 24, temperature=0.0))))
                assert sample.token_ids == harness.greedy_tokens(newer, prompt, 24)
                assert [span.version for span in sample.versions] == [2]
        finally:
            await engine.close()

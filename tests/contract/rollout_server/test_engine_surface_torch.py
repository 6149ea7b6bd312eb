"""The engine surface over the torch engine: real logprobs, real weights, and the `renderers` client as it comes."""

from __future__ import annotations

import asyncio
import base64
import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from openai import AsyncOpenAI
from renderers.base import create_renderer
from renderers.client import OverlongPromptError, generate
from transformers import AutoTokenizer

from rollout_server.engines.factory import make_engine
from tests.contract.rollout_server import engine_harness as harness
from tests.contract.rollout_server.engine_harness import WeightPublisher
from tests.support.chat_policy import save_chat_policy
from tests.support.rollout_host import Host, hosting, small_batch, until

GENERATE = "/inference/v1/generate"


@pytest.fixture
async def host(redis_url: str, run_id: str, tmp_path: Path) -> AsyncIterator[Host]:
    folder = harness.save_sharp_policy(tmp_path / "model", seed=11)
    settings = small_batch()
    settings.weights.transport = "shm"
    engine = make_engine("torch", folder, run_id, settings)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=folder, settings=settings) as host:
        yield host


async def answer_to(host: Host, prompt: list[int], **sampling: Any) -> dict[str, Any]:
    """The first choice of a whole answer."""
    answer = await host.http.post(GENERATE, json={"token_ids": prompt, "sampling_params": sampling})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def test_logprobs_on_the_wire_are_those_of_the_model(host: Host, tmp_path: Path) -> None:
    for prompt in harness.prompts(4, seed=60):
        choice = await answer_to(
            host, prompt, max_tokens=16, temperature=0.8, repetition_penalty=1.0, logprobs=4, ignore_eos=True
        )
        content = choice["logprobs"]["content"]
        expected = harness.teacher_forced(tmp_path / "model", prompt, choice["token_ids"], 0.8)
        found = torch.tensor([entry["logprob"] for entry in content])
        assert float((found - expected).abs().max()) <= 1e-4
        for token, entry in zip(choice["token_ids"], content, strict=True):
            own, *others = entry["top_logprobs"]
            assert entry["token"] == own["token"] == f"token_id:{token}"
            assert (own["logprob"], own["rank"]) == (entry["logprob"], entry["rank"])
            assert len(others) == 3
            ranks = [other["rank"] for other in others]
            assert ranks == sorted(ranks)
            assert all(math.isfinite(other["logprob"]) for other in others)


async def test_an_alternative_without_a_chance_is_left_out_rather_than_sent_as_infinity(host: Host) -> None:
    choice = await answer_to(host, [5, 6], max_tokens=8, top_k=2, logprobs=5, ignore_eos=True)
    for entry in choice["logprobs"]["content"]:
        assert 1 <= len(entry["top_logprobs"]) <= 2


async def test_streamed_greedy_tokens_are_those_of_the_whole_answer(host: Host) -> None:
    sampling = {"max_tokens": 200, "temperature": 0.0, "logprobs": 2, "ignore_eos": True}
    whole = await answer_to(host, [7, 8, 9], **sampling)
    body = {"token_ids": [7, 8, 9], "sampling_params": sampling, "stream": True}
    parts = []
    async with host.http.stream("POST", GENERATE, json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                parts += json.loads(line.removeprefix("data: "))["choices"]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    # Tokens that come within ten milliseconds come together.
    assert len(parts) > 2
    assert parts[-1]["policy_versions"] == whole["policy_versions"] == [[0, 0]]


async def test_a_stop_token_is_the_stop_reason_and_an_end_token_is_not(host: Host) -> None:
    greedy = (await answer_to(host, [7, 8], max_tokens=12, temperature=0.0, ignore_eos=True))["token_ids"]
    stopped = await answer_to(host, [7, 8], max_tokens=50, temperature=0.0, ignore_eos=True, stop_token_ids=greedy[-1:])
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", greedy[-1])
    body = {"token_ids": [7], "sampling_params": {"n": 64, "max_tokens": 200, "stop_token_ids": [harness.END]}}
    choices = (await host.http.post(GENERATE, json=body)).json()["choices"]
    ended = [choice for choice in choices if choice["token_ids"][-1] == harness.END]
    assert ended
    assert all((choice["finish_reason"], choice["stop_reason"]) == ("stop", None) for choice in ended)


async def test_a_request_id_in_flight_is_refused(host: Host) -> None:
    await host.http.post("/pause", params={"mode": "keep"})
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 4}, "request_id": "twin"}
    first = asyncio.create_task(host.http.post(GENERATE, json=body))
    await until(lambda: _waiting(host, 1))
    assert (await host.http.post(GENERATE, json=body)).status_code == 409
    await host.http.post("/resume")
    assert (await first).status_code == 200


async def _waiting(host: Host, count: int) -> bool:
    report = await host.report()
    return bool(report["waiting"] + report["running"] == count)


async def test_an_update_through_vllms_routes_changes_the_weights(host: Host, run_id: str, tmp_path: Path) -> None:
    prompt = harness.prompts(1, seed=61)[0]
    greedy = {"max_tokens": 16, "temperature": 0.0}
    before = (await answer_to(host, prompt, **greedy))["token_ids"]
    assert before == harness.greedy_tokens(tmp_path / "model", prompt, 16)
    old = (await host.http.post("/weight_checker", json={"action": "checksum"})).json()["checksums"]
    fresh = harness.save_sharp_policy(tmp_path / "fresh", seed=12)
    publisher = WeightPublisher(run_id, "shm")
    try:
        manifest = base64.b64encode(await asyncio.to_thread(publisher.publish, 3, fresh)).decode()
        steps: list[tuple[str, dict[str, Any]]] = [
            ("/init_weight_transfer_engine", {"init_info": {"backend": "rollmesh"}}),
            ("/start_weight_update", {}),
            ("/update_weights", {"update_info": {"manifest": manifest}}),
        ]
        for path, body in steps:
            assert (await host.http.post(path, json=body)).status_code == 200
        assert (await answer_to(host, prompt, **greedy))["token_ids"] == before
        assert (await host.http.post("/finish_weight_update", json={"weight_version": "3"})).status_code == 200
    finally:
        publisher.close()
    after = await answer_to(host, prompt, **greedy)
    assert after["token_ids"] == harness.greedy_tokens(fresh, prompt, 16) != before
    assert after["weight_versions"] == [{"version": "3", "start": 0, "end": len(after["token_ids"])}]
    assert (await host.http.get("/weight_info")).json() == {"weight_version": "3"}
    compared = await host.http.post("/weight_checker", json={"action": "compare", "baseline": old})
    assert compared.json() == {"match": False, "mismatches": ["root"]}


async def test_the_renderers_client_samples_as_it_comes(redis_url: str, run_id: str, tmp_path: Path) -> None:
    folder = tmp_path / "chat-model"
    save_chat_policy(folder, seed=3)
    engine = make_engine("torch", folder, run_id, small_batch())
    renderer = create_renderer(AutoTokenizer.from_pretrained(folder))
    messages: Any = [{"role": "user", "content": "What is the weather?"}]
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=folder) as host:
        async with AsyncOpenAI(base_url=f"{host.url}/v1", api_key="none") as client:
            asked = {"client": client, "renderer": renderer, "messages": messages, "model": "chat-model"}
            sampled = await generate(**asked, sampling_params={"max_tokens": 12, "temperature": 1.0}, cache_salt="v0")
            with pytest.raises(OverlongPromptError):
                await generate(**asked, prompt_ids=[5] * (engine.max_model_len + 1))
    assert 1 <= len(sampled["completion_ids"]) <= 12
    assert len(sampled["completion_logprobs"]) == len(sampled["completion_ids"])
    assert all(logprob < 0.0 for logprob in sampled["completion_logprobs"])
    assert sampled["finish_reason"] in ("stop", "length")

"""Sessions over a real model: what was recorded is what a plain forward of the segment gives, to float32's accuracy."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import torch

from rollout_server.engines.factory import make_engine
from services.wire.packed import unpack_logprobs, unpack_tokens
from tests.contract.rollout_server.engine_harness import reference
from tests.support.chat_policy import save_chat_policy
from tests.support.rollout_host import Host, hosting, small_batch

TOLERANCE = 1e-4
SESSIONS = 12
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


async def converse(host: Host, number: int) -> None:
    """Turns with several samples, branches, tools, plain text and tokens; random answers are non-canonical by nature."""
    chance = random.Random(number)
    opened = (await host.http.post("/sessions", json={"metadata": {"number": str(number)}})).json()
    url, headers = opened["base_url"], {"Authorization": f"Bearer {opened['api_key']}"}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "hello there"}]
    for turn in range(4):
        body = {
            "messages": messages,
            "n": chance.choice((1, 2)),
            "max_tokens": chance.randint(1, 24),
            "temperature": chance.choice((1.0, 0.7)),
            "tools": [TOOL] if number % 3 == 0 else None,
        }
        answer = await host.http.post(f"{url}/chat/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        said = chance.choice(answer.json()["choices"])["message"]
        if turn == 2:
            messages = messages[:1]  # back to the beginning: a branch
        messages = [*messages, said, {"role": "user", "content": f"and {turn}?"}] if turn != 2 else messages
    text = await host.http.post(f"{url}/completions", json={"prompt": "The weather", "max_tokens": 8}, headers=headers)
    more = {"prompt": "The weather" + text.json()["choices"][0]["text"] + " is", "max_tokens": 8}
    await host.http.post(f"{url}/completions", json=more, headers=headers)
    tokens = f"/sessions/{opened['session_id']}/inference/v1/generate"
    first = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 6}}
    sampled = (await host.http.post(tokens, json=first)).json()["choices"][0]["token_ids"]
    second = {"token_ids": [5, 6, 7, *sampled, 9], "sampling_params": {"max_tokens": 6}}
    assert (await host.http.post(tokens, json=second)).status_code == 200
    finished = await host.http.post(f"/sessions/{opened['session_id']}/finish", json={"reward": 1.0})
    assert finished.status_code == 200, finished.text


async def test_teacher_forced_logprobs_of_every_segment_are_the_recorded_ones(
    redis_url: str, run_id: str, tmp_path: Path
) -> None:
    save_chat_policy(tmp_path / "chat")
    settings = small_batch(batch=64)
    engine = make_engine("torch", tmp_path / "chat", run_id, settings)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tmp_path / "chat", settings=settings) as host:
        await asyncio.gather(*(converse(host, number) for number in range(SESSIONS)))
        trajectories = await host.published()
    model = reference(tmp_path / "chat")
    compared = branches = extended = 0
    for trajectory in trajectories:
        for segment in trajectory.segments:
            ids = torch.tensor(unpack_tokens(segment.token_ids).tolist())
            with torch.no_grad():
                logits = model(input_ids=ids[None], use_cache=False).logits[0]
            recorded = torch.from_numpy(unpack_logprobs(segment.logprobs).copy())
            for span in segment.version_spans:
                rows = slice(span.start, span.start + span.length)
                temperature = trajectory.samplings[span.sampling].temperature
                expected = (logits[span.start - 1 : rows.stop - 1] / temperature).log_softmax(-1)
                expected = expected.gather(1, ids[rows, None]).squeeze(1)
                assert float((expected - recorded[rows]).abs().max()) <= TOLERANCE
                compared += span.length
            branches += segment.break_reason == "branch"
            extended += len(segment.version_spans) > 1
    assert compared > 1000
    assert branches > SESSIONS
    assert extended >= 2 * SESSIONS

"""A group with a greedy baseline on a real engine: the first sibling takes the likeliest tokens, the others generate."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollout_server.engines.factory import make_engine
from services.wire.packed import unpack_tokens
from tests.support.chat_policy import save_chat_policy
from tests.support.rollout_host import hosting, small_batch


@pytest.mark.parametrize("agents", [False, True])
async def test_the_first_sibling_is_greedy_whatever_its_calls_say(
    agents: bool, redis_url: str, run_id: str, tmp_path: Path
) -> None:
    save_chat_policy(tmp_path / "chat")
    settings = small_batch(batch=16)
    engine = make_engine("torch", tmp_path / "chat", run_id, settings)
    sampled: list[list[tuple[int, ...]]] = []
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tmp_path / "chat", settings=settings) as host:
        for _ in range(2):
            sampling = {"max_tokens": 8, "temperature": 1.0}
            group = await host.open(group_size=3, sampling=sampling, greedy_baseline=True)
            if agents:
                for name, key in zip(group["session_ids"], group["api_keys"], strict=True):
                    said = [{"role": "user", "content": "three words"}]
                    call = {"model": "any", "messages": said, "temperature": 1.5, "max_tokens": 8}
                    headers = {"Authorization": f"Bearer {key}"}
                    answer = await host.http.post(f"/sessions/{name}/v1/chat/completions", json=call, headers=headers)
                    assert answer.status_code == 200, answer.text
            else:
                answer = await host.turns(group, *["three words"] * 3)
                assert answer.status_code == 200, answer.text
            assert (await host.finish(group, 1.0, 0.0, 0.5)).status_code == 200
        for trajectory in await host.published():
            while len(sampled) <= trajectory.member:
                sampled.append([])
            (sampling_used,) = trajectory.samplings
            assert sampling_used.temperature == (0.0 if trajectory.member == 0 else 1.0)
            (segment,) = trajectory.segments
            tokens = unpack_tokens(segment.token_ids)
            sampled[trajectory.member].append(tuple(tokens[segment.version_spans[0].start :].tolist()))
    assert [len(answers) for answers in sampled] == [2, 2, 2]
    assert len(set(sampled[0])) == 1, "the likeliest answer to one prompt is always the same"
    assert len({*sampled[1], *sampled[2]}) > 1

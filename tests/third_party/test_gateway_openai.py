"""The `openai` package and our own clients, unmodified, through a gateway in front of two real rollout servers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from clients.rollout.client import RolloutClient
from rollout_server.engines.factory import make_engine
from services.wire.rollout_api import FinishGroup, OpenGroup, SamplingBody, SessionReward, TakeTurns, Turn
from services.wire.session_api import FinishSession, OpenSession, SessionOpened
from tests.support.chat_policy import save_chat_policy
from tests.support.gateway_host import GatewayHost, gateway
from tests.support.rollout_host import Host, hosting, small_batch

Mesh = tuple[GatewayHost, list[Host]]
WORD = {"role": "user", "content": "hello there"}


@pytest.fixture
async def mesh(redis_url: str, run_id: str, tmp_path: Path) -> AsyncIterator[Mesh]:
    """Two servers with a model of random weights, and the gateway."""
    save_chat_policy(tmp_path / "chat")
    settings = small_batch(batch=64)
    async with AsyncExitStack() as stack:
        hosts = []
        for server_id in ("s0", "s1"):
            engine = make_engine("torch", tmp_path / "chat", run_id, settings)
            server = hosting(
                engine,
                redis_url=redis_url,
                run_id=run_id,
                model=tmp_path / "chat",
                settings=settings,
                server_id=server_id,
            )
            hosts.append(await stack.enter_async_context(server))
        front = await stack.enter_async_context(gateway(redis_url, run_id, failover_timeout_s=10.0))
        await front.until_known(s0="serving", s1="serving")
        yield front, hosts


async def converse(session: SessionOpened, *, stream: bool) -> list[int]:
    """Two turns; returns the tokens that the agent was told."""
    messages: list[Any] = [WORD]
    heard: list[int] = []
    more = {"return_token_ids": True}
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0) as agent:
        for _ in range(2):
            said = ""
            if stream:
                chunks = await agent.chat.completions.create(
                    model="any", messages=messages, max_tokens=12, stream=True, extra_body=more
                )
                async for chunk in chunks:
                    for choice in chunk.choices:
                        said += choice.delta.content or ""
                        heard += (choice.model_extra or {}).get("token_ids") or []
            else:
                whole = await agent.chat.completions.create(
                    model="any", messages=messages, max_tokens=12, extra_body=more
                )
                (choice,) = whole.choices
                said = choice.message.content or ""
                heard += (choice.model_extra or {})["token_ids"]
            messages += [{"role": "assistant", "content": said}, WORD]
    return heard


async def test_sessions_through_the_gateway_are_captured_to_the_token(mesh: Mesh) -> None:
    front, hosts = mesh
    async with RolloutClient(front.url) as client:

        async def play(number: int) -> None:
            session = await client.open_session(OpenSession(env="talk", max_tokens=64, wait_s=20))
            # What the agent is told to call is the gateway, not the server behind it.
            assert session.base_url == f"{front.url}/sessions/{session.session_id}/v1"
            heard = await converse(session, stream=number % 2 == 0)
            captured = (await client.trajectory_tokens(session.session_id)).segments
            sampled = [
                token
                for segment in captured
                for token, mask in zip(segment.token_ids, segment.loss_mask, strict=True)
                if mask
            ]
            assert sorted(sampled) == sorted(heard)
            finished = await client.finish_session(session.session_id, FinishSession(reward=1.0))
            assert (finished.sampled_tokens, finished.reward) == (len(heard), 1.0)

        await asyncio.gather(*(play(number) for number in range(8)))
    assert len(await hosts[0].published()) == 8
    tokens = [(await host.report())["tokens_generated"] for host in hosts]
    assert min(tokens) > 0, "one of the servers got no work"


async def test_groups_of_our_own_client_pass_through_the_gateway(mesh: Mesh) -> None:
    front, hosts = mesh
    async with RolloutClient(front.url) as client:
        assert (await client.run_state()).policy_version == 0
        sampling = SamplingBody(max_tokens=6)
        for _ in range(4):
            group = await client.open_group(OpenGroup(task="demo", group_size=2, sampling=sampling, wait_s=20))
            turns = [Turn(session_id=each, text="hello") for each in group.session_ids]
            taken = await client.take_turns(group.group_id, TakeTurns(turns=turns))
            rewards = [SessionReward(session_id=each.session_id, reward=1.0) for each in taken.results]
            assert len((await client.finish_group(group.group_id, FinishGroup(rewards=rewards))).stream_ids) == 2
    assert len(await hosts[0].published()) == 8


async def test_stateless_generation_passes_through_the_gateway(mesh: Mesh) -> None:
    front, _ = mesh
    body: dict[str, Any] = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 9, "logprobs": 1, "seed": 3}}
    whole = (await front.http.post("/inference/v1/generate", json=body)).json()
    assert len(whole["choices"][0]["token_ids"]) >= 1
    answer = await front.http.post("/inference/v1/generate", json=body | {"stream": True})
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.text.count('"finish_reason":"') == 1

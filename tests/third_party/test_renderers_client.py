"""`renderers.client.generate`, unmodified: messages to tokens at the client's side, vLLM's token route at ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, PermissionDeniedError
from renderers import Qwen3RendererConfig, create_renderer
from renderers.base import load_tokenizer
from renderers.client import OverlongPromptError, generate

from tests.support.rollout_host import Host
from tests.support.telling_engine import TellingEngine, spell
from tests.third_party.sessions import opened

CALL = '<tool_call>\n{"name":  "weather", "arguments": {"city":"Oslo"}}\n</tool_call>'
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def renderer(chat_policy: Path) -> Any:
    return create_renderer(load_tokenizer(str(chat_policy)), Qwen3RendererConfig())


async def two_turns(client: AsyncOpenAI, renderer: Any) -> list[dict[str, Any]]:
    """A question, a tool call, its result bridged to the next prompt, an answer."""
    messages: list[Any] = [{"role": "user", "content": "how is the weather in Oslo"}]
    sampling = {"max_tokens": 100, "temperature": 0.5}
    first = await generate(
        client=client,
        renderer=renderer,
        messages=messages,
        model="chat-policy",
        tools=TOOLS,
        sampling_params=sampling,
        cache_salt="0",
    )
    assert (first["finish_reason"], first["content"]) == ("tool_calls", "let me see")
    result = [{"role": "tool", "tool_call_id": "call_0", "content": "20 degrees"}]
    bridged = renderer.bridge_to_next_turn(first["prompt_ids"], first["completion_ids"], result, tools=TOOLS)
    assert bridged is not None
    second = await generate(
        client=client,
        renderer=renderer,
        messages=[*messages, *result],
        model="chat-policy",
        prompt_ids=bridged.token_ids,
        prompt_attribution=bridged,
        tools=TOOLS,
        sampling_params=sampling,
    )
    assert (second["finish_reason"], second["content"]) == ("stop", "it is fine")
    return [first, second]


def check(read: list[dict[str, Any]], engine: TellingEngine) -> None:
    """What the client read is what the engine sampled."""
    for result, sampled in zip(read, engine.sampled, strict=True):
        assert result["prompt_ids"] == sampled.prompt
        assert result["completion_ids"] == sampled.token_ids
        assert result["completion_logprobs"] == sampled.logprobs


async def test_outside_sessions_every_token_comes_with_its_logprob(
    host: Host, engine: TellingEngine, renderer: Any
) -> None:
    engine.tell(spell(f"let me see\n{CALL}"), spell("it is fine"))
    async with AsyncOpenAI(base_url=f"{host.url}/v1", api_key="anything") as client:
        check(await two_turns(client, renderer), engine)
    assert engine.requests[0].cache_salt == "0"
    assert engine.requests[0].sampling.temperature == 0.5


async def test_in_a_session_two_bridged_turns_are_one_segment(host: Host, engine: TellingEngine, renderer: Any) -> None:
    session = await opened(host)
    engine.tell(spell(f"let me see\n{CALL}"), spell("it is fine"))
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        check(await two_turns(client, renderer), engine)
    trajectory = await session.ends_with(engine.sampled)
    assert [sampling.temperature for sampling in trajectory.samplings] == [0.5]


async def test_the_client_finds_out_how_long_a_prompt_may_be(host: Host, renderer: Any) -> None:
    session = await opened(host)
    for base_url in (session.base_url, f"{host.url}/v1"):
        async with AsyncOpenAI(base_url=base_url, api_key=session.api_key) as client:
            with pytest.raises(OverlongPromptError, match="maximum context length"):
                await generate(
                    client=client,
                    renderer=renderer,
                    messages=[{"role": "user", "content": "x" * 3000}],
                    model="chat-policy",
                )


async def test_the_key_of_a_session_that_was_deleted_opens_nothing(
    host: Host, engine: TellingEngine, renderer: Any
) -> None:
    session = await opened(host)
    assert (await host.http.delete(f"/sessions/{session.session_id}")).status_code == 204
    async with AsyncOpenAI(base_url=f"{host.url}/v1", api_key=session.api_key) as client:
        with pytest.raises(PermissionDeniedError):
            await two_turns(client, renderer)
    assert engine.sampled == []

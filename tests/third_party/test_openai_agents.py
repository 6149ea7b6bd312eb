"""An agent of the `openai-agents` package, unmodified, in a tool loop: one segment, its own words trained, nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI

from services.wire.packed import unpack_mask, unpack_tokens
from tests.support.rollout_host import Host
from tests.support.telling_engine import TellingEngine, chat_tokenizer, spell
from tests.third_party.sessions import Opened, opened

UNTRACED = RunConfig(tracing_disabled=True)
CALL = '<tool_call>\n{"name":  "weather_of", "arguments": {"city":"%s"}}\n</tool_call>'
"""With two spaces and no others, as no JSON encoder writes it: re-rendered it would be other tokens."""


@function_tool
def weather_of(city: str) -> str:
    """The weather of a city."""
    return f"20 degrees in {city}"


def agent_of(session: Opened, **changes: Any) -> Agent[Any]:
    """An agent as its author wrote it, but for base URL and key."""
    client = AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
    model = OpenAIChatCompletionsModel(model="gpt-4o", openai_client=client)
    return Agent(**{"name": "Forecaster", "instructions": "Be brief.", "tools": [weather_of], "model": model} | changes)


async def run(agent: Agent[Any], question: Any, *, streamed: bool) -> Any:
    if not streamed:
        return await Runner.run(agent, question, run_config=UNTRACED)
    result = Runner.run_streamed(agent, question, run_config=UNTRACED)
    async for _ in result.stream_events():
        pass
    return result


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    "first",
    [
        CALL % "Oslo",
        f"let me see\n{CALL % 'Oslo'}",
        f"<think>\nwhere is it\n</think>\n\n{CALL % 'Oslo'}",
        f"<think>\nwhere is it\n</think>\n\nlet me see {CALL % 'Oslo'}\n{CALL % 'Rome'}",
    ],
    ids=["call", "text and call", "thought and call", "all and two calls"],
)
async def test_a_tool_loop_is_one_segment(host: Host, engine: TellingEngine, first: str, streamed: bool) -> None:
    session = await opened(host)
    engine.tell(spell(first), spell("it is fine"))
    result = await run(agent_of(session), "how is the weather in Oslo", streamed=streamed)
    assert result.final_output == "it is fine"
    assert len(engine.sampled) == 2
    trajectory = await session.ends_with(engine.sampled)
    (segment,) = trajectory.segments
    tokens, mask = unpack_tokens(segment.token_ids).tolist(), unpack_mask(segment.loss_mask).tolist()
    given = chat_tokenizer().decode([token for token, sampled in zip(tokens, mask, strict=True) if not sampled])
    assert "Be brief." in given and "how is the weather in Oslo" in given
    assert given.count("20 degrees in") == first.count("city")
    said = [token for token, sampled in zip(tokens, mask, strict=True) if sampled]
    assert said == spell(first) + spell("it is fine")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("thought", ["", "<think>\nwhere is it\n</think>\n\nlet me see\n"], ids=["", "thought"])
async def test_a_conversation_goes_on_after_its_tool_calls(
    host: Host, engine: TellingEngine, thought: str, streamed: bool
) -> None:
    session = await opened(host)
    engine.tell(spell(thought + CALL % "Oslo"), spell("it is fine"), spell(CALL % "Rome"), spell("fine too"))
    agent = agent_of(session, model_settings=ModelSettings(temperature=0.7, parallel_tool_calls=True))
    first = await run(agent, "and Oslo?", streamed=streamed)
    question = [*first.to_input_list(), {"role": "user", "content": "and Rome?"}]
    second = await run(agent, question, streamed=streamed)
    assert second.final_output == "fine too"
    assert len(engine.sampled) == 4
    trajectory = await session.ends_with(engine.sampled)
    assert [sampling.temperature for sampling in trajectory.samplings] == [0.7]


async def test_an_agent_that_hands_over_is_a_conversation_of_its_own(host: Host, engine: TellingEngine) -> None:
    session = await opened(host)
    expert = agent_of(session, name="Expert", instructions="You know it all.", tools=[])
    agent = agent_of(session, handoffs=[expert])
    engine.tell(
        spell('<tool_call>\n{"name": "transfer_to_expert", "arguments": {}}\n</tool_call>'), spell("it will rain")
    )
    result = await run(agent, "and tomorrow?", streamed=False)
    assert (result.final_output, result.last_agent.name) == ("it will rain", "Expert")
    # Another system message and other tools: nothing that was captured goes on.
    await session.ends_with(engine.sampled, [None, "compaction"])

"""The `openai` package, unmodified, in sessions: what it reads is what the engine sampled, and so is what is trained."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam

from tests.support.rollout_host import Host
from tests.support.telling_engine import TellingEngine, chat_tokenizer, spell
from tests.third_party.sessions import Opened, opened

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello there"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name":  "weather", "arguments": {"city":"Oslo"}}\n</tool_call>'
"""With two spaces that no JSON encoder writes: re-rendered it would be other tokens."""


def sdk(session: Opened, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, **options)


async def test_a_conversation_of_the_async_client_is_one_segment_of_the_sampled_tokens(
    host: Host, engine: TellingEngine
) -> None:
    session = await opened(host)
    engine.tell(spell("the weather is fine"), spell("and the answer is 4"))
    async with sdk(session) as client:
        first = await client.chat.completions.create(
            model="gpt-4o", messages=HELLO, logprobs=True, top_logprobs=3, extra_body={"return_token_ids": True}
        )
        said = first.choices[0].message
        assert said.content == "the weather is fine"
        second = await client.chat.completions.create(
            model="gpt-4o", messages=[*HELLO, said, {"role": "user", "content": "and the answer?"}]
        )
    assert second.choices[0].message.content == "and the answer is 4"
    one, two = engine.sampled
    choice = first.choices[0]
    assert (choice.finish_reason, second.choices[0].finish_reason) == ("stop", "stop")
    assert choice.model_extra is not None and first.model_extra is not None
    assert choice.model_extra["token_ids"] == one.token_ids
    assert choice.model_extra["policy_versions"] == [[0, 0]]
    assert first.model_extra["prompt_token_ids"] == one.prompt
    assert choice.logprobs is not None and choice.logprobs.content is not None
    entries = choice.logprobs.content
    assert [entry.logprob for entry in entries] == one.logprobs
    assert {len(entry.top_logprobs) for entry in entries} == {3}
    assert b"".join(bytes(entry.bytes or []) for entry in entries) == b"the weather is fine<|im_end|>"
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (len(one.prompt), len(one.token_ids))
    # Token fields come only when they are asked for.
    assert "token_ids" not in (second.choices[0].model_extra or {})
    assert two.prompt[: len(one.prompt) + len(one.token_ids)] == one.prompt + one.token_ids
    await session.ends_with([one, two])


async def test_the_sync_client_streams_and_asks_for_tools_as_the_async_one(host: Host, engine: TellingEngine) -> None:
    session = await opened(host)
    engine.tell(spell(f"let me see {CALL}"), spell("fine"))
    messages: list[Any] = list(HELLO)

    def talk() -> str:
        with OpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            answer = client.chat.completions.create(model="any", messages=messages, tools=[WEATHER])
            assert answer.choices[0].finish_reason == "tool_calls"
            (call,) = answer.choices[0].message.tool_calls or []
            assert call.type == "function"
            assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')
            # As most agents do it: the message goes back as the SDK's object.
            messages.append(answer.choices[0].message)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "fine, 20 degrees"})
            stream = client.chat.completions.create(model="any", messages=messages, tools=[WEATHER], stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in stream)

    assert await asyncio.to_thread(talk) == "fine"
    assert "20 degrees" in chat_tokenizer().decode(engine.sampled[1].prompt)
    await session.ends_with(engine.sampled)


async def test_streams_add_up_to_the_tokens_that_were_sampled(host: Host, engine: TellingEngine) -> None:
    session = await opened(host)
    engine.tell(spell(f"<think>\nhmm\n</think>\n\nlet me see\n{CALL}"), spell("fine"))
    async with sdk(session) as client:
        stream = await client.chat.completions.create(
            model="any",
            messages=HELLO,
            tools=[WEATHER],
            stream=True,
            logprobs=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
        chunks = [chunk async for chunk in stream]
        ids, logprobs, content, reasoning, calls, finished = [], [], "", "", [], []
        for chunk in chunks:
            for choice in chunk.choices:
                ids += (choice.model_extra or {})["token_ids"]
                logprobs += [entry.logprob for entry in (choice.logprobs and choice.logprobs.content) or []]
                content += choice.delta.content or ""
                reasoning += (choice.delta.model_extra or {}).get("reasoning_content") or ""
                calls += choice.delta.tool_calls or []
                finished += [choice.finish_reason] if choice.finish_reason else []
        (sampled,) = engine.sampled
        assert (ids, logprobs) == (sampled.token_ids, sampled.logprobs)
        assert (content, reasoning, finished) == ("let me see", "hmm", ["tool_calls"])
        (call,) = calls
        assert call.function is not None
        assert (call.index, call.function.name, call.function.arguments) == (0, "weather", '{"city": "Oslo"}')
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(sampled.token_ids)
        # The client puts the message together from the pieces, as agents that stream do, its JSON in its own spelling.
        said: Any = {
            "role": "assistant",
            "content": content,
            "reasoning_content": reasoning,
            "tool_calls": [
                {"id": call.id, "type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}
            ],
        }
        answer: Any = {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"}
        await client.chat.completions.create(model="any", messages=[*HELLO, said, answer], tools=[WEATHER])
    await session.ends_with(engine.sampled)


async def test_the_stream_helper_of_the_sdk_accumulates_the_same_message(host: Host, engine: TellingEngine) -> None:
    session = await opened(host)
    engine.tell(spell(f"let me see {CALL}"), spell("fine"))
    async with sdk(session) as client:
        async with client.chat.completions.stream(model="any", messages=HELLO, tools=[WEATHER]) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_completion()
        said = final.choices[0].message
        assert said.content == "let me see"
        (call,) = said.tool_calls or []
        messages: list[Any] = [*HELLO, said, {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"}]
        await client.chat.completions.create(model="any", messages=messages, tools=[WEATHER])
    await session.ends_with(engine.sampled)


async def test_text_completions_go_on_from_the_sampled_tokens(host: Host, engine: TellingEngine) -> None:
    session = await opened(host)
    engine.tell(spell(" is the answer", ended=False), spell(" to of in"))
    async with sdk(session) as client:
        first = await client.completions.create(
            model="any", prompt="4", max_tokens=64, logprobs=2, extra_body={"return_token_ids": True}
        )
        choice = first.choices[0]
        stream = await client.completions.create(
            model="any", prompt=f"4{choice.text} and", stream=True, stream_options={"include_usage": True}
        )
        text, usage = "", None
        async for chunk in stream:
            text += "".join(each.text for each in chunk.choices)
            usage = chunk.usage or usage
    one, two = engine.sampled
    assert (choice.text, text) == (" is the answer", " to of in")
    assert choice.model_extra is not None and choice.logprobs is not None
    assert choice.model_extra["token_ids"] == one.token_ids
    assert choice.model_extra["prompt_token_ids"] == one.prompt
    assert choice.logprobs.token_logprobs == one.logprobs
    assert choice.logprobs.text_offset == list(range(len(one.token_ids)))
    assert {len(each) for each in choice.logprobs.top_logprobs or []} == {2}
    assert usage is not None and usage.completion_tokens == len(two.token_ids)
    await session.ends_with([one, two])


async def test_n_answers_are_branches_and_each_is_trained_once(host: Host, engine: TellingEngine) -> None:
    session = await opened(host)
    engine.tell(spell("one"), spell("another"), spell("third, and longest"), spell("more"))
    async with sdk(session) as client:
        answer = await client.chat.completions.create(model="any", messages=HELLO, n=3, seed=7, temperature=0.5)
        assert [choice.message.content for choice in answer.choices] == ["one", "another", "third, and longest"]
        said: Any = answer.choices[1].message
        await client.chat.completions.create(
            model="any", messages=[*HELLO, said, {"role": "user", "content": "go on"}], temperature=0.5, seed=7
        )
    (asked, _) = engine.requests
    assert (asked.n, asked.sampling.seed, asked.sampling.temperature) == (3, 7, 0.5)
    assert engine.sampled[3].prompt[: len(engine.sampled[1].prompt)] == engine.sampled[1].prompt
    trajectory = await session.ends_with(engine.sampled, [None, "branch", "branch"])
    assert {sampling.seed for sampling in trajectory.samplings} == {7}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_the_answer_with_the_token_that_completes_it(
    host: Host, engine: TellingEngine, stream: bool
) -> None:
    session = await opened(host)
    engine.tell(spell("the answer is 4\n\nQuestion: and"), spell("fine"))
    engine.stride = 7  # so that a delta holds tokens beyond the stop string
    async with sdk(session) as client:
        if stream:
            chunks = [
                chunk.choices[0]
                async for chunk in await client.chat.completions.create(
                    model="any", messages=HELLO, stop=["Question:"], stream=True
                )
            ]
            content = "".join(chunk.delta.content or "" for chunk in chunks)
            ended: Any = chunks[-1]
        else:
            answer = await client.chat.completions.create(model="any", messages=HELLO, stop=["Question:"])
            content, ended = answer.choices[0].message.content or "", answer.choices[0]
        assert content == "the answer is 4\n\n"
        assert ended.finish_reason == "stop"
        assert ended.model_extra["stop_reason"] == "Question:"
        said: Any = {"role": "assistant", "content": content}
        await client.chat.completions.create(model="any", messages=[*HELLO, said, {"role": "user", "content": "so?"}])
    cut, follows = engine.sampled
    cut.token_ids = cut.token_ids[: len(spell("the answer is 4\n\nQuestion:", ended=False))]
    assert follows.prompt[: len(cut.prompt) + len(cut.token_ids)] == cut.prompt + cut.token_ids
    await session.ends_with([cut, follows])


async def test_url_key_and_header_name_the_session(host: Host, engine: TellingEngine) -> None:
    session = await opened(host)

    async def ask(base_url: str, api_key: str, **headers: str) -> ChatCompletion:
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, default_headers=headers) as client:
            return await client.chat.completions.create(model="any", messages=HELLO)

    root = f"{host.url}/v1"
    await ask(session.base_url, "no key at all")
    await ask(root, session.api_key)
    await ask(root, "no key at all", **{"X-Session-ID": session.session_id})
    # The same body three times, with no mark of a repetition: three samples.
    assert len(engine.sampled) == 3
    await session.ends_with(engine.sampled, [None, "branch", "branch"])


async def test_the_model_list_tells_how_long_a_context_may_be(host: Host) -> None:
    session = await opened(host)
    for base_url in (session.base_url, f"{host.url}/v1"):
        async with AsyncOpenAI(base_url=base_url, api_key=session.api_key) as client:
            (card,) = [model async for model in client.models.list()]
        assert (card.id, (card.model_extra or {})["max_model_len"]) == ("chat-policy", 2048)


@pytest.mark.parametrize("route", ["chat", "text"])
async def test_hanging_up_in_mid_stream_leaves_nothing_of_the_answer(
    host: Host, engine: TellingEngine, route: str
) -> None:
    session = await opened(host)
    engine.tell(spell("this will never be heard to its end"), spell("fine"))
    engine.hold_after = 6
    async with sdk(session) as client:
        stream: Any = (
            await client.chat.completions.create(model="any", messages=HELLO, stream=True)
            if route == "chat"
            else await client.completions.create(model="any", prompt="hello", stream=True, max_tokens=64)
        )
        await anext(aiter(stream))
        await stream.close()
        engine.hold_after = None
        answer = await client.chat.completions.create(model="any", messages=HELLO)
    assert answer.choices[0].message.content == "fine"
    unheard, heard = engine.sampled
    assert unheard.token_ids
    await session.ends_with([heard])


async def test_unknown_fields_of_newer_sdks_change_nothing(host: Host, engine: TellingEngine) -> None:
    session = await opened(host)
    async with sdk(session) as client:
        await client.chat.completions.create(
            model="any",
            messages=HELLO,
            user="somebody",
            store=False,
            metadata={"a": "b"},
            parallel_tool_calls=True,
            service_tier="auto",
            reasoning_effort="low",
            max_completion_tokens=3,
            extra_body={"quantum": {"entangled": True}},
        )
    assert engine.requests[0].sampling.max_tokens == 3
    trajectory = await session.ends_with(engine.sampled)
    assert trajectory.finish_reason == "length"


async def test_calls_that_nothing_marks_at_once_are_samples_of_their_own(host: Host, engine: TellingEngine) -> None:
    session = await opened(host)
    engine.tell(*(spell(f"answer {number}") for number in range(8)))
    async with sdk(session) as client:
        answers = await asyncio.gather(*(client.chat.completions.create(model="any", messages=HELLO) for _ in range(8)))
    assert len({answer.choices[0].message.content for answer in answers}) == 8
    await session.ends_with(engine.sampled, [None] + ["branch"] * 7)


async def test_rewards_name_the_answers_by_the_ids_that_the_sdk_reads(host: Host, engine: TellingEngine) -> None:
    session = await opened(host)
    async with sdk(session) as client:
        answer = await client.chat.completions.create(model="any", messages=HELLO)
    given: httpx.Response = await host.http.post(
        f"/sessions/{session.session_id}/reward",
        json={"reward": 0.5, "call_id": answer.id, "components": {"form": 1.0}},
    )
    assert given.status_code == 200
    trajectory = await session.ends_with(engine.sampled)
    (span,) = trajectory.reward_spans
    (sampled,) = engine.sampled
    assert (span.segment, span.start, span.length) == (0, len(sampled.prompt), len(sampled.token_ids))
    assert (span.reward, trajectory.reward) == (0.5, 1.5)

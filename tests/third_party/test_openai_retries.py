"""What the `openai` package sends again when a connection fails is answered with what was sampled the first time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import APIConnectionError, AsyncOpenAI, OpenAI, UnprocessableEntityError
from openai.types.chat import ChatCompletionMessageParam

from tests.support.flaky_proxy import Failure, FlakyProxy, flaky_proxy
from tests.support.rollout_host import Host, until
from tests.support.telling_engine import TellingEngine, spell
from tests.third_party.sessions import Opened, opened

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello there"}]


@pytest.fixture
async def proxy(host: Host) -> AsyncIterator[FlakyProxy]:
    async with flaky_proxy(host.url) as proxy:
        yield proxy


def behind(proxy: FlakyProxy, session: Opened) -> AsyncOpenAI:
    """A client whose way to the session fails; it tries three times, as it does unless told otherwise."""
    return AsyncOpenAI(base_url=f"{proxy.url}/sessions/{session.session_id}/v1", api_key=session.api_key)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failure", ["lose", "unavailable"])
async def test_an_answer_that_was_lost_on_its_way_is_given_again(
    host: Host, engine: TellingEngine, proxy: FlakyProxy, failure: Failure, stream: bool
) -> None:
    session = await opened(host)
    engine.tell(spell("the first"), spell("the second"), spell("fine"))
    proxy.fail(failure)
    async with behind(proxy, session) as client:
        said: Any = {"role": "assistant", "content": await ask(client, stream)}
        # The retry got the answer that exists, so the conversation goes on from it.
        await client.chat.completions.create(model="any", messages=[*HELLO, said, {"role": "user", "content": "so?"}])
    assert said["content"] == "the first"
    assert len(engine.requests) == 2
    assert proxy.connections >= 2
    await session.ends_with(engine.sampled)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_retry_joins_the_answer_that_is_still_being_sampled(
    host: Host, engine: TellingEngine, proxy: FlakyProxy, stream: bool
) -> None:
    session = await opened(host)
    engine.tell(spell("the first"), spell("the second"))
    engine.hold_after = 3
    proxy.fail("drop")
    async with behind(proxy, session) as client:
        asking = asyncio.create_task(ask(client, stream))
        await until(lambda: proxy.connections == 2)
        engine.hold_after = None
        assert await asking == "the first"
    assert len(engine.requests) == 1
    await session.ends_with(engine.sampled)


async def test_the_sync_client_tries_again_with_the_same_result(
    host: Host, engine: TellingEngine, proxy: FlakyProxy
) -> None:
    session = await opened(host)
    engine.tell(spell("the first"), spell("the second"))
    proxy.fail("lose", "unavailable")

    def talk() -> str:
        with OpenAI(base_url=f"{proxy.url}/sessions/{session.session_id}/v1", api_key=session.api_key) as client:
            answer = client.completions.create(model="any", prompt="hello", max_tokens=64)
            return answer.choices[0].text

    assert await asyncio.to_thread(talk) == "the first"
    assert proxy.connections == 3
    await session.ends_with(engine.sampled)


async def test_two_agents_with_the_same_body_get_each_their_own_answer_again(
    host: Host, engine: TellingEngine, proxy: FlakyProxy
) -> None:
    session = await opened(host)
    engine.tell(spell("the first"), spell("the second"), spell("the third"))
    proxy.fail("lose", "lose")
    async with behind(proxy, session) as one, behind(proxy, session) as other:
        answers = await asyncio.gather(ask(one, False), ask(other, False))
    assert sorted(answers) == ["the first", "the second"]
    await session.ends_with(engine.sampled, [None, "branch"])


async def test_an_idempotency_key_replays_a_stream_that_broke_in_the_middle(
    host: Host, engine: TellingEngine, proxy: FlakyProxy
) -> None:
    session = await opened(host)
    engine.tell(spell("the first of two answers"), spell("the second"))
    engine.hold_after = 5
    marked = {"Idempotency-Key": "step-1"}
    proxy.fail("half")
    async with behind(proxy, session) as client:
        # Once a stream has begun, the SDK does not send the call again by itself: the agent does.
        with pytest.raises(APIConnectionError):
            await ask(client, True, marked)
        assert proxy.connections == 1
        engine.hold_after = None
        assert await ask(client, True, marked) == "the first of two answers"
        assert await ask(client, True, marked) == "the first of two answers"
        with pytest.raises(UnprocessableEntityError) as refused:
            await ask(client, False, marked)
    assert refused.value.code == "idempotency_key_reused"
    assert len(engine.requests) == 1
    await session.ends_with(engine.sampled)


async def test_the_same_body_without_a_mark_is_a_new_sample(host: Host, engine: TellingEngine) -> None:
    session = await opened(host)
    engine.tell(spell("the first"), spell("the second"))
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        assert [await ask(client, False), await ask(client, False)] == ["the first", "the second"]
    await session.ends_with(engine.sampled, [None, "branch"])


async def test_a_client_that_gives_up_leaves_no_answer_behind(
    host: Host, engine: TellingEngine, proxy: FlakyProxy
) -> None:
    session = await opened(host)
    engine.tell(spell("never heard"), spell("heard"))
    engine.hold_after = 3
    proxy.fail("drop")
    async with behind(proxy, session) as client:
        with pytest.raises(APIConnectionError):
            await ask(client.with_options(max_retries=0), False)
        engine.hold_after = None
        assert await ask(client, False) == "heard"
    await session.ends_with(engine.sampled[1:])


async def ask(client: AsyncOpenAI, stream: bool, headers: dict[str, str] | None = None) -> str:
    """One chat completion; its text."""
    if stream:
        text = ""
        async for chunk in await client.chat.completions.create(
            model="any", messages=HELLO, stream=True, extra_headers=headers
        ):
            text += chunk.choices[0].delta.content or ""
        return text
    answer = await client.chat.completions.create(model="any", messages=HELLO, extra_headers=headers)
    return answer.choices[0].message.content or ""

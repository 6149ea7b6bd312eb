"""Every refusal reaches an agent as the `openai` package's own error for it, and the session goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import (
    APIStatusError,
    AsyncOpenAI,
    AuthenticationError,
    BadRequestError,
    ConflictError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    UnprocessableEntityError,
)
from openai.types.chat import ChatCompletionMessageParam

from services.wire.errors import RollmeshError
from tests.support.rollout_host import Host, hosting, small_batch, until
from tests.support.telling_engine import TellingEngine, spell
from tests.third_party.sessions import Opened, opened

HELLO: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello there"}]


def sdk(session: Opened, **options: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, **options)


async def ask(client: AsyncOpenAI, **changes: Any) -> Any:
    return await client.chat.completions.create(**{"model": "any", "messages": HELLO} | changes)


async def test_a_prompt_that_is_too_long_says_so_in_the_words_that_agents_look_for(
    host: Host, engine: TellingEngine
) -> None:
    session = await opened(host)
    long: Any = [{"role": "user", "content": "x" * 5000}]
    async with sdk(session) as client:
        for stream in (False, True):
            with pytest.raises(BadRequestError, match="maximum context length") as refused:
                await ask(client, messages=long, stream=stream)
            assert (refused.value.code, refused.value.type) == ("context_length_exceeded", "invalid_request_error")
        with pytest.raises(BadRequestError, match="maximum context length"):
            await client.completions.create(model="any", prompt="x" * 5000)
        await ask(client)
    await session.ends_with(engine.sampled)


async def test_keys_that_nobody_issued_and_keys_of_others_open_nothing(host: Host) -> None:
    session, other = await opened(host), await opened(host)
    async with sdk(session) as client:
        with pytest.raises(AuthenticationError) as forged:
            await ask(client.with_options(api_key="rs-" + session.session_id + "-" + "0" * 32))
        with pytest.raises(PermissionDeniedError) as others:
            await ask(client.with_options(api_key=other.api_key))
        root = client.with_options(base_url=f"{host.url}/v1")
        with pytest.raises(PermissionDeniedError):
            await ask(root, extra_headers={"X-Session-ID": other.session_id})
        with pytest.raises(AuthenticationError, match="names no session"):
            await ask(root.with_options(api_key="anything"))
        with pytest.raises(PermissionDeniedError):
            await client.post(f"{host.url}/sessions/{session.session_id}/finish", body={"reward": 1.0}, cast_to=object)
    assert (forged.value.code, others.value.code) == ("invalid_api_key", "permission_denied")


async def test_a_session_that_was_concluded_refuses_at_once(host: Host, engine: TellingEngine) -> None:
    finished, aborted = await opened(host), await opened(host)
    async with sdk(finished) as client:
        await ask(client)
        await finished.ends_with(engine.sampled)
        with pytest.raises(ConflictError) as refused:
            await ask(client)
        # The SDK would send a conflict again, twice: it is told that it need not.
        assert refused.value.request.headers["x-stainless-retry-count"] == "0"
    assert refused.value.code == "session_concluded"
    await host.http.post(f"/sessions/{aborted.session_id}/abort")
    async with sdk(aborted) as client:
        with pytest.raises(ConflictError):
            await ask(client, stream=True)


@pytest.mark.parametrize("terms", [{"deadline_s": 0.05}, {"idle_timeout_s": 0.05}])
async def test_a_session_that_has_expired_says_so(host: Host, terms: dict[str, float]) -> None:
    session = await opened(host, **terms)

    async def expired() -> bool:
        return bool((await host.http.get(f"/sessions/{session.session_id}")).json()["state"] == "expired")

    await until(expired)
    async with sdk(session) as client:
        with pytest.raises(APIStatusError) as refused:
            await ask(client)
    assert (refused.value.status_code, refused.value.code) == (410, "session_expired")


async def test_a_call_that_outlives_the_deadline_ends_with_it(host: Host, engine: TellingEngine) -> None:
    session = await opened(host, deadline_s=0.3)
    engine.hold_after = 2
    async with sdk(session, max_retries=0) as client:
        with pytest.raises(InternalServerError) as late:
            await ask(client)
    assert (late.value.status_code, late.value.code) == (504, "deadline")
    assert engine.status().running == 0


async def test_sessions_that_are_not_here_are_not_found(host: Host) -> None:
    session = await opened(host)
    async with AsyncOpenAI(base_url=f"{host.url}/sessions/nobody/v1", api_key="anything") as client:
        with pytest.raises(NotFoundError):
            await ask(client)
    assert (await host.http.delete(f"/sessions/{session.session_id}")).status_code == 204


MISFITS: list[dict[str, Any]] = [
    {"temperature": -1.0},
    {"max_tokens": 0},
    {"n": 0},
    {"top_p": 0.0},
    {"logprobs": True, "top_logprobs": 21},
    {"messages": []},
    {"messages": [{"role": "wizard", "content": "x"}]},
    {"messages": [{"role": "user", "content": {"text": "x"}}]},
    {"tools": [{"type": "function"}]},
    {"stop": [""]},
]
WISHES: list[dict[str, Any]] = [
    {"logit_bias": {"5": 1.0}},
    {"tool_choice": "required"},
    {"response_format": {"type": "json_object"}},
    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
]
"""What would change the generation, or could not be seen by the model."""


@pytest.mark.parametrize("stream", [False, True])
async def test_what_cannot_be_is_named_and_changes_nothing(host: Host, engine: TellingEngine, stream: bool) -> None:
    session = await opened(host)
    async with sdk(session) as client:
        for misfit in MISFITS:
            with pytest.raises(UnprocessableEntityError) as unfit:
                await ask(client, stream=stream, **misfit)
            assert (unfit.value.code, unfit.value.param is not None) == ("schema", True)
        for wish in WISHES:
            with pytest.raises(BadRequestError):
                await ask(client, stream=stream, **wish)
        await ask(client)
    await session.ends_with(engine.sampled)


async def test_a_budget_that_is_spent_is_said(host: Host, engine: TellingEngine) -> None:
    session = await opened(host, max_tokens=4)
    engine.tell(spell("longer than four tokens"))
    async with sdk(session) as client:
        assert (await ask(client)).choices[0].finish_reason == "length"
        with pytest.raises(BadRequestError) as refused:
            await ask(client)
    assert refused.value.code == "token_budget_exhausted"
    await session.ends_with(engine.sampled)


async def test_an_engine_that_fails_is_an_error_of_the_server_and_captures_nothing(
    host: Host, engine: TellingEngine
) -> None:
    session = await opened(host)
    engine.crash = RollmeshError("out of luck", "try again")
    async with sdk(session, max_retries=0) as client:
        for stream in (False, True):
            with pytest.raises(InternalServerError, match="out of luck"):
                await ask(client, stream=stream)
        engine.crash = None
        await ask(client)
    await session.ends_with(engine.sampled[-1:])


async def test_a_full_server_is_a_rate_limit_with_a_time_to_wait(
    engine: TellingEngine, redis_url: str, run_id: str, chat_policy: Path
) -> None:
    settings = small_batch(batch=1)
    async with (
        hosting(engine, redis_url=redis_url, run_id=run_id, model=chat_policy, settings=settings) as host,
        AsyncOpenAI(base_url=host.url, api_key="the environment's", max_retries=0) as control,
    ):
        session = await opened(host)
        with pytest.raises(RateLimitError) as full:
            await control.post("/sessions", body={}, cast_to=object)
        assert float(full.value.response.headers["retry-after"]) >= 1
        assert full.value.code == "capacity"
        # What is open goes on undisturbed.
        async with sdk(session) as client:
            await ask(client)
        await session.ends_with(engine.sampled)

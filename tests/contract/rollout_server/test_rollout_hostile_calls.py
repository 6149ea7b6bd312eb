"""Calls that no client should make, made: each gets a typed refusal, and a session that is open goes on to exact tokens."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.wire.packed import unpack_logprobs, unpack_mask, unpack_tokens
from tests.support.chat_policy import save_chat_policy
from tests.support.rollout_host import Host, hosting, small_batch, until
from tests.support.telling_engine import TellingEngine, spell

JSON = {"content-type": "application/json"}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
SURROGATE = "\\ud800"
"""As JSON text: half of a character, which no UTF-8 can carry."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "chat-policy"
    save_chat_policy(folder)
    return folder


@pytest.fixture
def engine() -> TellingEngine:
    return TellingEngine([spell("fine"), spell("and well")])


@pytest.fixture
async def host(engine: TellingEngine, redis_url: str, run_id: str, model: Path) -> AsyncIterator[Host]:
    settings = small_batch()
    settings.rollout.max_body_mib = 1
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=model, settings=settings) as host:
        yield host


class Talk:
    """A session with one answer, and whether it can go on to its end."""

    def __init__(self, host: Host, engine: TellingEngine, session_id: str) -> None:
        self.host, self.engine, self.session_id = host, engine, session_id

    async def goes_on(self) -> None:
        """One more answer, and a trajectory of exactly the two that were sampled."""
        messages = [*CHAT["messages"], {"role": "assistant", "content": "fine"}, {"role": "user", "content": "and?"}]
        answer = await self.post("v1/chat/completions", json={"messages": messages})
        assert answer.status_code == 200, answer.text
        finished = await self.post("finish", json={"reward": 1.0})
        assert finished.status_code == 200, finished.text
        (trajectory,) = await self.host.published()
        (segment,) = trajectory.segments
        one, two = self.engine.sampled
        assert unpack_tokens(segment.token_ids).tolist() == two.prompt + two.token_ids
        assert two.prompt[: len(one.prompt) + len(one.token_ids)] == one.prompt + one.token_ids
        mask = unpack_mask(segment.loss_mask).tolist()
        logprobs = unpack_logprobs(segment.logprobs).tolist()
        sampled = [value for value, trained in zip(logprobs, mask, strict=True) if trained]
        assert sampled == one.logprobs + two.logprobs
        assert trajectory.reward == 1.0

    async def post(self, route: str, **body: Any) -> httpx.Response:
        return await self.host.http.post(f"/sessions/{self.session_id}/{route}", **body)


@pytest.fixture
async def talk(host: Host, engine: TellingEngine) -> Talk:
    opened = (await host.http.post("/sessions", json={})).json()
    talk = Talk(host, engine, opened["session_id"])
    assert (await talk.post("v1/chat/completions", json=CHAT)).status_code == 200
    return talk


def refused(answer: httpx.Response, *statuses: int) -> str:
    """The code of a typed refusal with one of `statuses`."""
    assert answer.status_code in statuses, f"{answer.status_code}: {answer.text[:500]}"
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"] and error["code"]
    code: str = error["code"]
    return code


BODIES: dict[str, dict[str, Any]] = {
    "v1/chat/completions": CHAT,
    "v1/completions": {"prompt": "hello"},
    "inference/v1/generate": {"token_ids": [1, 2], "sampling_params": {}},
    "reward": {"reward": 1.0},
    "finish": {"reward": 1.0},
}


async def test_bodies_over_the_limit_are_refused(talk: Talk) -> None:
    async def drip(body: bytes) -> AsyncIterator[bytes]:
        for start in range(0, len(body), 1 << 16):
            yield body[start : start + (1 << 16)]

    for route in BODIES:
        body = json.dumps(BODIES[route] | {"metadata": "x" * (1 << 20)}).encode()
        assert refused(await talk.post(route, content=body, headers=JSON), 413) == "request_too_large"
        # Without a declared length it is found out on the way.
        assert refused(await talk.post(route, content=drip(body), headers=JSON), 413) == "request_too_large"
    await talk.goes_on()


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b'{"messages": [', b"\xff\xfe{}", b"[" * 100_000, b'{"a":' * 50_000, b"null", b"[]", b'"x"', b"1e999"],
    ids=["empty", "cut", "cut deeper", "no UTF-8", "deep lists", "deep objects", "null", "list", "text", "huge number"],
)
async def test_bodies_that_are_not_the_json_object_asked_for_are_refused(talk: Talk, content: bytes) -> None:
    for route in BODIES:
        assert refused(await talk.post(route, content=content, headers=JSON), 422) == "schema"
    await talk.goes_on()


async def test_other_content_types_are_refused(talk: Talk) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        for route, body in BODIES.items():
            answer = await talk.post(route, content=json.dumps(body), headers={"content-type": kind})
            assert refused(answer, 422) == "schema"
    await talk.goes_on()


@pytest.mark.parametrize("ids", [[-1], [400], [1 << 31], [1 << 63], [1 << 70], [1.5], [None], [], [[1], []]])
async def test_token_ids_that_are_none_are_refused(talk: Talk, ids: list[Any]) -> None:
    sampling = {"max_tokens": 4}
    refused(await talk.post("inference/v1/generate", json={"token_ids": ids, "sampling_params": sampling}), 422)
    refused(await talk.post("v1/completions", json={"prompt": ids}), 422)
    root = await talk.host.http.post("/inference/v1/generate", json={"token_ids": ids, "sampling_params": sampling})
    refused(root, 422)
    group = await talk.host.open(group_size=1)
    turn = {"session_id": group["session_ids"][0], "token_ids": ids}
    refused(await talk.host.http.post(f"/groups/{group['group_id']}/turns", json={"turns": [turn]}), 422)
    assert len(talk.engine.sampled) == 1
    await talk.goes_on()


async def test_one_prompt_that_cannot_be_refuses_the_whole_call(talk: Talk) -> None:
    prompts: list[Any] = [[[1, 2], [400]], [[1, 2], []], ["x", ""], ["x", "y" * 5000]]
    for prompt in prompts:
        refused(await talk.post("v1/completions", json={"prompt": prompt}), 400, 422)
        # A stream may have begun with what the other prompt sampled: then it ends with the error, and counts for nothing.
        streamed = await talk.post("v1/completions", json={"prompt": prompt, "stream": True})
        assert '"error"' in streamed.text and "[DONE]" not in streamed.text
    del talk.engine.sampled[1:]
    await talk.goes_on()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999"])
async def test_rewards_that_are_no_finite_numbers_are_refused(talk: Talk, number: str) -> None:
    for body in ('{"reward": %s}', '{"reward": 1.0, "components": {"a": %s}}'):
        for route in ("reward", "finish"):
            assert refused(await talk.post(route, content=body % number, headers=JSON), 422) == "schema"
    group = await talk.host.open(group_size=1)
    reward = f'{{"rewards": [{{"session_id": "{group["session_ids"][0]}", "reward": {number}}}]}}'
    path = f"/groups/{group['group_id']}/finish"
    assert refused(await talk.host.http.post(path, content=reward, headers=JSON), 422) == "schema"
    await talk.goes_on()


TEXTS = {
    "v1/chat/completions": [
        '{"messages": [{"role": "user", "content": "%s"}]}',
        '{"messages": [{"role": "user", "content": [{"type": "text", "text": "%s"}]}]}',
        '{"messages": [{"role": "user", "content": "x", "name": "%s"}]}',
        '{"messages": [{"role": "assistant", "content": "x", "reasoning_content": "%s"}, {"role": "user", "content": ""}]}',
        '{"messages": [{"role": "user", "content": "x"}], "stop": "%s"}',
        '{"messages": [{"role": "user", "content": "x"}], "model": "%s"}',
        '{"messages": [{"role": "user", "content": "x"}], '
        '"tools": [{"type": "function", "function": {"name": "f", "description": "%s"}}]}',
        '{"messages": [{"role": "user", "content": "x"}], '
        '"tools": [{"type": "function", "function": {"name": "f", "parameters": {"%s": 1}}}]}',
        '{"messages": [{"role": "tool", "tool_call_id": "%s", "content": "x"}]}',
        '{"messages": [{"role": "assistant", "tool_calls": [{"id": "%s", "function": {"name": "f", "arguments": ""}}]}]}',
        '{"messages": [{"role": "user", "content": "x"}], "unknown": "%s"}',
    ],
    "v1/completions": ['{"prompt": "%s"}', '{"prompt": ["x", "%s"]}', '{"prompt": "x", "stop": ["%s"]}'],
    "inference/v1/generate": [
        '{"token_ids": [1], "sampling_params": {}, "request_id": "%s"}',
        '{"token_ids": [1], "sampling_params": {}, "cache_salt": "%s"}',
    ],
    "reward": ['{"reward": 1, "components": {"%s": 1}}', '{"reward": 1, "call_id": "%s"}'],
    "finish": ['{"reward": 1, "components": {"%s": 1}}'],
}


@pytest.mark.parametrize("route", list(TEXTS))
async def test_half_characters_are_refused_in_every_text(talk: Talk, route: str) -> None:
    for body in TEXTS[route]:
        refused(await talk.post(route, content=body % SURROGATE, headers=JSON), 400, 422)
    await talk.goes_on()


async def test_half_characters_are_refused_when_a_session_is_opened(talk: Talk) -> None:
    for name in ("session_id", "group_id", "task_id", "env", "metadata"):
        value = f'{{"{SURROGATE}": "x"}}' if name == "metadata" else f'"{SURROGATE}"'
        refused(await talk.host.http.post("/sessions", content=f'{{"{name}": {value}}}', headers=JSON), 422)
    await talk.goes_on()


WRONG_TERMS: list[tuple[str, dict[str, Any]]] = [
    ("/sessions", {"max_tokens": -1}),
    ("/sessions", {"deadline_s": -0.5}),
    ("/sessions", {"idle_timeout_s": 0}),
    ("/sessions", {"group_size": 0}),
    ("/sessions", {"wait_s": -1}),
    ("/sessions", {"sampling_params": {"max_tokens": -3}}),
    ("/sessions", {"session_id": "../../etc"}),
    ("/sessions", {"metadata": {"a": 1}}),
    ("/groups", {"task": "t", "group_size": -2, "sampling": {"max_tokens": 4}}),
]


async def test_limits_below_zero_are_refused(talk: Talk) -> None:
    for route, wrong in WRONG_TERMS:
        assert refused(await talk.host.http.post(route, json=wrong), 422) == "schema"
    for path in ("/trajectories?limit=-1", "/trajectories?limit=0", "/trajectories?wait_s=-1", "/trajectories?after=x"):
        assert refused(await talk.host.http.get(path), 422) == "schema"
    await talk.goes_on()


async def test_negative_sampling_is_refused(talk: Talk) -> None:
    for limit in ({"max_tokens": -1}, {"n": -1}, {"top_k": -2}, {"logprobs": -1}, {"min_tokens": -1}):
        chat = {"top_logprobs": -1, "logprobs": True} if "logprobs" in limit else limit
        assert refused(await talk.post("v1/chat/completions", json=CHAT | chat), 422) == "schema"
        assert refused(await talk.post("v1/completions", json={"prompt": "x"} | limit), 422) == "schema"
        tokens = {"token_ids": [1], "sampling_params": limit}
        assert refused(await talk.post("inference/v1/generate", json=tokens), 422) == "schema"
    await talk.goes_on()


@pytest.mark.parametrize("route", ["v1/chat/completions", "v1/completions", "inference/v1/generate"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_leaves_the_session_as_it_was(talk: Talk, route: str, stream: bool) -> None:
    engine = talk.engine
    engine.hold_after = 2
    path = f"/sessions/{talk.session_id}/{route}"
    async with httpx.AsyncClient(base_url=talk.host.url) as hasty:
        calling = asyncio.create_task(hasty.post(path, json=BODIES[route] | {"stream": stream, "max_tokens": 64}))
        await until(lambda: len(engine.sampled) == 2 and len(engine.sampled[1].token_ids) == 2)
        calling.cancel()
        await asyncio.wait([calling])
    engine.hold_after = None
    engine.tell(spell("and well"))
    del engine.sampled[1:]
    await talk.goes_on()


async def test_unknown_paths_and_methods_are_typed_refusals_too(talk: Talk) -> None:
    assert refused(await talk.host.http.get("/nothing/here"), 404) == "not_found"
    assert refused(await talk.host.http.put("/sessions"), 405) == "method_not_allowed"
    for junk in (b"", b"\x00" * 64, b"\x81\xa1a\x01", bytes(range(256))):
        refused(await talk.host.http.post("/weights/stage", content=junk), 400)
    await talk.goes_on()

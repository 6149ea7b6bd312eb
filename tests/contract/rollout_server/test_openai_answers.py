"""What the OpenAI API answers and refuses, field by field: first chunks, logprobs, fields and tools that are not served."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout_server.engines.base import FinishReason, GenerationDelta, GenerationRequest
from tests.support.chat_policy import CHAT_TEMPLATE, build_chat_tokenizer
from tests.support.rollout_host import Host, hosting, small_batch
from tests.support.telling_engine import Sampled, TellingEngine, chat_tokenizer, spell

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
TEXT: dict[str, Any] = {"prompt": "hello"}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
BLIND_TEMPLATE = CHAT_TEMPLATE.replace("tools", "no_tools_at_all")
"""As SmolLM2's: it knows no tools, and says nothing."""


class UnlikelyEngine(TellingEngine):
    """The sampled token is never among the likeliest."""

    def _delta(
        self, request: GenerationRequest, index: int, sample: Sampled, sent: int, reason: FinishReason | None
    ) -> GenerationDelta:
        delta = super()._delta(request, index, sample, sent, reason)
        if delta.top_logprobs is None:
            return delta
        likeliest = [[(20, -0.5), (21, -1.5)][: request.top_logprobs] for _ in delta.token_ids]
        return replace(delta, top_logprobs=likeliest)


def with_template(model: Path, folder: Path, template: str) -> Path:
    """The same model with another chat template."""
    shutil.copytree(model, folder)
    tokenizer = build_chat_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def engine() -> TellingEngine:
    return UnlikelyEngine([spell("fine"), spell("and well")])


@pytest.fixture
async def host(engine: TellingEngine, redis_url: str, run_id: str, chat_policy: Path) -> AsyncIterator[Host]:
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=chat_policy, settings=small_batch()) as host:
        yield host


async def path_of(host: Host) -> str:
    opened = (await host.http.post("/sessions", json={})).json()
    return f"/sessions/{opened['session_id']}/v1"


def events(raw: bytes) -> list[dict[str, Any]]:
    lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n\n") if line]
    assert lines.pop() == b"[DONE]"
    return [json.loads(line) for line in lines]


async def test_a_chat_stream_says_its_prompt_in_the_first_chunk_of_each_choice_and_never_again(
    host: Host, engine: TellingEngine
) -> None:
    body = HELLO | {"stream": True, "n": 2, "return_token_ids": True, "stream_options": {"include_usage": True}}
    answer = await host.http.post(f"{await path_of(host)}/chat/completions", json=body)
    told: dict[int, list[Any]] = {0: [], 1: []}
    for event in events(answer.content):
        for choice in event["choices"]:
            told[choice["index"]].append(event.get("prompt_token_ids"))
    prompt = engine.sampled[0].prompt
    assert {len(each) > 2 for each in told.values()} == {True}
    assert [each[0] for each in told.values()] == [prompt, prompt]
    assert [value for each in told.values() for value in each[1:] if value is not None] == []


async def test_a_text_stream_says_each_prompt_in_the_first_chunk_of_its_choices(
    host: Host, engine: TellingEngine
) -> None:
    body = {"prompt": ["one", "two"], "stream": True, "n": 2, "return_token_ids": True}
    answer = await host.http.post(f"{await path_of(host)}/completions", json=body)
    told: dict[int, list[Any]] = {}
    for event in events(answer.content):
        for choice in event["choices"]:
            told.setdefault(choice["index"], []).append(choice.get("prompt_token_ids"))
    one, two = (chat_tokenizer().encode(text, add_special_tokens=False) for text in ("one", "two"))
    assert [told[index][0] for index in range(4)] == [one, one, two, two]
    assert [value for each in told.values() for value in each[1:] if value is not None] == []


async def test_without_being_asked_a_stream_says_no_tokens(host: Host) -> None:
    base = await path_of(host)
    for route, body in (("chat/completions", HELLO), ("completions", TEXT)):
        answer = await host.http.post(f"{base}/{route}", json=body | {"stream": True})
        assert b"token_ids" not in answer.content


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("asked", "others"), [(0, []), (1, [-0.5]), (2, [-0.5, -1.5])])
async def test_the_sampled_token_is_in_the_logprobs_of_a_text_completion_whether_it_is_likely_or_not(
    host: Host, engine: TellingEngine, stream: bool, asked: int, others: list[float]
) -> None:
    body = TEXT | {"logprobs": asked, "stream": stream, "return_tokens_as_token_ids": True}
    answer = await host.http.post(f"{await path_of(host)}/completions", json=body)
    choices = [answer.json()["choices"][0]] if not stream else [e["choices"][0] for e in events(answer.content)]
    tokens, top = [], []
    for choice in choices:
        if choice["logprobs"] is not None:
            tokens += choice["logprobs"]["tokens"]
            top += choice["logprobs"]["top_logprobs"]
    (sampled,) = engine.sampled
    assert tokens == [f"token_id:{token}" for token in sampled.token_ids]
    assert [each[token] for each, token in zip(top, tokens, strict=True)] == sampled.logprobs
    assert all(list(each.values())[1:] == others for each in top)


async def test_chat_logprobs_are_the_likeliest_ones_and_the_sampled_token_has_its_own(
    host: Host, engine: TellingEngine
) -> None:
    base = await path_of(host)
    for top, expected in ((None, []), (0, []), (2, [-0.5, -1.5])):
        body = HELLO | {"logprobs": True} | ({} if top is None else {"top_logprobs": top})
        answer = await host.http.post(f"{base}/chat/completions", json=body)
        entries = answer.json()["choices"][0]["logprobs"]["content"]
        assert [entry["logprob"] for entry in entries] == engine.sampled[-1].logprobs
        assert all([other["logprob"] for other in entry["top_logprobs"]] == expected for entry in entries)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
async def test_reasoning_that_a_client_sends_is_rendered_by_either_name(
    host: Host, engine: TellingEngine, name: str
) -> None:
    said = {"role": "assistant", "content": "4", name: "two and two"}
    body = {"messages": [*HELLO["messages"], said, {"role": "user", "content": "sure?"}]}
    assert (await host.http.post(f"{await path_of(host)}/chat/completions", json=body)).status_code == 200
    assert "two and two" in chat_tokenizer().decode(engine.sampled[0].prompt)


@pytest.mark.parametrize("stream", [False, True])
async def test_fields_that_are_not_served_are_refused_by_name_and_nothing_is_sampled(
    host: Host, engine: TellingEngine, stream: bool
) -> None:
    base = await path_of(host)
    for field in ({"guided_json": {}}, {"prompt_logprobs": 0}, {"use_beam_search": True}, {"structured_outputs": {}}):
        for route, body in (("chat/completions", HELLO), ("completions", TEXT)):
            refused = await host.http.post(f"{base}/{route}", json=body | field | {"stream": stream})
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (400, "unsupported_parameter")
            assert next(iter(field)) in error["message"]
    assert engine.sampled == []
    neutral = {"use_beam_search": False, "bad_words": [], "add_generation_prompt": True, "structured_outputs": None}
    assert (await host.http.post(f"{base}/chat/completions", json=HELLO | neutral)).status_code == 200


async def test_a_reasoning_effort_is_refused_where_the_template_heeds_it(
    engine: TellingEngine, redis_url: str, run_id: str, chat_policy: Path, tmp_path: Path
) -> None:
    heeding = '{{ "effort: " + (reasoning_effort or "medium") }}' + CHAT_TEMPLATE
    model = with_template(chat_policy, tmp_path / "model", heeding)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=model, settings=small_batch()) as host:
        path = f"{await path_of(host)}/chat/completions"
        refused = await host.http.post(path, json=HELLO | {"reasoning_effort": "high"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_parameter")
        assert "reasoning_effort" in refused.json()["error"]["message"]
        for effort in (None, "medium"):  # the template says the same without it
            assert (await host.http.post(path, json=HELLO | {"reasoning_effort": effort})).status_code == 200


@pytest.fixture
def blind_model(chat_policy: Path, tmp_path: Path) -> Path:
    return with_template(chat_policy, tmp_path / "blind", BLIND_TEMPLATE)


async def test_tools_that_the_template_does_not_render_are_refused(
    engine: TellingEngine, redis_url: str, run_id: str, blind_model: Path
) -> None:
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=blind_model, settings=small_batch()) as host:
        path = f"{await path_of(host)}/chat/completions"
        for messages in (HELLO["messages"], [{"role": "system", "content": "x"}, *HELLO["messages"]]):
            refused = await host.http.post(path, json={"messages": messages, "tools": TOOLS})
            assert (refused.status_code, refused.json()["error"]["code"]) == (400, "template")
            assert "tools" in refused.json()["error"]["message"]
        assert engine.sampled == []
        for allowed in ({}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}):
            assert (await host.http.post(path, json=HELLO | allowed)).status_code == 200


async def test_by_setting_tools_that_are_not_rendered_are_dropped_and_calls_read_all_the_same(
    engine: TellingEngine, redis_url: str, run_id: str, blind_model: Path
) -> None:
    settings = small_batch()
    settings.rollout.unrendered_tools = "warn"
    engine.tell(spell('<tool_call>{"name": "weather", "arguments": {"city": "Oslo"}}</tool_call>'))
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=blind_model, settings=settings) as host:
        answer = await host.http.post(f"{await path_of(host)}/chat/completions", json=HELLO | {"tools": TOOLS})
    (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Oslo"}'}
    assert "weather" not in chat_tokenizer().decode(engine.sampled[0].prompt)

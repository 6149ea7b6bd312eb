"""Prompts that cannot fit are refused before anything is tokenised; others wait for nothing; what fits is answered."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI

from rollout_server.api.prompt_size import LARGE_BODY
from rollout_server.chat.tokenizer import Encoder
from tests.support.chat_policy import build_chat_tokenizer
from tests.support.rollout_host import Host, hosting, small_batch
from tests.support.scripted_engine import ScriptedEngine

LONGEST = 16_384
MEGABYTES = 9
PLAIN = "the weather in the city is fine\n" * (MEGABYTES * 1_000_000 // 32)
JSON = {"content-type": "application/json"}
ALIVE_WITHIN_S = 2.0
"""A loop that stands still for half a minute does not answer in it, one on a busy machine does."""


@pytest.fixture
async def host(redis_url: str, run_id: str, chat_policy: Path) -> AsyncIterator[Host]:
    engine = ScriptedEngine(max_model_len=LONGEST)
    async with hosting(
        engine, redis_url=redis_url, run_id=run_id, model=chat_policy, settings=small_batch(batch=16)
    ) as host:
        yield host


@asynccontextmanager
async def answering() -> AsyncIterator[None]:
    """The event loop, which is the server's too, answers all the time, as a thread beside it sees it."""
    loop, done, late = asyncio.get_running_loop(), threading.Event(), []

    async def answer() -> None:
        """As `/livez` does."""

    def watch() -> None:
        while not done.is_set():
            try:
                asyncio.run_coroutine_threadsafe(answer(), loop).result(ALIVE_WITHIN_S)
            except TimeoutError:
                late.append(ALIVE_WITHIN_S)
            done.wait(0.01)

    watching = threading.Thread(target=watch)
    watching.start()
    try:
        yield
    finally:
        done.set()
        await asyncio.to_thread(watching.join)
    assert not late, "the event loop stood still"


@pytest.fixture
def tokenised(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the long texts that were tokenised."""
    lengths: list[int] = []
    encode = Encoder.encode

    def noted(self: Encoder, text: str) -> list[int]:
        ids = encode(self, text)
        if len(text) > LARGE_BODY // 4:
            lengths.append(len(text))
        return ids

    monkeypatch.setattr(Encoder, "encode", noted)
    return lengths


def chat(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "a text": ("v1/completions", {"prompt": PLAIN}),
    "no spaces": ("v1/completions", {"prompt": "x" * len(PLAIN)}),
    "escapes": ("v1/completions", {"prompt": '"\\é天🙂' * (len(PLAIN) // 24)}),
    "one of two texts": ("v1/completions", {"prompt": ["fine", PLAIN]}),
    "token ids": ("v1/completions", {"prompt": [5] * 1_000_000}),
    "one of two lists of ids": ("v1/completions", {"prompt": [[5], [5] * 1_000_000]}),
    "a message": ("v1/chat/completions", chat("hello", PLAIN)),
    "parts of a message": (
        "v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": PLAIN}]}]},
    ),
    "messages": ("v1/chat/completions", chat(*["x"] * 100_000)),
    "fewer messages": ("v1/chat/completions", chat(*["x"] * (LONGEST - 1))),
    "ids of vLLM's route": ("inference/v1/generate", {"token_ids": [5] * 1_000_000, "sampling_params": {}}),
}


@pytest.mark.parametrize("kind", LONG)
async def test_what_cannot_fit_is_refused_and_nobody_waits(host: Host, tokenised: list[int], kind: str) -> None:
    route, body = LONG[kind]
    opened = (await host.http.post("/sessions", json={})).json()
    packed = json.dumps(body, ensure_ascii=kind == "escapes").encode()
    path = f"/sessions/{opened['session_id']}/{route}"
    async with answering():
        refused = await host.http.post(path, content=packed, headers=JSON, timeout=60.0)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (400, "context_length_exceeded"), error
    assert f"maximum context length is {LONGEST} tokens" in error["message"]
    assert not tokenised or kind == "fewer messages"
    # The session goes on as if nothing had been.
    again = await host.http.post(f"/sessions/{opened['session_id']}/v1/chat/completions", json=chat("hello"))
    assert again.status_code == 200, again.text


async def test_what_cannot_fit_is_refused_in_turns_of_a_group(host: Host, tokenised: list[int]) -> None:
    group = await host.open(group_size=2)
    refused = await host.turns(group, "hello", PLAIN)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert not tokenised
    assert (await host.turns(group, "hello", "hello")).status_code == 200


@pytest.mark.parametrize("route", ["v1/completions", "v1/chat/completions"])
async def test_what_just_fits_is_answered_token_for_token(host: Host, route: str) -> None:
    tokenizer = build_chat_tokenizer()
    # Spaces, many of which a token could stand for: only tokenising tells.
    text = "fine" + " weather" * (LONGEST - 300)
    wanted = tokenizer.encode(text, add_special_tokens=False)
    opened = (await host.http.post("/sessions", json={})).json()
    body = {"prompt": text} if route == "v1/completions" else chat(text)
    answer = await host.http.post(
        f"/sessions/{opened['session_id']}/{route}",
        json=body | {"return_token_ids": True, "max_tokens": 4},
        timeout=60.0,
    )
    assert answer.status_code == 200, answer.text
    said = answer.json()
    prompt = said["choices"][0]["prompt_token_ids"] if route == "v1/completions" else said["prompt_token_ids"]
    assert any(prompt[start : start + len(wanted)] == wanted for start in range(len(prompt) - len(wanted) + 1))


async def test_a_text_that_goes_on_from_what_was_sampled_counts_by_its_tokens(host: Host) -> None:
    """Half a prompt, answered and sent back whole, is as long as its tokens: the bound must not say more."""
    opened = (await host.http.post("/sessions", json={})).json()
    path = f"/sessions/{opened['session_id']}/v1/completions"
    prompt = "the weather\n" * 3000
    for _ in range(3):
        answer = await host.http.post(path, json={"prompt": prompt, "max_tokens": 4}, timeout=60.0)
        assert answer.status_code == 200, answer.text
        prompt += answer.json()["choices"][0]["text"] + " and more\n"
    segments = (await host.http.get(f"/sessions/{opened['session_id']}/trajectory")).json()["segments"]
    assert len(segments) == 1


async def test_the_document_of_the_routes_is_made_once_and_beside_other_calls(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []
    make = FastAPI.openapi

    def noted(self: FastAPI) -> dict[str, Any]:
        threads.append(threading.current_thread())
        return make(self)

    monkeypatch.setattr(FastAPI, "openapi", noted)
    first, *others = await asyncio.gather(*(host.http.get("/openapi.json", timeout=60.0) for _ in range(3)))
    assert "/v1/chat/completions" in first.json()["paths"]
    assert all(other.content == first.content for other in others)
    assert len(threads) == 1 and threads[0] is not threading.current_thread()

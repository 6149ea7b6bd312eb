"""Agents that hold conversations through the OpenAI SDK and note every token that they were answered."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import AsyncOpenAI

TURNS = 4


@dataclass
class Talk:
    """One session. `tokens`: of each answer; `texts`: what they say."""

    number: int
    session_id: str = ""
    tokens: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    stream_id: str = ""

    @property
    def streamed(self) -> bool:
        return self.number % 2 == 1

    @property
    def greedy(self) -> bool:
        return self.number % 4 < 2


async def hold(talk: Talk, url: str, http: httpx.AsyncClient, *, max_tokens: int, turns: int = TURNS) -> None:
    """Open a session, speak, finish. No retries of the agent's own: any error is raised."""
    opened = await http.post(f"{url}/sessions", json={"wait_s": 30.0, "metadata": {"number": str(talk.number)}})
    assert opened.status_code in (200, 201), opened.text
    session = opened.json()
    talk.session_id = session["session_id"]
    assert session["base_url"].startswith(url), session["base_url"]
    client = AsyncOpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0, timeout=60.0)
    async with client:
        messages: list[Any] = [{"role": "user", "content": f"question {talk.number}?"}]
        for turn in range(turns):
            text, tokens = await _answer(client, talk, messages, max_tokens)
            talk.tokens.append(tokens)
            talk.texts.append(text)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"and {turn}?"}]
    finished = await http.post(f"{url}/sessions/{talk.session_id}/finish", json={"reward": 1.0})
    assert finished.status_code == 200, finished.text
    talk.stream_id = finished.json()["stream_id"]


async def _answer(client: AsyncOpenAI, talk: Talk, messages: list[Any], max_tokens: int) -> tuple[str, list[int]]:
    asked: dict[str, Any] = {
        "model": "policy",
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0.0 if talk.greedy else 1.0,
        "extra_body": {"return_token_ids": True, "ignore_eos": True},
    }
    if not talk.streamed:
        answer = await client.chat.completions.create(**asked)
        choice = answer.choices[0]
        assert choice.finish_reason != "abort"
        return choice.message.content or "", list(choice.token_ids)  # type: ignore[attr-defined]
    text, tokens, reason = "", [], None
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            tokens += getattr(choice, "token_ids", None) or []
            reason = choice.finish_reason or reason
    assert reason in ("stop", "length", "tool_calls"), reason
    return text, tokens

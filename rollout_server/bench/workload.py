"""The requests that every arm of the benchmark answers, as messages and as the tokens that they become.

One file holds them, so that the engine's process and whoever speaks to a server read the same.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec

from rollout_server.chat.chat_renderer import ChatRenderer
from services.wire.kv_policy import KvPolicy
from services.wire.sampling import SamplingParams

_WORDS = (
    "count",
    "add",
    "sum",
    "the",
    "step",
    "what",
    "left",
    "right",
    "then",
    "again",
    "number",
    "seven",
    "twelve",
    "carry",
)
_SYSTEM = "You are a careful assistant."

TIMED_KV_POLICY: KvPolicy = "keep"
"""Of every arm that is timed. Rounds ask the same again: what an engine remembered of the last one would be no work."""


class Exchange(msgspec.Struct, frozen=True):
    """One request. `token_ids`: the prompt that `messages` are rendered to."""

    messages: list[dict[str, str]]
    token_ids: list[int]
    max_tokens: int

    @property
    def sampling(self) -> SamplingParams:
        """Plain sampling; the end of a turn ends nothing, so that all arms draw the same number of tokens."""
        return SamplingParams(max_tokens=self.max_tokens, ignore_eos=True)

    def chat_body(self, *, stream: bool) -> dict[str, Any]:
        """The chat completion that asks for it."""
        body: dict[str, Any] = {"model": "policy", "messages": self.messages, "max_tokens": self.max_tokens}
        body |= {"temperature": 1.0, "ignore_eos": True}
        return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})

    def token_body(self) -> dict[str, Any]:
        """The call of the token route that asks for it."""
        sampling = {"max_tokens": self.max_tokens, "temperature": 1.0, "ignore_eos": True}
        return {"token_ids": self.token_ids, "sampling_params": sampling}


def make_workload(model: Path, *, count: int, max_tokens: int, seed: int) -> list[Exchange]:
    """`count` different questions of 10 to 30 words (about 100 to 240 tokens as prompts). The same seed gives the same.

    Answers have half to one and a half times `max_tokens`. With equal lengths all requests of an arm would end in one
    decode step and begin in the next: one arm's prefills would be huge, another's not, and that would be measured.
    """
    chat, rng = ChatRenderer.from_folder(model), random.Random(seed)
    exchanges = []
    for number in range(count):
        question = " ".join([f"Question {number}:", *rng.choices(_WORDS, k=rng.randint(10, 30))])
        messages = [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]
        length = rng.randint(max(1, max_tokens // 2), max_tokens + max_tokens // 2)
        exchanges.append(Exchange(messages, chat.render(messages), length))
    return exchanges


def make_group_questions(model: Path, *, count: int, max_tokens: int, seed: int) -> list[Exchange]:
    """`count` long questions (about 300 tokens) below one system prompt (about 80).

    One a group: all siblings ask the same. Another seed gives other questions below another system prompt.
    """
    chat, rng = ChatRenderer.from_folder(model), random.Random(seed)
    system = " ".join([_SYSTEM, f"Rules {seed}:", *rng.choices(_WORDS, k=6)])
    exchanges = []
    for _ in range(count):
        question = " ".join(rng.choices(_WORDS, k=rng.randint(30, 42)))
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        exchanges.append(Exchange(messages, chat.render(messages), max_tokens))
    return exchanges


def save_workload(exchanges: list[Exchange], path: Path) -> None:
    path.write_bytes(msgspec.json.encode(exchanges))


def load_workload(path: Path) -> list[Exchange]:
    return msgspec.json.decode(path.read_bytes(), type=list[Exchange])

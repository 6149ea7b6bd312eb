"""Random episodes of an agent in one session: what agents do, and what they should not, through the server's own calls.

Turns, tools, sub-agents, retries, hang-ups, rewritten and shortened histories, other tools, stop strings, several samples,
text and token calls; answers in token sequences that no tokenizer would make. Now and then the server dies between two
calls, and another one goes on from the journal.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Awaitable, Callable
from typing import Any

from rollout_server.chat.renderer import ChatRenderer
from rollout_server.chat.tokenizer import Renderer
from rollout_server.completions.base import AnswerContext, AnswerDeps, AnswerService, new_call_id
from rollout_server.completions.chat import ChatCalls
from rollout_server.completions.chunks import TokenTexts
from rollout_server.completions.text import CompletionCalls
from rollout_server.completions.tokens import GenerateCalls
from rollout_server.journal.records import encode_record
from rollout_server.journal.replay import Now, began, group_began, replay
from rollout_server.lifecycle.takeover import restore_answers
from rollout_server.sessions.group import Group
from rollout_server.sessions.responses import RequestKey
from rollout_server.sessions.session import Terms
from services.wire.errors import RollmeshError
from services.wire.openai_api import ChatCall, CompletionCall
from services.wire.rollout_api import SamplingLimits
from services.wire.vllm_api import GenerateCall
from tests.support.any_tokens_engine import AnyTokensEngine
from tests.support.memory_journal import MemoryJournal

Message = dict[str, Any]
NOW = Now(0.0, 0.0)
TEXTS = (
    "hello",
    " the weather",
    "",
    "é 漢 🙂",
    "a<b & c",
    "<|im_end|>",
    "line\n\nbreak ",
    "<think>",
    "12",
    "tool_call",
)
TOOLS = [
    [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
    [{"type": "function", "function": {"name": "add", "description": "a + b"}}],
]


def writer(chance: random.Random, renderer: ChatRenderer) -> Callable[[], list[int]]:
    """Makes answers: any ids, texts byte by byte, reasoning, tool calls whole and broken, with and without an end."""
    vocabulary = len(renderer._tokenizer)
    encode = renderer._encode

    def oddly(text: str) -> list[int]:
        """The text in one of its many tokenisations."""
        ids: list[int] = []
        while text:
            cut = chance.randint(1, 3)
            ids += encode(text[:cut])
            text = text[cut:]
        return ids

    def write() -> list[int]:
        parts: list[int] = []
        for _ in range(chance.randint(0, 3)):
            match chance.randrange(5):
                case 0:
                    parts += [chance.randrange(vocabulary) for _ in range(chance.randint(1, 6))]
                case 1:
                    parts += oddly(chance.choice(TEXTS))
                case 2:
                    parts += encode("<think>") + oddly("so it is\n") + encode("</think>")
                case 3:
                    name = chance.choice(("weather", "add"))
                    call = json.dumps(
                        {"name": name, "arguments": {"city": chance.choice(TEXTS), "n": chance.randint(0, 9)}}
                    )
                    parts += encode("<tool_call>") + oddly(f"\n{call}\n") + encode("</tool_call>")
                case _:
                    parts += encode("<tool_call>") + oddly('\n{"name": ')
        ends = [*renderer.stop_token_ids[:1]] if chance.random() < 0.8 else []
        return [*parts, *ends] or [chance.randrange(256)]

    return write


class Episode:
    """Drives one session. `heard`: (call id, sample) → how many of its tokens the agent was answered."""

    def __init__(self, chance: random.Random, chat: ChatRenderer, renderer: Renderer) -> None:
        self.chance = chance
        self.engine = AnyTokensEngine(chance, writer(chance, chat), chat.stop_token_ids)
        terms = Terms("any", "train", SamplingLimits(), 600.0)
        self.group = Group("g", 0, 1, "any", "train", 600.0)
        self.session = self.group.next_session("s", terms, b"")
        self.group.add(self.session)
        self.heard: dict[tuple[str, int], int] = {}
        self.moves = 0
        self.journal = MemoryJournal()
        self.journal.written = [encode_record(group_began(self.group)), encode_record(began(self.session, NOW))]
        self._caller = AnswerService(AnswerDeps(self.engine, self.journal, _clear, 8), lambda error: None)  # type: ignore[arg-type]
        texts = TokenTexts(chat.table)
        self._chat = ChatCalls(self.engine, chat, texts, "m")  # type: ignore[arg-type]
        self._texts = CompletionCalls(self.engine, renderer, chat, texts, "m")  # type: ignore[arg-type]
        self._tokens = GenerateCalls(self.engine, "m")  # type: ignore[arg-type]
        self._conversations: list[list[Message]] = []
        self._transcripts: list[str] = []
        self._paths: list[list[int]] = []
        self._repeatable: list[tuple[RequestKey, bytes]] = []
        self._number = 0
        self._renderer = chat

    async def live(self, steps: int) -> None:
        for _ in range(steps):
            kinds = (self._chat_call, self._chat_call, self._chat_call, self._text_call, self._token_call, self._retry)
            if self.chance.random() < 0.2:
                await self.move()
            try:
                await self.chance.choice(kinds)()
            except RollmeshError as error:
                if error.status >= 500:
                    raise

    async def move(self) -> None:
        """The server dies; another one takes the session over."""
        replayed = replay(self.journal.records(), NOW)
        await restore_answers(self.journal, replayed)  # type: ignore[arg-type]
        self.group, self.moves = replayed.group, self.moves + 1
        self.session = self.group.sessions["s"]

    async def _chat_call(self) -> None:
        chance, messages = self.chance, self._next_messages()
        body: Message = {
            "messages": messages,
            "stream": chance.random() < 0.4,
            "n": chance.choice((None, None, 1, 2)),
            "max_tokens": chance.choice((None, 3, 40)),
            "return_token_ids": True,
            "temperature": chance.choice((None, 0.5)),
        }
        if chance.random() < 0.5:
            body["tools"] = TOOLS[0 if chance.random() < 0.9 else 1]
        if chance.random() < 0.2:
            body["stop"] = chance.choice(("e", ["so", "\n\n"]))
        call = ChatCall.model_validate({key: value for key, value in body.items() if value is not None})
        call_id = new_call_id("chatcmpl")
        raw = await self._ask(call_id, lambda making: self._chat.produce(call, making))
        if raw is None:
            return
        tools = body["tools"] if body.get("tools") else None
        for choice in _choices(raw, bool(call.stream)):
            self._hear(call_id, choice, lambda prompt: self._renderer.answer_stream(prompt, tools, call.stops))
            said = {key: value for key, value in choice["message"].items() if value is not None}
            self._conversations.append([*messages, {"role": "assistant", "content": None} | said])

    def _next_messages(self) -> list[Message]:
        chance = self.chance
        if not self._conversations or chance.random() < 0.15:
            system = [{"role": "system", "content": chance.choice(TEXTS)}] if chance.random() < 0.5 else []
            return [*system, self._user()]
        messages = [dict(message) for message in chance.choice(self._conversations[-4:])]
        last = messages[-1]
        if chance.random() < 0.1:
            last.pop("reasoning_content", None)
        if last.get("tool_calls") and chance.random() < 0.8:
            for call in last["tool_calls"]:
                if chance.random() < 0.2:  # some clients write the arguments anew
                    arguments = json.loads(call["function"]["arguments"])
                    call["function"]["arguments"] = json.dumps(arguments, indent=1, sort_keys=True)
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": chance.choice(TEXTS)})
        else:
            messages.append(self._user())
        match chance.randrange(12):
            case 0:  # the client shortens
                messages = messages[len(messages) // 2 :]
            case 1:  # ... sums up
                messages = [messages[0], self._user(), messages[-1]]
            case 2:  # ... rewrites what was said
                messages = [m | {"content": "edited"} if m["role"] == "assistant" else m for m in messages]
        return messages

    def _user(self) -> Message:
        text = self.chance.choice(TEXTS) + self.chance.choice(TEXTS)
        parts = [{"type": "text", "text": text}]
        return {"role": "user", "content": parts if self.chance.random() < 0.2 else text}

    async def _text_call(self) -> None:
        chance = self.chance
        before = chance.choice(self._transcripts) if self._transcripts and chance.random() < 0.7 else ""
        prompt = before + chance.choice(TEXTS) + "."
        stop = {"stop": ["e"]} if chance.random() < 0.3 else {}
        call = CompletionCall.model_validate(
            {
                "prompt": prompt,
                "return_token_ids": True,
                "stream": chance.random() < 0.4,
                "n": chance.choice((1, 2)),
                **stop,
            }
        )
        call_id = new_call_id("cmpl")
        raw = await self._ask(call_id, lambda making: self._texts.produce(call, making))
        if raw is not None:
            for choice in _choices(raw, bool(call.stream)):
                self._hear(f"{call_id}-0", choice, lambda _: self._renderer.text_stream(call.stops))
                self._transcripts.append(prompt + choice["text"])

    async def _token_call(self) -> None:
        chance = self.chance
        if self._paths and chance.random() < 0.7:
            path = chance.choice(self._paths)
            prompt = path[: chance.choice((len(path), len(path), len(path) - 1, 2))] or [1]
        else:
            prompt = [chance.randrange(256)]
        prompt = [*prompt, *(chance.randrange(256) for _ in range(chance.randint(0, 3)))]
        body = {"token_ids": prompt, "stream": chance.random() < 0.4, "sampling_params": {"max_tokens": 12, "n": 2}}
        call, call_id = GenerateCall.model_validate(body), new_call_id("gen")
        raw = await self._ask(call_id, lambda making: self._tokens.produce(call, making))
        if raw is not None:
            for choice in _choices(raw, bool(call.stream)):
                self._hear(call_id, choice, lambda _: self._renderer.text_stream())
                self._paths.append([*prompt, *choice["token_ids"]])

    async def _ask(self, call_id: str, produce: Callable[[AnswerContext], Awaitable[None]]) -> bytes | None:
        """The answer's bytes; None where the agent hung up."""
        chance, answers = self.chance, self.session.memory.answers
        self._number += 1
        request_key = RequestKey(
            f"{self._number}".encode(),
            key=f"k{self._number}" if chance.random() < 0.3 else None,
            call=f"call{self._number}" if chance.random() < 0.5 else None,
        )
        answer = await self._caller.ask(self.session, request_key, call_id, produce)
        if chance.random() < 0.1:
            with answers.listening(answer, 5.0):
                await answer.begun() if chance.random() < 0.5 else None
            heard = answer.ended
            for _ in range(60):  # time enough to be sampled to its end
                await asyncio.sleep(0)
            assert answer.ended == heard or answer.error is not None, "an answer counts that nobody heard"
            if not answer.ended:
                await answers.give_up_unheard()
                return None
        with answers.listening(answer, 5.0):
            raw = await answer.whole()
        if request_key.key or request_key.call:  # of others nobody keeps the bytes when the server dies
            self._repeatable.append((request_key, raw))
        return raw

    async def _retry(self) -> None:
        """Send a call again, as a retry: it must be answered with the very bytes of the first time."""
        if not self._repeatable:
            return
        request_key, before = self.chance.choice(self._repeatable[-8:])
        again = RequestKey(request_key.body, request_key.key, 0 if request_key.key else request_key.retry + 1)
        if request_key.call and self.chance.random() < 0.5:  # the gateway sends it again
            again = request_key

        async def fail(_: AnswerContext) -> None:
            raise AssertionError("a retry was taken for a new call")

        answer = await self._caller.ask(self.session, again, "again", fail)
        with self.session.memory.answers.listening(answer, 5.0):
            assert await answer.whole() == before
        if not request_key.key and again is not request_key:
            self._repeatable.remove((request_key, before))

    def _hear(self, request_id: str, choice: Message, reader: Callable[[list[int]], Any]) -> None:
        """The agent was answered this. `reader`: reads an answer to a prompt as the call asked for."""
        sampled = self.engine.sampled[request_id, choice["index"]]
        tokens = choice["token_ids"]
        assert sampled.tokens[: len(tokens)] == tokens
        stop = choice.get("stop_reason")
        assert len(tokens) == len(sampled.tokens) or isinstance(stop, str)
        if isinstance(stop, str):  # the last token completes the stop string, and none before it does
            early, late = reader(sampled.prompt), reader(sampled.prompt)
            early.feed(tokens[:-1])
            late.feed(tokens)
            assert (early.stopped, late.stopped) == (None, stop)
        self.heard[request_id, choice["index"]] = len(tokens)


async def _clear() -> None:
    """The engine always takes requests."""


def _choices(raw: bytes, stream: bool) -> list[Message]:
    """Whole choices, put together from chunks as a client does it where the answer was streamed."""
    if not stream:
        whole: list[Message] = json.loads(raw)["choices"]
        return whole
    events = [line.removeprefix(b"data: ") for line in raw.split(b"\n\n") if line]
    assert events.pop() == b"[DONE]"
    choices: dict[int, Message] = {}
    for event in events:
        for part in json.loads(event)["choices"]:
            choice = choices.setdefault(
                part["index"], {"index": part["index"], "token_ids": [], "text": "", "message": {}}
            )
            choice["token_ids"] += part.get("token_ids") or []
            choice["text"] += part.get("text") or ""
            choice["stop_reason"] = part.get("stop_reason", choice.get("stop_reason"))
            delta = part.get("delta", {})
            for key in ("content", "reasoning_content"):
                if delta.get(key):
                    choice["message"][key] = choice["message"].get(key, "") + delta[key]
            for call in delta.get("tool_calls") or []:
                choice["message"].setdefault("tool_calls", []).append(
                    {"id": call["id"], "type": "function", "function": call["function"]}
                )
    return [choices[index] for index in sorted(choices)]

"""A conversation as text, cut where a rollout server would cut it: what is given, and what the assistant says.

    <|im_start|>user What is 2 + 3?<|im_end|> <|im_start|>assistant │ 5 │ <|im_end|> │ <|im_start|>user And 4?<|im_end|> …
                            prompt                                  content  close     rest of the turn

The first prompt is what the model folder's chat template renders, each answer what it renders as the last message. What
follows an answer is found as a server finds it (`rollout_server.chat.template`): a stand-in conversation is rendered with
the new messages behind a made-up answer. So an earlier answer stays as it was sampled, also where the template would render
it otherwise in a longer conversation (without its reasoning). Where the template cannot say, a new row begins, as a new
segment does. Tokens equal those that a server's renderer gives: `tests/unit/trainer/test_sft_encoding.py`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from services.wire.errors import UsageError
from trainer.sft.columns import Chat, Message, Tools

ROLES = ("system", "developer", "user", "assistant", "tool")
_MARK = "rollmeshANSWERrollmesh"
_QUESTION: Message = {"role": "user", "content": "?"}

Render = Callable[[Sequence[Message], Tools | None, bool], str]
"""Messages and tools to text; true: with the opening of an answer at the end. Raises UsageError for what it refuses."""


@dataclass(frozen=True)
class Turn:
    """An answer, and what follows it up to the next one: `close` ends it, `rest` is new; "" behind the row's last.

    `close`: None where it is not known apart from the content, which then ends with it.
    """

    content: str
    close: str | None
    rest: str = ""


@dataclass(frozen=True)
class TextRow:
    prompt: str
    turns: list[Turn] = field(default_factory=list)


class Conversations:
    """Of one chat template."""

    def __init__(self, render: Render, *, knows_developer: bool) -> None:
        self._render, self._knows_developer = render, knows_developer
        self._checked_tools: dict[bool, bool] = {}

    def rows(self, chat: Chat) -> list[TextRow]:
        """One row, or several where the template changes what stands before; none without an answer behind a message.

        Raises UsageError for messages that are none, and for what the template refuses or cannot say.
        """
        messages = [self._plain(index, message) for index, message in enumerate(chat.messages)]
        if chat.tools:
            self._refuse_unrendered(messages, chat.tools)
        # Nothing is sampled without a prompt: an assistant's first message is given.
        answers = [index for index, message in enumerate(messages) if message["role"] == "assistant" and index]
        rows: list[TextRow] = []
        rest: str | None = None
        for place, index in enumerate(answers):
            prompt = self._render(messages[:index], chat.tools, True)
            if rest is None:
                rows.append(TextRow(prompt))
            content, close = self._spoken(prompt, messages[: index + 1], chat.tools)
            following = answers[place + 1] if place + 1 < len(answers) else None
            rest = None
            if following is not None:
                rest = self._rest(messages[index], messages[index + 1 : following], chat.tools)
            rows[-1].turns.append(Turn(content, close, rest or ""))
        return rows

    def _spoken(self, prompt: str, messages: Sequence[Message], tools: Tools | None) -> tuple[str, str | None]:
        """The last message behind `prompt`: its content, and the close of its turn."""
        whole = self._render(messages, tools, False)
        if not whole.startswith(prompt):
            opened = prompt[len(_common(prompt, whole)) :]
            raise UsageError(
                f"the chat template opens an answer with {opened!r}, and renders this one without it",
                "give the reasoning as `reasoning_content`, or tokens of your own (data.tokens, data.mask)",
            )
        spoken, close = whole[len(prompt) :], self._close()
        if close is None or not spoken.endswith(close):
            return spoken, None
        return spoken[: len(spoken) - len(close)], close

    def _close(self) -> str | None:
        """What the template puts behind an answer where nothing follows."""
        try:
            return _behind_mark(self._render([_QUESTION, {"role": "assistant", "content": _MARK}], None, False))
        except UsageError:
            return None

    def _rest(self, answer: Message, new: Sequence[Message], tools: Tools | None) -> str | None:
        """What follows the close of `answer` where `new` messages come and another is opened; None: cannot be said."""
        marked = {**answer, "content": _MARK}
        marked.pop("reasoning_content", None)
        for base, behind in ((marked, _behind_mark), (answer, _all_of)):
            try:
                alone = behind(self._render([_QUESTION, base], tools, False))
                whole = behind(self._render([_QUESTION, base, *new], tools, True))
            except UsageError:
                continue
            if alone is not None and whole is not None and whole.startswith(alone):
                return whole[len(alone) :]
        return None

    def _plain(self, index: int, message: Message) -> Message:
        """Known fields alone, content as one string, arguments of tool calls as values: as templates expect them."""
        role = message.get("role")
        if role not in ROLES:
            raise UsageError(f"message {index} has the role {role!r}", f"known: {', '.join(ROLES)}")
        if role == "developer" and not self._knows_developer:
            role = "system"
        plain: Message = {"role": role, "content": _text_of(index, message.get("content"))}
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        if role == "assistant" and isinstance(reasoning, str):
            plain["reasoning_content"] = reasoning
        if role == "assistant" and message.get("tool_calls"):
            plain["tool_calls"] = [_call(index, call) for call in message["tool_calls"]]
        for name in ("tool_call_id", "name"):
            if isinstance(message.get(name), str):
                plain[name] = message[name]
        return plain

    def _refuse_unrendered(self, messages: Sequence[Message], tools: Tools) -> None:
        """Some templates render tools in the system's message alone, so the two kinds of conversations are told apart."""
        begins = list(messages[:1]) if messages and messages[0]["role"] == "system" else []
        key = bool(begins)
        if key not in self._checked_tools:
            asked = [*begins, _QUESTION]
            self._checked_tools[key] = self._render(asked, tools, True) != self._render(asked, None, True)
        if not self._checked_tools[key]:
            raise UsageError(
                "the chat template does not render tools: the model would not hear of them",
                "leave the column out (data.tools names another), or use a template that knows tools",
            )


def _all_of(text: str) -> str | None:
    return text


def _behind_mark(text: str) -> str | None:
    """What follows the made-up answer, where it stands exactly once."""
    _, mark, behind = text.partition(_MARK)
    return behind if mark and _MARK not in behind else None


def _common(one: str, other: str) -> str:
    length = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return one[:length]


def _text_of(index: int, content: object) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, Sequence) else [content]
    texts = [
        part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) and part.get("text") else None
        for part in parts
    ]
    if any(not isinstance(text, str) for text in texts):
        raise UsageError(f"message {index} holds something else than text", "give text: nothing else is trained on")
    return "".join(map(str, texts))


def _call(index: int, call: object) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise UsageError(
            f"message {index} has a tool call without a function",
            'write it as {"id": …, "type": "function", "function": {"name": …, "arguments": …}}',
        )
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        try:
            decoded = json.loads(arguments)
            arguments = decoded if isinstance(decoded, dict) else arguments
        except ValueError:
            pass
    named = {"name": str(function.get("name") or ""), "arguments": arguments}
    return {"id": str(call.get("id") or ""), "type": "function", "function": named}

"""The model folder's own Jinja chat template: rendered text, and the text that it puts between two answers.

To continue a conversation nothing of it is rendered again. A stand-in conversation with a made-up answer is rendered with
the new messages after it; what follows the made-up answer is what follows the real one:

    <|im_start|>user ? <|im_end|> <|im_start|>assistant ANSWER │ <|im_end|> │ <|im_start|>user new <|im_end|> <|im_start|>…
                                                               │   close    │  rest

Renderings are Jinja alone, 0.1 ms each for short messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_server.chat.answers import NoChatTemplateError, TemplateError
from rollout_server.chat.messages import (
    Message,
    Tools,
    check_unicode,
    foreign_parts,
    no_unicode,
    reasoning_of,
    role_of,
    text_of,
)
from services.wire.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

ROLES = ("system", "developer", "user", "assistant", "tool")
_ANSWER = "rollmeshANSWERrollmesh"
_QUESTION: Message = {"role": "user", "content": "?"}


def has_template(folder: Path) -> bool:
    """Whether a model folder seems to bring a chat template, without a tokenizer being loaded."""
    if (folder / "chat_template.jinja").exists():
        return True
    try:
        return b'"chat_template"' in (folder / "tokenizer_config.json").read_bytes()
    except OSError:
        return False


@dataclass(frozen=True, slots=True)
class Tail:
    """Text that follows an answer: the `close` of its turn, then new messages and the opening of the next answer."""

    close: str
    rest: str


class ChatTemplate:
    """A template and what it needs to know of messages. Holds no state: safe to use from several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, folder: str, *, keep_reasoning: bool) -> None:
        """`keep_reasoning`: continue conversations from which the template would drop what the model reasoned before."""
        self._tokenizer = tokenizer
        self._folder = folder
        self._keep_reasoning = keep_reasoning
        template = tokenizer.chat_template
        self.exists = bool(template)
        self._knows_developer = "developer" in str(template)

    def plain(self, messages: Sequence[Message], *, decode_arguments: bool) -> list[dict[str, Any]]:
        """Messages as templates expect them: content is one string, only known fields, tool arguments as the caller says.

        Raises TemplateError for a role that no template knows and for content that is not text, UsageError for messages
        that are not shaped as messages. `developer` is said as `system` where the template does not know it.
        """
        if not messages:
            raise TemplateError("there are no messages", "send at least one")
        return [self._plain(index, message, decode_arguments) for index, message in enumerate(messages)]

    def text(self, messages: Sequence[Message], tools: Tools, *, open_answer: bool) -> str:
        """Messages as the template renders them, with the opening of an answer at the end if asked.

        Raises NoChatTemplateError, TemplateError for what the template refuses, and as `plain` does.
        """
        if not self.exists:
            raise NoChatTemplateError(self._folder)
        return self._apply(messages, tools, open_answer, {})

    def heeds(self, options: Mapping[str, Any]) -> bool:
        """Whether a conversation is rendered otherwise with these variables than without them.

        Found out by rendering a stand-in; one that is refused with them counts as rendered otherwise.
        """
        try:
            return self._apply([_QUESTION], None, True, options) != self._apply([_QUESTION], None, True, {})
        except TemplateError:
            return True

    def _apply(self, messages: Sequence[Message], tools: Tools, open_answer: bool, options: Mapping[str, Any]) -> str:
        plain = self.plain(messages, decode_arguments=True)
        with_tools = list(tools) if tools else None
        try:
            text = self._tokenizer.apply_chat_template(
                plain, tools=with_tools, tokenize=False, add_generation_prompt=open_answer, **options
            )
        except Exception as error:
            raise TemplateError(
                f"the chat template refuses these messages ({error})", "send roles and an order that the model knows"
            ) from error
        return str(text)

    def tail(self, new_messages: Sequence[Message], tools: Tools) -> Tail | None:
        """What follows an answer when `new_messages` come. None where the template cannot say.

        It cannot where new messages change what is before them, or where it refuses them after an answer.
        """
        answer: Message = {"role": "assistant", "content": _ANSWER}
        try:
            close = _after_answer(self.text([_QUESTION, answer], tools, open_answer=False))
        except TemplateError:
            return None
        bases = [answer]
        if new_messages and role_of(new_messages[0]) == "tool":
            # Some templates take a tool's answer only after a call, some show no text beside a call.
            bases = [*_answers_with_calls(new_messages), answer]
        for base in bases:
            rest = None if close is None else self._rest(base, close, new_messages, tools)
            if close is not None and rest is not None:
                return Tail(close, rest)
        return None

    def _rest(self, base: Message, close: str, new_messages: Sequence[Message], tools: Tools) -> str | None:
        try:
            before = self.text([_QUESTION], tools, open_answer=False)
            alone = self.text([_QUESTION, base], tools, open_answer=False)
            whole = self.text([_QUESTION, base, *new_messages], tools, open_answer=True)
        except TemplateError:
            return None
        if not self._keep_reasoning:
            before = alone.partition(_ANSWER)[0]
        ending, at = _after_answer(alone), _end_of_answer(whole)
        if ending is None or at is None or not whole.startswith(before):
            return None
        if not ending.endswith(close) or not whole.startswith(ending, at):
            return None
        return whole[at + len(ending) :]

    def _plain(self, index: int, message: Message, decode_arguments: bool) -> dict[str, Any]:
        role = role_of(message)
        if role not in ROLES:
            raise TemplateError(f"message {index} has the role {role!r}", f"known: {', '.join(ROLES)}")
        foreign = foreign_parts(message)
        if foreign:
            raise TemplateError(
                f"message {index} holds {', '.join(foreign)}", "send text: this server takes nothing else"
            )
        if role == "developer" and not self._knows_developer:
            role = "system"
        plain: dict[str, Any] = {"role": role, "content": text_of(message)}
        if role == "assistant":
            reasoning = reasoning_of(message)
            if reasoning:
                plain["reasoning_content"] = reasoning
            calls = message.get("tool_calls")
            if calls:
                plain["tool_calls"] = [_plain_call(call, decode_arguments) for call in calls]
        for field in ("tool_call_id", "name"):
            if isinstance(message.get(field), str):
                plain[field] = message[field]
        _check_unicode(plain)
        return plain


def _plain_call(call: object, decode_arguments: bool) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping):
        raise UsageError(
            "a tool call has no function",
            'write it as {"id": …, "type": "function", "function": {"name": …, "arguments": …}}',
        )
    arguments = function.get("arguments", "")
    if decode_arguments and isinstance(arguments, str):
        try:
            decoded = json.loads(arguments)
            arguments = decoded if isinstance(decoded, dict) else arguments
        except (ValueError, RecursionError):
            pass
    return {
        "id": str(call.get("id") or ""),
        "type": "function",
        "function": {"name": str(function.get("name") or ""), "arguments": arguments},
    }


def _answers_with_calls(new_messages: Sequence[Message]) -> list[Message]:
    """Made-up answers that call what the first new messages answer: the mark in the text, and in the last argument."""
    ids = []
    for message in new_messages:
        if role_of(message) != "tool":
            break
        ids.append((str(message.get("tool_call_id") or "call"), str(message.get("name") or "tool")))
    calls = [_made_up_call(call_id, name, "?") for call_id, name in ids]
    last = _made_up_call(*ids[-1], _ANSWER)
    return [
        {"role": "assistant", "content": _ANSWER, "tool_calls": calls},
        {"role": "assistant", "content": "", "tool_calls": [*calls[:-1], last]},
    ]


def _made_up_call(call_id: str, name: str, argument: str) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": {"x": argument}}}


def _after_answer(text: str) -> str | None:
    """What follows the made-up answer, if it stands there exactly once."""
    at = _end_of_answer(text)
    return None if at is None else text[at:]


def _end_of_answer(text: str) -> int | None:
    """Where the made-up answer ends, if it stands there exactly once. A long text is not copied."""
    end = text.find(_ANSWER) + len(_ANSWER)
    return end if end >= len(_ANSWER) and text.find(_ANSWER, end) < 0 else None


def _check_unicode(plain: dict[str, Any]) -> None:
    check_unicode(plain["content"])
    if len(plain) == 2:
        return  # the role is one of ROLES
    try:
        json.dumps({**plain, "content": ""}, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise no_unicode(error) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"a message holds what is no JSON ({error})", "send plain JSON values") from error

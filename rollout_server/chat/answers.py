"""Parsing sampled tokens into an assistant message: reasoning, content and tool calls, by the model family's grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rollout_server.chat.detokenizer import TokenTable
from rollout_server.chat.messages import Tools
from rollout_server.chat.text_tools import OPENING, SpelledCall, TextFormat, read_calls
from services.wire.errors import ContextLengthError, RollmeshError

if TYPE_CHECKING:
    from renderers import ParsedToolCall
    from renderers import Renderer as FamilyRenderer

PROMPT_TAIL = 256
"""Tokens of the prompt that a grammar sees: enough to tell whether the prompt opened the reasoning."""
GRAMMAR = ("<think>", "</think>", "<tool_call>", "</tool_call>")
INCREMENTAL = frozenset({"default", "qwen3", "qwen3-vl", "prime-qwen3", "qwen3.5", "qwen3.6", "qwen3.8"})
"""Families in whose grammar only the tokens of `GRAMMAR` change what the text after them is."""


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A tool call that can be made. `arguments_json` is a JSON object as text."""

    id: str
    name: str
    arguments_json: str


@dataclass(frozen=True, slots=True)
class ParsedAnswer:
    """An assistant's message. `content` is None only beside tool calls."""

    content: str | None
    reasoning_content: str | None = None
    tool_calls: tuple[ParsedCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """What a grammar makes of some tokens. Texts are not None; `broken` is the text of calls that cannot be made."""

    content: str
    reasoning: str
    calls: list[tuple[str | None, str, str]]
    """(the model's own id for the call, name, arguments as JSON)."""
    broken: list[str]


NOTHING = Reading("", "", [], [])
"""What any grammar makes of no tokens."""


class AnswerGrammar:
    """Reads answers with one of the kept library's renderers. Holds no state: safe to use from several threads."""

    def __init__(
        self,
        family: FamilyRenderer,
        name: str,
        table: TokenTable,
        stop_token_ids: frozenset[int],
        text_tools: TextFormat | None = None,
    ) -> None:
        """`text_tools`: the format of tool calls that are found in the text, for a family that does not read them."""
        self._family = family
        self._text_tools = text_tools
        self.table = table
        self.stop_token_ids = stop_token_ids
        self.incremental = name in INCREMENTAL
        grammar = {token_id for token_id, text in table.markers.items() if text in GRAMMAR}
        self.unseen = table.special - grammar if self.incremental else frozenset[int]()
        """Tokens without a meaning in an answer: as good as not sampled."""
        self.breaks = stop_token_ids | self.unseen | table.markers.keys()
        """Tokens that are anything but text."""
        atomic = {table.markers[token_id] for token_id in grammar}
        self.spelled = tuple(marker for marker in GRAMMAR[:2] if marker not in atomic)
        """Markers of reasoning that this vocabulary writes in ordinary tokens."""

    def opening(self, tools: Tools) -> str | None:
        """The text at which content ends and tool calls begin, where a call with such tools has one."""
        return OPENING if tools and self._text_tools is not None else None

    def read(self, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Tools) -> Reading:
        """Read an answer without its stop token. Never raises; what no grammar fits is content.

        Costs about 0.3 µs a token.
        """
        ids = list(token_ids)
        try:
            parsed = self._family.parse_response(
                ids, tools=list(tools) if tools else None, prompt_ids=list(prompt_ids[-PROMPT_TAIL:])
            )
            content, reasoning = parsed.content or "", parsed.reasoning_content or ""
            attempts = list(parsed.tool_calls)
        except (
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            ArithmeticError,
            RecursionError,
            ContextLengthError,
        ):
            # The library guards its JSON against wrong syntax, not against numbers too long or nesting too deep.
            return Reading(self.table.decode(ids, skip_special=True), "", [], [])
        if self._text_tools is not None and tools:
            content, spelled = read_calls(content, self._text_tools)
            attempts = [_attempt(call) for call in spelled]
        calls, broken = [], []
        for attempt in attempts:
            call = _usable(attempt) if tools else None
            if call is None:
                broken.append(self._text_of(attempt, ids))
            else:
                calls.append(call)
        reasoning = reasoning.strip()
        content = content.rstrip() if attempts else content
        return Reading(content.lstrip("\n") if reasoning else content, reasoning, calls, broken)

    def _text_of(self, attempt: ParsedToolCall, ids: list[int]) -> str:
        start, end = attempt.token_span or (0, 0)
        return self.table.decode(ids[start:end], skip_special=True) if 0 <= start < end <= len(ids) else attempt.raw


def _attempt(call: SpelledCall) -> ParsedToolCall:
    from renderers import ParsedToolCall, ToolCallParseStatus

    status = ToolCallParseStatus.MALFORMED_STRUCTURE if call.name is None else ToolCallParseStatus.OK
    return ParsedToolCall(raw=call.raw, name=call.name, arguments=call.arguments, status=status)


def _usable(attempt: ParsedToolCall) -> tuple[str | None, str, str] | None:
    """Id, name and arguments of a call that a client can make; None for a call that is broken in any way."""
    from renderers import ToolCallParseStatus

    # Formats without quotes report INVALID_JSON for an argument that is plain text; the call is whole all the same.
    whole = (ToolCallParseStatus.OK, ToolCallParseStatus.INVALID_JSON, ToolCallParseStatus.UNKNOWN_TOOL)
    name = attempt.name
    if attempt.status not in whole or not isinstance(name, str) or not _is_unicode(name):
        return None
    arguments = _as_object(attempt.arguments)
    return None if arguments is None else (attempt.id, name, arguments)


def _as_object(arguments: Any) -> str | None:
    """Arguments as the text of a JSON object, or None."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(value, dict):
            return None
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        return text if _is_unicode(text) else json.dumps(value, allow_nan=False)
    except (ValueError, TypeError, RecursionError):
        return None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class TemplateError(RollmeshError):
    """The model's chat template does not take these messages (a role, an order, an image): HTTP 400."""

    status = 400
    code = "template"


class NoChatTemplateError(RollmeshError):
    """The model folder says nothing about chat: HTTP 400."""

    status = 400
    code = "no_chat_template"

    def __init__(self, folder: str) -> None:
        super().__init__(
            f"the model in {folder} has no chat template",
            "use /v1/completions or the token routes, or save a chat template beside the tokenizer",
        )

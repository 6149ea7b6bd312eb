"""Chat templates: messages ↔ tokens for one model folder; prompts, their exact extension, parsed answers.

    first call     render(messages)                                          ──► prompt
    next call      extend(prompt, sampled tokens, new messages)                ──► prompt ++ sampled tokens ++ the rest
    every answer   parse(prompt, sampled tokens)  or  answer_stream(prompt)    ──► reasoning, content, tool calls

What the model sampled is never rendered or encoded again, however oddly it was tokenised. Rendering and parsing are done
by the `renderers` library where it knows the model family; every other folder is rendered by its own template.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from rollout_server.chat.answer_stream import AnswerStream, new_tool_call_id
from rollout_server.chat.answers import AnswerGrammar, NoChatTemplateError, ParsedAnswer, TemplateError
from rollout_server.chat.detokenizer import TextStream, TokenTable
from rollout_server.chat.messages import Message, Tools, no_unicode, role_of
from rollout_server.chat.template import ChatTemplate, Tail
from rollout_server.chat.text_tools import OPENING, TextFormat
from rollout_server.chat.tokenizer import Encoder, QuickTokenizer, no_limit
from services.wire.errors import ContextLengthError, UsageError
from services.wire.openai_api import of_the_template

if TYPE_CHECKING:
    from renderers import Renderer as FamilyRenderer
    from renderers import RendererConfig
    from transformers import PreTrainedTokenizerFast

AUTO = "auto"
_TOKEN_PARSERS: dict[str, str] = {"hermes": "qwen3", "xml": "qwen3.5"}
"""The kept library's parsers of the same formats, where the tags are tokens of their own."""
_ASKED: Message = {"role": "user", "content": "?"}
_TOOL = {
    "type": "function",
    "function": {
        "name": "rollmeshTOOLrollmesh",
        "description": "?",
        "parameters": {"type": "object", "properties": {}},
    },
}

_log = structlog.get_logger()


@dataclass(frozen=True)
class ToolRules:
    """What is done with tools. `parser`: how calls are read where the folder's own template is used; None: as its
    vocabulary says.

    `refuse`: whether tools that the template does not render are refused; otherwise they are dropped, and that is logged
    once.
    """

    parser: TextFormat | None = None
    refuse: bool = True


def choose_config(name: str, folder: Path, template: str, table: TokenTable) -> RendererConfig:
    """The `renderers` configuration for `name`, or for `auto` what the folder's name and vocabulary say.

    `auto` takes the family that the library lists for a model of this name (`…/Qwen/Qwen3-8B`, or its folder in a hub
    cache). Every other folder keeps its own template, and gets the parsers whose markers its vocabulary has.
    Raises UsageError for an unknown name.
    """
    from renderers import DefaultRendererConfig
    from renderers.base import MODEL_RENDERER_MAP
    from renderers.configs import config_from_name

    listed = next((MODEL_RENDERER_MAP[model] for model in model_names(folder) if model in MODEL_RENDERER_MAP), None)
    wanted = listed if name == AUTO and listed is not None else name
    if wanted not in (AUTO, "default"):
        try:
            chosen: RendererConfig | None = config_from_name(wanted)
        except ValueError as error:
            known = sorted({AUTO, "default", *MODEL_RENDERER_MAP.values()})
            close = difflib.get_close_matches(wanted, known, n=3)
            raise UsageError(
                f"no renderer {wanted!r}",
                f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(known)}",
            ) from error
        assert chosen is not None
        return chosen
    markers = set(table.markers.values())
    return DefaultRendererConfig(
        tool_parser=_tool_parser(markers, template),
        reasoning_parser="think" if {"<think>", "</think>"} <= markers else None,
    )


def model_names(folder: Path) -> list[str]:
    """Hub names that a folder's path may say: its last two parts, or those of a hub cache (`models--A--B/snapshots/…`)."""
    parts = folder.resolve().parts
    cached = [part.removeprefix("models--").replace("--", "/", 1) for part in parts if part.startswith("models--")]
    return [*cached, "/".join(parts[-2:])]


def _tool_parser(markers: set[str], template: str) -> str | None:
    if "<｜tool▁calls▁begin｜>" in markers:
        return "deepseek-v3"
    if not {"<tool_call>", "</tool_call>"} <= markers:
        return None
    if "<function=" in template:
        return "qwen3.5"
    return "glm" if "<arg_key>" in template else "qwen3"


class ChatRenderer:
    """Safe to use from several threads: the tokenizer is only read, and nothing else is shared."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        folder: Path,
        name: str,
        *,
        keep_reasoning: bool,
        tools: ToolRules = ToolRules(),
        longest: Callable[[], int] = no_limit,
    ) -> None:
        backend = tokenizer.backend_tokenizer
        # Both are settings of the tokenizer itself, and changing them is what makes it unsafe in threads.
        backend.no_truncation()
        backend.no_padding()
        self._encoder = Encoder(backend, longest)
        self._folder = folder
        self._template = ChatTemplate(tokenizer, str(folder), keep_reasoning=keep_reasoning)
        self._tokenizer = tokenizer
        self.table = TokenTable(backend)
        config = choose_config(name, folder, str(tokenizer.chat_template or ""), self.table)
        self.name: str = config.name
        """The renderer's name in the kept library; `default` is the folder's own template."""
        self._tool_rules = tools
        self._text_tools: TextFormat | None = None
        if tools.parser is not None:
            config = self._with_parser(config, tools.parser)
        self._reads_calls = self._text_tools is not None or getattr(config, "tool_parser", "its own") is not None
        self._unrendered: dict[bool, bool] = {}
        self._warned: set[str] = set()
        self._family = _create(QuickTokenizer(tokenizer, self._encoder), config, keep_reasoning)

    @classmethod
    def from_folder(
        cls,
        path: Path,
        renderer_name: str = AUTO,
        *,
        keep_reasoning: bool = True,
        tools: ToolRules = ToolRules(),
        longest: Callable[[], int] = no_limit,
    ) -> ChatRenderer:
        """Load the folder's tokenizer. A folder without a chat template loads too; using it for chat raises.

        With `keep_reasoning` an agent's next question continues the tokens that were sampled even where the family's
        template would drop the reasoning in them. Without it such turns cannot be extended, and start anew as the
        template says. `longest`: of the model's sequences, as `Encoder` takes it.

        Raises UsageError for a renderer name that is unknown or does not fit the vocabulary, for a tool parser beside a
        family that reads calls itself, and for a folder without a tokenizer. Costs a second for imports, then milliseconds
        to half a second for a large vocabulary.
        """
        from renderers.base import load_tokenizer

        try:
            tokenizer = load_tokenizer(str(path))
        except Exception as error:
            raise UsageError(
                f"{path} holds no tokenizer ({error})", "save the tokenizer again (save_pretrained)"
            ) from error
        return cls(tokenizer, path, renderer_name, keep_reasoning=keep_reasoning, tools=tools, longest=longest)

    @cached_property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer: the family's, the folder's generation config's, and the template's close of a turn."""
        found = [*self._family.get_stop_token_ids(), *_generation_stops(self._folder)]
        if self.name == "default" and self._template.exists:
            tail = self._template.tail([], None)
            closing = (
                [] if tail is None else [token for token in self._encode(tail.close) if token in self.table.special]
            )
            found += closing[:1]
        return tuple(dict.fromkeys(found))

    @cached_property
    def _grammar(self) -> AnswerGrammar:
        return AnswerGrammar(
            self._family, self.name, self.table, frozenset(self.stop_token_ids), text_tools=self._text_tools
        )

    def check_tools(self, messages: Sequence[Message]) -> bool:
        """Whether the prompt of such messages holds the tools. Raises TemplateError where it does not and is to be refused:
        nobody else would notice.

        Some templates render tools in the system's message alone, so the two kinds of conversations are told apart.
        """
        with_system = bool(messages) and role_of(messages[0]) in ("system", "developer")
        unrendered = self._unrendered.get(with_system)
        if unrendered is None:
            unrendered = self._unrendered[with_system] = self._leaves_out_tools(with_system)
        if unrendered:
            what = f"the chat template of {self._folder} does not render `tools`: the model would not hear of them"
            if self._tool_rules.refuse:
                remedy = "leave them out, use a template or a renderer that knows tools"
                raise TemplateError(what, f"{remedy}, or set rollout.unrendered_tools=warn")
            self._warn_once(what, "describe them in a message")
        if not self._reads_calls:
            self._warn_once("tool calls in answers stay text: no parser reads them", "set rollout.tool_parser")
        return not unrendered

    def heeds_effort(self, reasoning_effort: str) -> bool:
        """Whether the folder's template renders a prompt otherwise for this `reasoning_effort`."""
        return self._template.exists and self._template.heeds(of_the_template(reasoning_effort))

    def _leaves_out_tools(self, with_system: bool) -> bool:
        messages = [{"role": "system", "content": "?"}, _ASKED] if with_system else [_ASKED]
        try:
            return self.render(messages, [_TOOL]) == self.render(messages)
        except (TemplateError, NoChatTemplateError):
            return False  # rendering the call itself says what is wrong

    def _warn_once(self, what: str, remedy: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            _log.warning(what, remedy=remedy)

    def _with_parser(self, config: RendererConfig, parser: TextFormat) -> RendererConfig:
        """`config` for this parser of tool calls. Raises UsageError for a family that reads calls itself."""
        if config.name != "default":
            raise UsageError(
                f"rollout.tool_parser = {parser!r} beside the renderer {config.name!r}",
                "that one reads tool calls itself: leave the setting out, or set rollout.renderer=default",
            )
        in_vocabulary = OPENING in self.table.markers.values()
        self._text_tools = None if in_vocabulary else parser
        return config.model_copy(update={"tool_parser": _TOKEN_PARSERS[parser] if in_vocabulary else None})

    def render(self, messages: Sequence[Message], tools: Tools = None) -> list[int]:
        """The prompt of a conversation, ready for an answer.

        Raises TemplateError for messages that the template refuses, NoChatTemplateError where there is none, UsageError for
        what is no message, ContextLengthError for what cannot fit the model. Costs about 1 ms for ten messages of 2,000
        tokens in all: with more than 20,000 characters, call it in a thread.
        """
        if self.name == "default":
            return self._encode(self._template.text(messages, tools, open_answer=True))
        plain = self._template.plain(messages, decode_arguments=False)
        try:
            ids: list[int] = self._family.render_ids(plain, tools=_tools(tools), add_generation_prompt=True)
        except ContextLengthError:
            raise
        except Exception as error:
            raise TemplateError(
                f"the {self.name} renderer refuses these messages ({error})",
                "send roles and an order that the model knows",
            ) from error
        return ids

    def extend(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Tools = None,
    ) -> list[int] | None:
        """The next prompt: `prompt_ids` and `completion_ids` as they are, then what follows them. None where nothing fits.

        A stop token that was sampled closes the turn and is not doubled; a turn that was cut off is closed here. Never
        raises for messages that the template refuses: rendering the conversation says what is wrong. Raises
        ContextLengthError for what cannot fit the model. Costs about 0.5 ms and what encoding the new messages costs.
        """
        sampled = [*prompt_ids, *completion_ids]
        if any(role_of(message) == "assistant" for message in new_messages):
            return None
        try:
            bridged = None if self.name == "default" else self._bridge(prompt_ids, completion_ids, new_messages, tools)
            if bridged is not None and bridged[: len(sampled)] == sampled:
                return bridged
            tail = self._template.tail(new_messages, tools)
            return None if tail is None else sampled + self._after(completion_ids, tail)
        except (TemplateError, NoChatTemplateError):
            return None

    def parse(self, prompt_ids: Sequence[int], completion_ids: Sequence[int], tools: Tools = None) -> ParsedAnswer:
        """The answer as an assistant's message, exactly as a stream of it would add up. Never raises.

        Tool calls that cannot be made, and all where the request named no tools, stay visible in the content. Costs 2 µs a
        token.
        """
        stream = self.answer_stream(prompt_ids, tools)
        stream.feed(completion_ids)
        return stream.finish()[1]

    def answer_stream(
        self,
        prompt_ids: Sequence[int],
        tools: Tools = None,
        stop: Sequence[str] = (),
        new_call_id: Callable[[], str] = new_tool_call_id,
        *,
        whole: bool = False,
    ) -> AnswerStream:
        """For an answer that is being generated; `stop` strings end it, `new_call_id` names its tool calls.

        `whole`: nothing of it is shown before its end.
        """
        return AnswerStream(self._grammar, prompt_ids, tools, stop, new_call_id, whole=whole)

    def text_stream(self, stop: Sequence[str] = ()) -> TextStream:
        """For plain text that is being generated."""
        return TextStream(self.table, stop)

    def _encode(self, text: str) -> list[int]:
        try:
            return self._encoder.encode(text)
        except UnicodeEncodeError as error:
            raise no_unicode(error) from error

    def _bridge(
        self, prompt_ids: Sequence[int], completion_ids: Sequence[int], new_messages: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        if not new_messages:
            return None
        plain = self._template.plain(new_messages, decode_arguments=False)
        try:
            bridged = self._family.bridge_to_next_turn(
                list(prompt_ids), list(completion_ids), plain, tools=_tools(tools)
            )
        except ContextLengthError:
            raise
        except Exception as error:
            raise TemplateError(f"the {self.name} renderer cannot continue ({error})") from error
        return None if bridged is None else bridged.token_ids

    def _after(self, completion_ids: Sequence[int], tail: Tail) -> list[int]:
        """Tokens that follow what was sampled. What of the close was sampled already is left out."""
        tail_ids = self._encode(tail.close + tail.rest)
        last = completion_ids[-1] if completion_ids else None
        if last not in self.stop_token_ids:
            return tail_ids
        if tail_ids[:1] == [last]:
            return tail_ids[1:]
        # Another stop token than the template's stands for it: of the close only what comes after it is said.
        closing = len(self._encode(tail.close))
        marker = next((at for at, token in enumerate(tail_ids[:closing]) if token in self.table.special), None)
        return tail_ids if marker is None else tail_ids[marker + 1 :]


def _create(quick: Any, config: RendererConfig, keep_reasoning: bool) -> FamilyRenderer:
    """`quick`: the `QuickTokenizer`, which passes for one of transformers'."""
    from renderers import create_renderer

    if keep_reasoning and config.name != "default":
        # A family that knows no reasoning takes no word about it; whatever else is wrong the second try says.
        with suppress(ValueError, NotImplementedError, AssertionError):
            return create_renderer(quick, config.model_copy(update={"thinking_retention": "all"}))
    try:
        return create_renderer(quick, config)
    except Exception as error:
        raise UsageError(
            f"the renderer {config.name!r} does not fit this tokenizer ({error})", "use the renderer `auto`"
        ) from error


def _tools(tools: Tools) -> Any:
    return [dict(tool) for tool in tools] if tools else None


def _generation_stops(folder: Path) -> list[int]:
    """`eos_token_id` of the folder's generation config; none where there is no such file."""
    try:
        stops = json.loads((folder / "generation_config.json").read_text()).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return []
    return [stops] if isinstance(stops, int) else [stop for stop in stops or [] if isinstance(stop, int)]

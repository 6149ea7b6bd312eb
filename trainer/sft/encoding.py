"""Examples as rows of tokens, of which some are learned: those of answers, and the token that ends each.

chat            by the folder's chat template (`trainer.sft.conversation`)
prompt-answer   a chat of two messages where the folder has a template, else both texts and an end token behind them
tokens          as they are; the first has nothing before it and is never learned

No special tokens are added but those of the template, and each piece is encoded for itself: a rollout server encodes a
prompt, and the model begins its answer behind it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from services.wire.errors import UsageError
from services.wire.packed import Int32Array
from trainer.sft.columns import Chat, Example, Examples, Message, PromptAnswer, TokenExample, Tools
from trainer.sft.conversation import Conversations, TextRow, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BoolArray = npt.NDArray[np.bool_]
_AT_ONCE = 512
"""Examples whose texts are encoded by one call, on all cores."""


@dataclass(frozen=True)
class EncodedRow:
    """`token_ids`: int32 `[n]`, up to the last learned one; `learned`: bool `[n]`, the first is not."""

    token_ids: Int32Array
    learned: BoolArray


class ExampleEncoder:
    """Of one model folder. `vocabulary`: of the model, which may be larger than the tokenizer's."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, folder: Path, vocabulary: int) -> None:
        """Raises UsageError for a tokenizer that is none of the library tokenizers."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise UsageError(f"{folder} has no tokenizer.json", "save its tokenizer again (save_pretrained)")
        backend.no_truncation()
        backend.no_padding()
        self._encode_batch: Callable[..., Any] = partial(backend.encode_batch_fast, add_special_tokens=False)
        self._tokenizer, self._vocabulary = tokenizer, vocabulary
        template = tokenizer.chat_template
        self.has_template = bool(template)
        self._conversations = Conversations(self._rendered, knows_developer="developer" in str(template))
        self._stops = _stops(tokenizer, folder)
        special = (token for token, added in backend.get_added_tokens_decoder().items() if added.special)
        self._closes = frozenset([*self._stops, *special])
        self.unknown = None if getattr(backend.model, "byte_fallback", False) else tokenizer.unk_token_id
        """The token of text that has none; None where every text has some."""

    def encode(self, examples: Examples) -> list[list[EncodedRow]]:
        """The rows of each example: mostly one, none where nothing is to be learned. Raises UsageError, naming the row."""
        if examples.kind == "chat" and not self.has_template:
            raise UsageError(
                "the model folder has no chat template", "give one (chat_template.jinja), or prompts and answers"
            )
        found: list[list[EncodedRow]] = []
        for start in range(0, len(examples.each), _AT_ONCE):
            some, names = examples.each[start : start + _AT_ONCE], examples.names[start : start + _AT_ONCE]
            if examples.kind == "tokens":
                found += [self._given(example, name) for example, name in zip(some, names, strict=True)]
            else:
                found += self._of_texts([self._texts(example, name) for example, name in zip(some, names, strict=True)])
        return found

    def _texts(self, example: Example, name: str) -> list[TextRow]:
        if isinstance(example, PromptAnswer):
            if not self.has_template:
                return [TextRow(example.prompt, [Turn(example.answer, "")])]
            asked, said = (
                {"role": role, "content": text}
                for role, text in (("user", example.prompt), ("assistant", example.answer))
            )
            example = Chat([asked, said])
        assert isinstance(example, Chat)
        try:
            return self._conversations.rows(example)
        except UsageError as error:
            raise UsageError(f"{name}: {error.what}", error.remedy) from error

    def _given(self, example: Example, name: str) -> list[EncodedRow]:
        assert isinstance(example, TokenExample)
        strange = next((token for token in example.tokens if not 0 <= token < self._vocabulary), None)
        if strange is not None:
            raise UsageError(f"{name}: {strange} is no token of the model", f"it has 0 to {self._vocabulary - 1}")
        return _row(example.tokens, example.mask)

    def _of_texts(self, every: Sequence[Sequence[TextRow]]) -> list[list[EncodedRow]]:
        """Of each example, all texts encoded by one call."""
        texts: list[str] = []
        for rows in every:
            for row in rows:
                texts.append(row.prompt)
                for turn in row.turns:
                    texts += [turn.content, (turn.close or "") + turn.rest, turn.close or ""]
        try:
            pieces = (encoding.ids for encoding in self._encode_batch(texts))
        except (TypeError, UnicodeEncodeError) as error:
            raise UsageError(f"a text cannot be encoded ({error})", "give well-formed Unicode text") from error
        found: list[list[EncodedRow]] = []
        for rows in every:
            found.append([])
            for row in rows:
                ids = list(next(pieces))
                learned = [False] * len(ids)
                for turn in row.turns:
                    content, tail, close = next(pieces), next(pieces), next(pieces)
                    self._add_turn(ids, learned, turn, content, tail, len(close))
                found[-1] += _row(ids, learned)
        return found

    def _add_turn(
        self, ids: list[int], learned: list[bool], turn: Turn, content: list[int], tail: list[int], closing: int
    ) -> None:
        """Add an answer, the token that ends it, and what follows. `closing`: how many tokens of `tail` close the turn."""
        closes, inserted = self._closes, 0
        if turn.close is None:
            # The content ends with it. Markers within it, as of tool calls, may be special tokens, too.
            content, tail, closing = [], [*content, *tail], len(content)
            closes, inserted = frozenset(self._stops), closing
        ends = next((at for at, token in enumerate(tail[:closing]) if token in closes), None)
        if ends is None and not closing and tail and tail[0] in self._stops:
            # The opening of the next turn closes this one.
            ends = 0
        if ends is None:
            # The template ends a turn by text alone: the model ends its own by a token, and the text follows.
            tail, ends = [*tail[:inserted], self._end_token(), *tail[inserted:]], inserted
        ids += [*content, *tail]
        learned += [True] * (len(content) + ends + 1) + [False] * (len(tail) - ends - 1)

    def _end_token(self) -> int:
        if not self._stops:
            raise UsageError(
                "the model folder has no token that ends an answer", "set eos_token of its tokenizer (save_pretrained)"
            )
        return next(iter(self._stops))

    def _rendered(self, messages: Sequence[Message], tools: Tools | None, open_answer: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=tools, tokenize=False, add_generation_prompt=open_answer
            )
        except Exception as error:  # Jinja's, and whatever a template's own code raises.
            raise UsageError(
                f"the chat template refuses these messages ({error})", "give roles and an order that it knows"
            ) from error
        return str(text)


def _row(ids: Sequence[int], learned: Sequence[bool]) -> list[EncodedRow]:
    mask = np.array(learned, dtype=np.bool_)
    mask[:1] = False
    places = np.flatnonzero(mask)
    if not len(places):
        return []
    length = int(places[-1]) + 1
    return [EncodedRow(np.array(ids[:length], dtype=np.int32), mask[:length])]


def _stops(tokenizer: PreTrainedTokenizerFast, folder: Path) -> dict[int, None]:
    """What ends generation: of the generation config, then the tokenizer's own; in this order, each once."""
    try:
        told = json.loads((folder / "generation_config.json").read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        told = None
    stops = [told] if isinstance(told, int) else [stop for stop in told or [] if isinstance(stop, int)]
    own = tokenizer.eos_token_id
    return dict.fromkeys([*stops, *([own] if isinstance(own, int) else [])])

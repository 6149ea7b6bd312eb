"""Tokenizer: text ↔ tokens with the model folder's own `tokenizer.json`.

long text ──► more tokens for sure than the model takes? ──yes──► ContextLengthError, nothing was tokenised
                 └─ no ──► tokenised without the interpreter's lock: the event loop goes on
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_server.chat.length_bound import bound_of, pieces_of
from services.wire.errors import ContextLengthError, UsageError
from services.wire.trajectory import vocabulary_digest

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

LONG_TEXT = 16_384
"""Characters above which encoding leaves the event loop: about 5 ms of work."""


def no_limit() -> int:
    """Of a model whose longest sequence is not known."""
    return 0


class Encoder:
    """Text → token ids with one tokenizer. Safe to use from several threads.

    `longest`: tokens that the model takes, prompt and answer together; 0 where that is not known (yet).
    """

    def __init__(self, tokenizer: Tokenizer, longest: Callable[[], int] = no_limit) -> None:
        self._tokenizer = tokenizer
        self._longest = longest
        self._bound = bound_of(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, no special tokens added. Raises ContextLengthError as `check` does."""
        if len(text) > LONG_TEXT:
            self.check(pieces_of(text))
        text.encode()  # raises UnicodeEncodeError for half characters, as `encode` does
        # `encode` holds the interpreter's lock until it is done, seconds for a megabyte, and finds out which characters
        # each token has; this one does neither. The ids are the same.
        (whole,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return list(whole.ids)

    def check(self, pieces: Iterable[str], slack: int = 1) -> None:
        """Raise ContextLengthError for a text, in pieces, that leaves no room for an answer, as far as its length proves.

        `slack`: how many times more tokens it must have at least: for a text that may not be tokenised as it stands.
        """
        longest = self._longest()
        if self._bound is None or longest < 1:
            return
        least = self._bound.at_least(pieces, slack * longest)
        if least >= slack * longest:
            raise ContextLengthError(least // slack, longest, at_least=True)


class Renderer:
    """Encodes what environments say, decodes what the policy sampled."""

    def __init__(self, tokenizer: Tokenizer, longest: Callable[[], int] = no_limit) -> None:
        self._tokenizer = tokenizer
        self.encoder = Encoder(tokenizer, longest)

    @classmethod
    def from_folder(cls, model: Path, longest: Callable[[], int] = no_limit) -> Renderer:
        """`longest`: of the model's sequences, as `Encoder` takes it.

        Raises UsageError when the folder holds no `tokenizer.json` that can be read.
        """
        from tokenizers import Tokenizer

        path = model / "tokenizer.json"
        if not path.is_file():
            raise UsageError(f"{path} is missing", "save the tokenizer beside the model (save_pretrained)")
        try:
            return cls(Tokenizer.from_file(str(path)), longest)
        except Exception as error:
            raise UsageError(
                f"{path} is no tokenizer ({error})", "save the tokenizer again (save_pretrained)"
            ) from error

    def vocabulary_digest(self) -> str:
        """Names the vocabulary (`services.wire.trajectory`)."""
        return vocabulary_digest(self._tokenizer.get_vocab())

    async def encode(self, text: str) -> list[int]:
        """Token ids of `text`, no special tokens added. Raises ContextLengthError for one that cannot fit the model."""
        if len(text) > LONG_TEXT:
            return await asyncio.to_thread(self.encoder.encode, text)
        return self.encoder.encode(text)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, special tokens left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text


_REMEMBERED = 256
_LONGEST_REMEMBERED = 64
"""Characters: headers and markers are shorter, and what people write is not worth remembering."""
_KNOWN = ("eos_token_id", "unk_token_id", "all_special_tokens", "name_or_path")


class QuickTokenizer:
    """A transformers tokenizer with a cache and without its Python layers, for the `renderers` library.

    Parsing one answer encodes and decodes a dozen short strings. Through transformers each takes 20 to 60 µs, nearly all of
    it in Python; from the Rust tokenizer below, or from the cache, one or two. `tokenizer` must not be changed any more.
    Safe to use from several threads. `encoder`: of the same tokenizer; without one there is no bound on a text's length.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, encoder: Encoder | None = None) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._encoder = Encoder(self._backend) if encoder is None else encoder
        self._tidies = bool(tokenizer.clean_up_tokenization_spaces)
        self._remembered = lru_cache(_REMEMBERED)(self._encode)
        self._id_of = lru_cache(_REMEMBERED)(self._find_id)
        for name in _KNOWN:
            setattr(self, name, getattr(tokenizer, name, None))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        for text in arguments[:1]:
            if isinstance(text, str) and len(text) > LONG_TEXT:
                self._encoder.check(pieces_of(text))
        return self._tokenizer(*arguments, **options)

    def __len__(self) -> int:
        return len(self._tokenizer)

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> list[int]:
        if options or add_special_tokens or not isinstance(text, str):
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, **options)
            return ids
        return list(self._remembered(text)) if len(text) <= _LONGEST_REMEMBERED else list(self._encode(text))

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> str:
        if options or self._tidies or not isinstance(token_ids, list):
            text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
            return text
        text = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if not isinstance(tokens, str):
            return self._tokenizer.convert_tokens_to_ids(tokens)
        return self._id_of(tokens)

    def _find_id(self, token: str) -> int | None:
        token_id: int | None = self._backend.token_to_id(token)
        return self._tokenizer.unk_token_id if token_id is None else token_id

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._encoder.encode(text))

"""The folder's tokenizer as the kept library uses it, without what its Python layers cost a call.

Reading one answer asks the tokenizer a dozen small questions: the ids of a fixed header, of a marker, the text of some
tokens. Through transformers each takes 20 to 60 µs, nearly all of it in Python; asked of the tokenizer beneath, or
remembered, one or two.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_REMEMBERED = 256
_LONGEST_REMEMBERED = 64
"""Characters: headers and markers are shorter, and what people write is not worth remembering."""
_KNOWN = ("eos_token_id", "unk_token_id", "all_special_tokens", "name_or_path")


class QuickTokenizer:
    """Answers as `tokenizer` does. It must not be changed any more. Safe to use from several threads."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer
        self._tidies = bool(tokenizer.clean_up_tokenization_spaces)
        self._remembered = lru_cache(_REMEMBERED)(self._encode)
        self._id_of = lru_cache(_REMEMBERED)(self._find_id)
        for name in _KNOWN:
            setattr(self, name, getattr(tokenizer, name, None))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
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
        return tuple(self._backend.encode(text, add_special_tokens=False).ids)

"""Text ↔ tokens with the model folder's own tokenizer (`tokenizer.json`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from services.vocabulary import vocabulary_digest
from services.wire.errors import UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

LONG_TEXT = 16_384
"""Characters above which encoding leaves the event loop: about 5 ms of work."""


class Renderer:
    """Encodes what environments say, decodes what the policy drew."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    @classmethod
    def from_folder(cls, model: Path) -> Renderer:
        """Raises UsageError when the folder holds no `tokenizer.json` that can be read."""
        from tokenizers import Tokenizer

        path = model / "tokenizer.json"
        if not path.is_file():
            raise UsageError(f"{path} is missing", "save the tokenizer beside the model (save_pretrained)")
        try:
            return cls(Tokenizer.from_file(str(path)))
        except Exception as error:
            raise UsageError(
                f"{path} is no tokenizer ({error})", "save the tokenizer again (save_pretrained)"
            ) from error

    def vocabulary_digest(self) -> str:
        """Names the vocabulary (`services.vocabulary`)."""
        return vocabulary_digest(self._tokenizer.get_vocab())

    async def encode(self, text: str) -> list[int]:
        """Token ids of `text`, no special tokens added."""
        if len(text) > LONG_TEXT:
            return await asyncio.to_thread(self._encode, text)
        return self._encode(text)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, special tokens left out."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

"""Tokens to text as they come, without ever showing half a character.

    tokens   "H"  "é"₁  "é"₂  <|im_end|>        (the bytes of one letter may lie in two tokens)
    text     "H"   ""   "é"

For a byte-level vocabulary (Qwen, Llama 3, GPT) a token is its bytes, so that a token costs one look-up. Other vocabularies
are decoded over a small window, because what a token says may depend on the one before it.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LONGEST_CHARACTER = 8
"""Tokens after which text of another vocabulary is shown although it ends in half a character."""


class TokenTable:
    """What each token of a vocabulary says. One a tokenizer; safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        from tokenizers import decoders

        added = tokenizer.get_added_tokens_decoder()
        self.markers: dict[int, str] = {token_id: token.content for token_id, token in added.items()}
        """Added tokens: each stands for itself, never for a part of a text."""
        self.special: frozenset[int] = frozenset(token_id for token_id, token in added.items() if token.special)
        """Markers that are no text: they show nowhere."""
        self.bytewise = isinstance(tokenizer.decoder, decoders.ByteLevel)
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {token_id: text.encode() for token_id, text in self.markers.items()}

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes of a token of a byte-level vocabulary; none for an id outside it."""
        known = self._bytes.get(token_id)
        if known is None:
            text: str | None = self._tokenizer.id_to_token(token_id)
            known = self._bytes[token_id] = b"" if text is None else _to_bytes(text)
        return known

    def decode(self, token_ids: Sequence[int], *, skip_special: bool) -> str:
        """Text of a whole sequence; half characters become U+FFFD."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special)
        return text


class TextDecoder:
    """Decodes one sequence, token by token. Feed it no marker whose text should not show."""

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []
        self._shown = 0
        """How many tokens at the window's beginning have been shown and stay only as context."""

    @property
    def holds_back(self) -> bool:
        """Whether some of what was fed is the beginning of a character."""
        return bool(self._utf8.getstate()[0]) or self._shown < len(self._window)

    def feed(self, token_id: int) -> str:
        """The characters that this token completes."""
        if self._table.bytewise:
            return self._utf8.decode(self._table.bytes_of(token_id))
        self._window.append(token_id)
        text = self._table.decode(self._window, skip_special=False)
        if text.endswith("�") and len(self._window) - self._shown < _LONGEST_CHARACTER:
            return ""
        return self._show(text)

    def feed_all(self, token_ids: Sequence[int]) -> str:
        """The same for several tokens."""
        if self._table.bytewise:
            return self._utf8.decode(b"".join(map(self._table.bytes_of, token_ids)))
        return "".join(map(self.feed, token_ids))

    def flush(self) -> str:
        """What was held back: the sequence ends here, or something that is no text follows."""
        if self._table.bytewise:
            return self._utf8.decode(b"", True)
        text = self._show(self._table.decode(self._window, skip_special=False))
        self._window, self._shown = [], 0
        return text

    def _show(self, text: str) -> str:
        before = self._table.decode(self._window[: self._shown], skip_special=False)
        self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return text[len(before) :]


def _to_bytes(token: str) -> bytes:
    """As the tokenizers library's byte-level decoder does it: a token with a foreign character stands for its own text."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()


def _alphabet() -> dict[str, int]:
    """The byte-level alphabet: printable bytes stand for themselves, the others for the characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _alphabet()

"""Incremental detokenization: tokens to text as they come, never half a character; and stop strings.

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


class TextStream:
    """Plain text of an answer for `/v1/completions`: no grammar, special tokens left out. `feed` the tokens, then `finish`.

    How the tokens are cut into pieces changes nothing.
    """

    def __init__(self, table: TokenTable, stop: Sequence[str] = ()) -> None:
        self._table = table
        self._decoder = TextDecoder(table)
        self._stops = StopStrings(stop)
        self._parts: list[str] = []
        self.consumed = 0
        """Tokens that belong to the answer: all that were fed, up to the one that completed a stop string."""

    @property
    def stopped(self) -> str | None:
        """The stop string that ended the answer: generate no more."""
        return self._stops.stopped

    def feed(self, token_ids: Sequence[int]) -> str:
        """What these tokens add to the text."""
        special, decoder, stops = self._table.special, self._decoder, self._stops
        start = len(self._parts)
        for token_id in token_ids:
            if stops.stopped is not None:
                break
            self.consumed += 1
            if token_id not in special:
                self._parts.append(stops.feed(decoder.feed(token_id)))
        return "".join(self._parts[start:])

    def finish(self) -> tuple[str, str]:
        """What has been held back, and the whole text."""
        rest = ""
        if self.stopped is None:
            rest = self._stops.feed(self._decoder.flush())
        if self.stopped is None:
            rest += self._stops.finish()
        self._parts.append(rest)
        return rest, "".join(self._parts)


class StopStrings:
    """Finds stop strings in text that comes in pieces: what may be shown, and where to stop. Pure.

        stop "END"    fed "the E"  ──► show "the ", hold back "E"
                      fed "N"      ──► hold back "EN"
                      fed "D, so"  ──► stopped by "END"; "EN" never shows

    Of several the one that is complete first counts, and of those complete at the same character the longest, so that it
    does not matter how the text was cut into pieces. The stop string itself does not show.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped: str | None = None
        """The stop string that was met."""

    def __bool__(self) -> bool:
        """Whether there is anything to watch for."""
        return bool(self._stops)

    def feed(self, text: str) -> str:
        """What may be shown now. Nothing after a stop string. Costs O(len(text)) for usual stop strings."""
        if not self._stops:
            return text
        if self.stopped is not None:
            return ""
        text = self._held + text
        met = self._first(text)
        if met is not None:
            start, self.stopped = met
            self._held = ""
            return text[:start]
        keep = self._beginning(text)
        self._held = text[keep:]
        return text[:keep]

    def finish(self) -> str:
        """What was held back, where the text ends without a stop string."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        found = [(text.find(stop), stop) for stop in self._stops]
        met = [(start + len(stop), start, stop) for start, stop in found if start >= 0]
        if not met:
            return None
        _, start, stop = min(met)
        return start, stop

    def _beginning(self, text: str) -> int:
        """Where the earliest unfinished stop string begins; the text's length where none does."""
        keep = len(text)
        for stop in self._stops:
            at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while 0 <= at < keep:
                if stop.startswith(text[at:]):
                    keep = at
                    break
                at = text.find(stop[0], at + 1)
        return keep

"""A lower bound on how many tokens a text has, told from the text and the vocabulary alone: nothing is tokenised.

    feature                        each token covers at most
    ─────────────────────────────  ──────────────────────────────────────────────────────
    bytes                          the longest token's
    ASCII letters                  those of the token that has most of them
    bytes of other scripts         the same
    words (after ASCII space)      1 in nearly every vocabulary: no token goes on into the next word

    tokens(text) ≥ max over the features of  ⌈ feature(text) / most of it in one token ⌉

So a prompt that cannot fit is refused after reading its beginning. It holds for tokenizers whose tokens add up to the
text, byte for byte: BPE over bytes, or with bytes to fall back on, after normalisation to a Unicode form at most. Of any
other (one that drops characters, or stands `<unk>` for a whole run of them) nothing is claimed: `None`, and what has to be
known is found out by tokenising.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PIECE = 1 << 15
"""Characters that are looked at in one go."""
_EDGE = 16
"""Bytes at a piece's edge that may compose with the next piece: a starter and three marks have no more."""
_NOT_LETTERS = bytes(byte for byte in range(256) if not chr(byte).isalpha() or byte > 127)
_ASCII = bytes(range(128))
_WORD = re.compile(rb"[\t\n\r ][!-~]")
_FIRST_WORD = re.compile(rb"(?:^|[\t\n\r ])[!-~]")

Form = Literal["NFC", "NFD", "NFKC", "NFKD"]
Spec = Mapping[str, Any]
"""A part of a tokenizer as `tokenizer.json` says it."""


def pieces_of(text: str) -> Iterator[str]:
    """The text in pieces of `PIECE` characters."""
    return (text[start : start + PIECE] for start in range(0, len(text), PIECE))


@dataclass(frozen=True)
class Feature:
    """Something of a text that its tokens share out. `most`: of it in one token; `count`: in a piece of text."""

    most: int
    count: Callable[[str, bytes], int]


@dataclass(frozen=True)
class LengthBound:
    """`forms`: what the tokenizer normalises to, in this order."""

    features: tuple[Feature, ...]
    forms: tuple[Form, ...] = ()

    def at_least(self, pieces: Iterable[str], enough: int) -> int:
        """Tokens that a text has at least, given in pieces (`pieces_of`); counted no further than beyond `enough`."""
        totals, least = [0] * len(self.features), 0
        for piece in pieces:
            normal = self._normal(piece)
            if normal is None:
                continue
            data = normal.encode("utf-8", "surrogatepass")
            for index, feature in enumerate(self.features):
                totals[index] += max(0, feature.count(normal, data) - (_EDGE if self.forms else 0))
                least = max(least, -(-totals[index] // feature.most))
            if least > enough:
                break
        return least

    def _normal(self, piece: str) -> str | None:
        """As the tokenizer normalises it; None where this Python's Unicode may not know all that the tokenizer's knows."""
        if not self.forms or piece.isascii():
            return piece
        if any(unicodedata.category(character) == "Cn" for character in set(piece)):
            return None
        for form in self.forms:
            piece = unicodedata.normalize(form, piece)
        return piece


def bound_of(tokenizer: Tokenizer) -> LengthBound | None:
    """The bound of a tokenizer; None where there is none. Costs about 1 µs a token of the vocabulary."""
    added = list(tokenizer.get_added_tokens_decoder().values())
    eats_space = any(token.lstrip or token.rstrip for token in added)
    forms = forms_of(_spec(tokenizer.normalizer))
    splitters = splitters_of(_spec(tokenizer.pre_tokenizer))
    if forms is None or splitters is None or tokenizer.truncation is not None:
        return None
    contents = [token.content.encode() for token in added]
    model, kind = tokenizer.model, type(tokenizer.model).__name__
    if kind == "WordLevel" and not forms and not eats_space and splitters == [_EACH_CHARACTER]:
        # Each character is a word, known or not; line ends are what `.` does not match.
        most = max([1, *(len(token.content) for token in added)])
        return LengthBound((Feature(most, lambda text, _: len(text) - text.count("\n")),))
    if kind != "BPE" or model.continuing_subword_prefix or model.end_of_word_suffix:
        return None
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    over_bytes = any(each["type"] == "ByteLevel" for each in splitters)
    if over_bytes:
        alphabet = byte_alphabet()
        if not alphabet.keys() <= vocabulary.keys():
            return None
        table = {ord(character): chr(byte) for character, byte in alphabet.items()}
        surfaces = [_as_bytes(token.translate(table)) for token in vocabulary]
    elif model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        surfaces = [token.encode() for token in vocabulary]
    else:
        return None
    return LengthBound(tuple(features_of([*surfaces, *contents], eats_space=eats_space)), forms)


def features_of(surfaces: Collection[bytes], *, eats_space: bool) -> list[Feature]:
    """What the tokens of these bytes share out. `eats_space`: a token may stand for any number of spaces beside it."""
    longest_first = sorted(surfaces, key=len, reverse=True)
    found = [
        Feature(_most(longest_first, _letters), lambda _, data: _letters(data)),
        Feature(_most(longest_first, _words_of_token), lambda _, data: len(_WORD.findall(data))),
    ]
    if not eats_space:
        found.append(Feature(_most(longest_first, _other_scripts), lambda _, data: _other_scripts(data)))
        found.append(Feature(max(1, len(longest_first[0]) if longest_first else 1), lambda _, data: len(data)))
    return found


def forms_of(spec: Spec | None) -> tuple[Form, ...] | None:
    """The Unicode forms that a normaliser brings text to; None for one that may take something out of it."""
    if spec is None:
        return ()
    kind = spec.get("type")
    if kind == "Sequence":
        forms = [forms_of(each) for each in spec.get("normalizers", ())]
        return None if None in forms else tuple(form for each in forms if each for form in each)
    if kind in ("NFC", "NFD", "NFKC", "NFKD"):
        return (kind,)
    adds = kind == "Prepend" or (
        kind == "Replace" and spec.get("pattern") == {"String": " "} and spec.get("content") == "▁"
    )
    return () if adds else None


_EACH_CHARACTER: Spec = {"type": "Split", "pattern": {"Regex": "."}, "behavior": "Isolated", "invert": False}
_KEEPING = ("ByteLevel", "Metaspace", "Digits")


def splitters_of(spec: Spec | None) -> list[Spec] | None:
    """The steps of a pre-tokenizer; None for one that may leave something of the text out."""
    if spec is None:
        return []
    kind = spec.get("type")
    if kind == "Sequence":
        steps = [splitters_of(each) for each in spec.get("pretokenizers", ())]
        return None if None in steps else [step for each in steps if each for step in each]
    keeps = kind in _KEEPING or (kind in ("Split", "Punctuation") and spec.get("behavior") != "Removed")
    return [spec] if keeps else None


def byte_alphabet() -> dict[str, int]:
    """The characters that stand for bytes in vocabularies over bytes (GPT-2's), with their bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


def _as_bytes(token: str) -> bytes:
    """A token's text, each character a byte; of one that holds anything else more bytes than it can stand for."""
    try:
        return token.encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _most(longest_first: Iterable[bytes], count: Callable[[bytes], int]) -> int:
    """The most of something that one of the tokens has; no token has more of it than bytes."""
    most = 1
    for surface in longest_first:
        if len(surface) <= most:
            break
        most = max(most, count(surface))
    return most


def _letters(data: bytes) -> int:
    return len(data.translate(None, _NOT_LETTERS))


def _other_scripts(data: bytes) -> int:
    return len(data.translate(None, _ASCII))


def _words_of_token(surface: bytes) -> int:
    """Words that begin in a token: its first character may, whatever stands before it. `▁` is a space."""
    return len(_FIRST_WORD.findall(surface.replace("▁".encode(), b" ")))


def _spec(part: object) -> Spec | None:
    """What a tokenizer's part says of itself."""
    if part is None:
        return None
    state: bytes = part.__getstate__()  # type: ignore[assignment]
    spec: Spec = json.loads(state)
    return spec

"""What each token of a vocabulary stands for, in bytes: the view of a rollout shows tokens one by one.

| decoder of the tokenizer | token      | stands for |
|--------------------------|------------|------------|
| byte level (GPT-2)       | `Ġthe`     | ` the`; of a character that several tokens make, each has its bytes |
| byte fallback, metaspace | `▁the`     | ` the`; `<0x0A>` a line break |
| another                  | any        | what it decodes to alone |
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from tokenizers import Tokenizer

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Pieces:
    """Of one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        decoder = repr(tokenizer.decoder)
        self._byte_level = "ByteLevel" in decoder
        self._fallback = "ByteFallback" in decoder or "Metaspace" in decoder
        self._added = {*tokenizer.get_added_tokens_decoder()}

    def of(self, tokens: Iterable[int]) -> dict[int, bytes]:
        """Those of `tokens`; of one that the vocabulary has not, nothing."""
        return {token: self._piece(token) for token in tokens}

    def _piece(self, token: int) -> bytes:
        name = self._tokenizer.id_to_token(token)
        if name is None:
            return b""
        if token in self._added:
            return str(name).encode()
        if self._byte_level and all(character in _BYTES for character in name):
            return bytes(_BYTES[character] for character in name)
        if self._fallback:
            byte = _FALLBACK.fullmatch(name)
            return bytes([int(byte[1], 16)]) if byte else str(name).replace("▁", " ").encode()
        return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's: bytes that print are themselves, the others follow from character 256 on."""
    printing = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printing]
    return {chr(byte): byte for byte in printing} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTES = _byte_alphabet()

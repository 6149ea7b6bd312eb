"""Keys and values of sequences computed lately, found again by the longest prefix that a new sequence shares with one.

    held     a b c d │ e f g h │ i          blocks of a few tokens; each block's chained hash names a sequence that has it
    asked    a b c d │ e f x                walk the blocks as far as they are known ──► `a b c d e f` of that sequence

All that it holds must be of one policy version: whoever commits another one calls `clear`. Belongs to one thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

Tokens = npt.NDArray[np.int64]
KeysAndValues = tuple[torch.Tensor, torch.Tensor]
BLOCK = 16
_MOST_BYTES = 256 << 20


@dataclass(eq=False)
class CachedSequence:
    """`keys`, `values`: `[layers, heads, len(tokens), dim]`. `blocks`: the hashes that name this sequence."""

    tokens: Tokens
    salt: str | None
    keys: torch.Tensor
    values: torch.Tensor
    blocks: set[int] = field(default_factory=set)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class PrefixCache:
    """Holds at most `most_bytes` of keys and values; the sequences that were not used for longest go first."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._by_block: dict[int, CachedSequence] = {}
        self._sequences: OrderedDict[int, CachedSequence] = OrderedDict()
        self.nbytes = 0

    def longest(self, tokens: Tokens, salt: str | None) -> tuple[CachedSequence, int] | None:
        """A sequence that begins like `tokens`, and for how many of them; None for less than a block.

        Of several, one that shares less than a block fewer than the best. The last of `tokens` never counts: whoever asks
        wants the logits that come after it. Only sequences added with the same `salt` are found.
        """
        found = None
        for block in _chain(tokens, salt):
            held = self._by_block.get(block)
            if held is None:
                break
            found = held
        if found is None:
            return None
        self._sequences.move_to_end(id(found))
        most = min(len(found.tokens), len(tokens) - 1)
        differing = np.flatnonzero(found.tokens[:most] != tokens[:most])
        length = int(differing[0]) if len(differing) else most
        # The hashes only led here; the tokens decide.
        return (found, length) if length >= BLOCK and found.salt == salt else None

    def add(self, tokens: Tokens, salt: str | None, copy: Callable[[], KeysAndValues]) -> None:
        """Hold a sequence, unless all its whole blocks are held. `copy` gives the cache keys and values of its own."""
        blocks = _chain(tokens, salt)
        if not blocks or blocks[-1] in self._by_block:
            return
        keys, values = copy()
        sequence = CachedSequence(tokens, salt, keys, values, set(blocks))
        for block in blocks:
            before = self._by_block.get(block)
            if before is not None:
                before.blocks.discard(block)
                if not before.blocks:
                    self._forget(before)
            self._by_block[block] = sequence
        self._sequences[id(sequence)] = sequence
        self.nbytes += sequence.nbytes
        while self.nbytes > self._most_bytes:
            self._forget(next(iter(self._sequences.values())))

    def clear(self) -> None:
        self._by_block.clear()
        self._sequences.clear()
        self.nbytes = 0

    def _forget(self, sequence: CachedSequence) -> None:
        for block in sequence.blocks:
            del self._by_block[block]
        del self._sequences[id(sequence)]
        self.nbytes -= sequence.nbytes


def as_tokens(token_ids: Sequence[int]) -> Tokens:
    return np.array(token_ids, dtype=np.int64)


def _chain(tokens: Tokens, salt: str | None) -> list[int]:
    """A hash for each whole block, of the salt and of all tokens up to the block's end."""
    raw = tokens.tobytes()
    size = BLOCK * tokens.itemsize
    chained = hash(salt)
    hashes = []
    for end in range(size, len(raw) + 1, size):
        chained = hash((chained, raw[end - size : end]))
        hashes.append(chained)
    return hashes

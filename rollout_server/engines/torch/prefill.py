"""Prefill: prompts to keys, values and first logits, each distinct prefix computed once where it can be shared.

newcomers ─► equal ones as one ─► rounds (one waits for another that begins alike) ─► cached prefix ─► one forward ─► rows
                                                                                           ▲               │
                                                                                           └─ what is held ┘
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from rollout_server.engines.torch.forward import PolicyForward
from rollout_server.engines.torch.kv_cache import KvCache, KvWindow

# Keys and values of sequences computed lately, found again by the longest prefix that a new sequence shares with one.
#
#     held     a b c d │ e f g h │ i          blocks of a few tokens; each block's chained hash names a sequence that has it
#     asked    a b c d │ e f x                walk the blocks as far as they are known ──► `a b c d e f` of that sequence
#
# All that it holds must be of one policy version: whoever commits another one calls `clear`. Belongs to one thread.

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


PREFILL_TOKENS = 16384
"""Most tokens of one forward, padding counted: that bounds its memory."""
# A round more is a forward more: so many tokens must be shared for it to pay.
_WORTH_WAITING = 64
# What a forward costs beside its tokens, in tokens: measured on a CPU with a model of 3 M parameters. A GPU computes
# thousands in the time that it takes to start one.
_FORWARD_TOKENS_CPU, _FORWARD_TOKENS_GPU = 32, 2048


@dataclass(frozen=True)
class Newcomer:
    """A prompt of which `copies` rows are wanted. `salt`: only prompts with the same one share what was computed."""

    tokens: Tokens
    salt: str | None
    copies: int


@dataclass(frozen=True)
class _Planned:
    """A newcomer, the numbers of those that it stands for, and where its first `length` tokens' keys and values lie."""

    numbers: list[int]
    newcomer: Newcomer
    cached: CachedSequence | None = None
    length: int = 0

    @property
    def fresh(self) -> int:
        return len(self.newcomer.tokens) - self.length


class Prefill:
    """Adds rows to `slots`. Without a `cache` every prompt is computed whole. `computed`: tokens prefilled so far."""

    def __init__(
        self, forward: PolicyForward, slots: KvCache, device: torch.device, cache: PrefixCache | None = None
    ) -> None:
        self._forward = forward
        self._slots = slots
        self._device = device
        self._cache = cache
        self._forward_tokens = _FORWARD_TOKENS_CPU if device.type == "cpu" else _FORWARD_TOKENS_GPU
        self.computed = 0

    def start(self, newcomers: Sequence[Newcomer]) -> tuple[list[int], torch.Tensor]:
        """Append the rows of all newcomers: their numbers in the order of the rows, and the rows' logits `[rows, …]`."""
        order: list[int] = []
        parts: list[torch.Tensor] = []
        for planned in self._rounds(newcomers):
            for part in _split(planned, self._forward_tokens):
                order += [number for plan in part for number in plan.numbers]
                parts.append(self._together(part))
        return order, parts[0] if len(parts) == 1 else torch.cat(parts)

    def again(self, sequences: Sequence[Sequence[int]]) -> None:
        """Compute the keys and values of all rows anew; `sequences[row]`: the tokens that the row holds."""
        low, high = self._slots.columns
        ids = self._padded([np.array(sequence, dtype=np.int64) for sequence in sequences], high - low)
        width = max(1, PREFILL_TOKENS // len(sequences))
        for begin in range(low, high, width):
            end = min(begin + width, high)
            self._forward(ids[:, begin - low : end - low], self._slots.window_to(end))
        self.computed += sum(len(sequence) for sequence in sequences)

    def remember(self, row: int, tokens: Tokens, salt: str | None) -> None:
        """Keep what a row holds for later prompts that begin with it."""
        if self._cache is not None:
            self._cache.add(tokens, salt, lambda: self._slots.copy_of(row))

    def forget(self) -> None:
        """What was computed so far is of no use to anyone else any more."""
        if self._cache is not None:
            self._cache.clear()

    def _rounds(self, newcomers: Sequence[Newcomer]) -> Iterator[list[_Planned]]:
        """The newcomers round by round. Take the next round when the one before is computed: it may read from it."""
        waiting = self._equal_as_one(newcomers)
        while waiting:
            planned: list[_Planned] = []
            later: list[tuple[list[int], Newcomer]] = []
            begun: set[tuple[str | None, bytes]] = set()
            for numbers, newcomer in waiting:
                plan = self._plan(numbers, newcomer)
                if self._cache is not None and plan.fresh > _WORTH_WAITING:
                    begins = newcomer.salt, newcomer.tokens[: plan.length + _WORTH_WAITING].tobytes()
                    if begins in begun:
                        later.append((numbers, newcomer))
                        continue
                    begun.add(begins)
                planned.append(plan)
            yield planned
            waiting = later

    def _equal_as_one(self, newcomers: Sequence[Newcomer]) -> list[tuple[list[int], Newcomer]]:
        """Siblings ask the same: where sharing is allowed, one of them is computed, for the rows of all."""
        if self._cache is None:
            return [([number], newcomer) for number, newcomer in enumerate(newcomers)]
        numbers: dict[tuple[str | None, bytes], list[int]] = {}
        for number, newcomer in enumerate(newcomers):
            numbers.setdefault((newcomer.salt, newcomer.tokens.tobytes()), []).append(number)
        return [
            (equal, replace(newcomers[equal[0]], copies=sum(newcomers[number].copies for number in equal)))
            for equal in numbers.values()
        ]

    def _plan(self, numbers: list[int], newcomer: Newcomer) -> _Planned:
        found = None if self._cache is None else self._cache.longest(newcomer.tokens, newcomer.salt)
        return _Planned(numbers, newcomer) if found is None else _Planned(numbers, newcomer, *found)

    def _together(self, part: Sequence[_Planned]) -> torch.Tensor:
        """One forward over these; those of their cached tokens that fall into it are computed again."""
        lengths = [len(plan.newcomer.tokens) for plan in part]
        width, queries = max(lengths), max(plan.fresh for plan in part)
        window = self._slots.scratch(lengths, blank=queries < width)
        for row, (plan, length) in enumerate(zip(part, lengths, strict=True)):
            ready = length - queries
            if ready > 0 and plan.cached is not None:
                begin = width - length
                window.keys[:, row, :, begin : begin + ready].copy_(plan.cached.keys[:, :, :ready])
                window.values[:, row, :, begin : begin + ready].copy_(plan.cached.values[:, :, :ready])
        ids = self._padded([plan.newcomer.tokens for plan in part], width)
        logits = self._forward(ids[:, width - queries :], window)
        self.computed += sum(min(length, queries) for length in lengths)
        copies = [plan.newcomer.copies for plan in part]
        self._slots.place(window, lengths, copies)
        self._remember_prompts(part, lengths, window)
        pick = torch.from_numpy(np.repeat(np.arange(len(part)), copies)).to(self._device)
        return logits.index_select(0, pick)

    def _remember_prompts(self, part: Sequence[_Planned], lengths: Sequence[int], window: KvWindow) -> None:
        if self._cache is None:
            return
        width = window.keys.shape[3]
        for row, (plan, length) in enumerate(zip(part, lengths, strict=True)):
            own = (slice(None), row, slice(None), slice(width - length, width))
            newcomer = plan.newcomer
            self._cache.add(
                newcomer.tokens,
                newcomer.salt,
                lambda own=own: (window.keys[own].clone(), window.values[own].clone()),  # type: ignore[misc]
            )

    def _padded(self, sequences: Sequence[Tokens], width: int) -> torch.Tensor:
        """int64 `[sequences, width]`, each sequence at the end of its row."""
        ids = np.zeros((len(sequences), width), dtype=np.int64)
        for row, sequence in enumerate(sequences):
            ids[row, width - len(sequence) :] = sequence
        return torch.from_numpy(ids).to(self._device)


def _split(planned: Sequence[_Planned], forward_tokens: int) -> list[list[_Planned]]:
    """Those of like need together: a forward computes as many tokens of each row as its neediest row needs.

    Cut wherever the tokens that would be computed for nothing outweigh one more forward, `forward_tokens`: those of all
    that come before some place, up to the need of the last.
    """
    parts: list[list[_Planned]] = []
    for plan in sorted(planned, key=lambda plan: plan.fresh):
        part = parts[-1] if parts else []
        idle = max((count * (plan.fresh - before.fresh) for count, before in enumerate(part, 1)), default=0)
        if part and idle <= forward_tokens:
            part.append(plan)
        else:
            parts.append([plan])
    return parts

"""Prefill with prefix caching: prompts to keys, values and first logits, each distinct prefix computed once.

new prompts ─► equal ones merged ─► rounds (a prompt waits for one with the same prefix) ─► forward ─► rows
                                                                                          ▲           │
                                                                                          └ PrefixCache
A prompt whose own logprobs are asked for reads no cached prefix, and is computed by pieces (`prompt_scores`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from rollout_server.engines.base import PromptLogprobs
from rollout_server.engines.torch.forward import PolicyForward
from rollout_server.engines.torch.kv_cache import KvCache, KvWindow, on_device
from rollout_server.engines.torch.prompt_scores import piece_width, prefill_scored

Tokens = npt.NDArray[np.int64]
KeysAndValues = tuple[torch.Tensor, ...]
"""Keys, values, and the experts that were chosen where those are kept."""
BLOCK = 16
_MOST_BYTES = 256 << 20


@dataclass(eq=False)
class CachedSequence:
    """`memories`: keys, values (and choices), `[layers, heads, len(tokens), dim]`. `blocks`: the hashes that name this
    sequence."""

    tokens: Tokens
    salt: str | None
    memories: KeysAndValues
    blocks: set[int] = field(default_factory=set)

    @property
    def keys(self) -> torch.Tensor:
        return self.memories[0]

    @property
    def values(self) -> torch.Tensor:
        return self.memories[1]

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self.memories)


class PrefixCache:
    """LRU cache of the keys and values of recent sequences, looked up by the longest common prefix.

        cached     a b c d │ e f g h │ i      blocks of a few tokens; each block's chained hash names a sequence that has it
        looked up  a b c d │ e f x            follow the blocks as far as they are known ──► `a b c d e f` of that sequence

    It keeps at most `most_bytes`. All entries must be of one policy version: a commit calls `clear`. Used on one thread.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._by_block: dict[int, CachedSequence] = {}
        self._sequences: OrderedDict[int, CachedSequence] = OrderedDict()
        self.nbytes = 0

    def longest(self, tokens: Tokens, salt: str | None) -> tuple[CachedSequence, int] | None:
        """A sequence that begins like `tokens`, and for how many of them; None for less than a block.

        Of several, one that shares less than a block fewer than the best. The last of `tokens` never counts: the
        logits that come after it are still to be computed. Only sequences added with the same `salt` are found.
        """
        found = None
        for block in _chain(tokens, salt):
            cached = self._by_block.get(block)
            if cached is None:
                break
            found = cached
        if found is None:
            return None
        self._sequences.move_to_end(id(found))
        most = min(len(found.tokens), len(tokens) - 1)
        differing = np.flatnonzero(found.tokens[:most] != tokens[:most])
        length = int(differing[0]) if len(differing) else most
        # The hashes only led here; the tokens decide.
        return (found, length) if length >= BLOCK and found.salt == salt else None

    def add(self, tokens: Tokens, salt: str | None, copy: Callable[[], KeysAndValues]) -> None:
        """Add a sequence, unless all its whole blocks are cached. `copy` makes the keys and values to keep."""
        blocks = _chain(tokens, salt)
        if not blocks or blocks[-1] in self._by_block:
            return
        sequence = CachedSequence(tokens, salt, copy(), set(blocks))
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
# Between two decode steps: whoever waits for the next one waits for these. A CPU takes half a second for as many, of a
# model of 3 M parameters, and is no faster where more are given to it.
_ADMITTED_TOKENS_CPU = 2048
# A further round costs a further forward: so many shared tokens are needed for it to pay off.
_WORTH_WAITING = 64
# The fixed cost of a forward, in tokens: measured on a CPU with a model of 3 M parameters. A GPU computes thousands of
# tokens in the time that it takes to launch one.
_FORWARD_TOKENS_CPU, _FORWARD_TOKENS_GPU = 32, 2048


@dataclass(frozen=True)
class Newcomer:
    """A prompt of which `copies` rows are wanted. `salt`: only prompts with the same one share what was computed.

    `scored`: the logprobs of its own tokens are wanted too.
    """

    tokens: Tokens
    salt: str | None
    copies: int
    scored: bool = False


@dataclass(frozen=True)
class _Planned:
    """A prompt, the numbers of the equal ones that it represents, and its cached prefix of `length` tokens."""

    numbers: list[int]
    newcomer: Newcomer
    cached: CachedSequence | None = None
    length: int = 0

    @property
    def fresh(self) -> int:
        return len(self.newcomer.tokens) - self.length


@dataclass(frozen=True)
class Prefilled:
    """`order`: the newcomers' numbers in the order of the new rows; `logits`: float32 `[rows, outputs]` after each row.

    `scores`: of the scored newcomers, by number.
    """

    order: list[int]
    logits: torch.Tensor
    scores: dict[int, PromptLogprobs]


class Prefill:
    """Adds rows to `slots`. Without a `cache` every prompt is computed whole.

    `computed`: tokens prefilled so far. `most_at_once`: tokens of several prompts, padding counted, to be given to `start`.
    """

    def __init__(
        self, forward: PolicyForward, slots: KvCache, device: torch.device, cache: PrefixCache | None = None
    ) -> None:
        self._forward = forward
        self._slots = slots
        self._device = device
        self._cache = cache
        on_cpu = device.type == "cpu"
        self._forward_tokens = _FORWARD_TOKENS_CPU if on_cpu else _FORWARD_TOKENS_GPU
        self.most_at_once = _ADMITTED_TOKENS_CPU if on_cpu else PREFILL_TOKENS
        self.computed = 0

    def start(self, newcomers: Sequence[Newcomer]) -> Prefilled:
        """Append the rows of all newcomers."""
        order: list[int] = []
        parts: list[torch.Tensor] = []
        scores: dict[int, PromptLogprobs] = {}
        for planned in self._rounds(newcomers):
            for part in _split(planned, self._forward_tokens):
                order += [number for plan in part for number in plan.numbers]
                logits, scored = self._together(part)
                parts.append(logits)
                for plan, prompt in zip(part, scored, strict=False):
                    scores |= dict.fromkeys(plan.numbers, prompt)
        return Prefilled(order, parts[0] if len(parts) == 1 else torch.cat(parts), scores)

    def again(self, sequences: Sequence[Sequence[int]]) -> None:
        """Recompute the keys and values of all rows; `sequences[row]`: the tokens of the row."""
        low, high = self._slots.columns
        ids = self._padded([np.array(sequence, dtype=np.int64) for sequence in sequences], high - low)
        width = max(1, PREFILL_TOKENS // len(sequences))
        for begin in range(low, high, width):
            end = min(begin + width, high)
            self._forward(ids[:, begin - low : end - low], self._slots.window_to(end))
        self.computed += sum(len(sequence) for sequence in sequences)

    def remember(self, row: int, tokens: Tokens, salt: str | None) -> None:
        """Put a row's keys and values into the prefix cache."""
        if self._cache is not None:
            self._cache.add(tokens, salt, lambda: self._slots.copy_of(row))

    def forget(self) -> None:
        """Empty the prefix cache."""
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
                    if begins in begun and not newcomer.scored:
                        later.append((numbers, newcomer))
                        continue
                    begun.add(begins)
                planned.append(plan)
            yield planned
            waiting = later

    def _equal_as_one(self, newcomers: Sequence[Newcomer]) -> list[tuple[list[int], Newcomer]]:
        """Equal prompts (samples of a group) are computed once, for the rows of all, where sharing is allowed."""
        if self._cache is None:
            return [([number], newcomer) for number, newcomer in enumerate(newcomers)]
        numbers: dict[tuple[str | None, bytes, bool], list[int]] = {}
        for number, newcomer in enumerate(newcomers):
            numbers.setdefault((newcomer.salt, newcomer.tokens.tobytes(), newcomer.scored), []).append(number)
        return [
            (equal, replace(newcomers[equal[0]], copies=sum(newcomers[number].copies for number in equal)))
            for equal in numbers.values()
        ]

    def _plan(self, numbers: list[int], newcomer: Newcomer) -> _Planned:
        if self._cache is None or newcomer.scored:
            return _Planned(numbers, newcomer)
        found = self._cache.longest(newcomer.tokens, newcomer.salt)
        return _Planned(numbers, newcomer) if found is None else _Planned(numbers, newcomer, found[0], found[1])

    def _together(self, part: Sequence[_Planned]) -> tuple[torch.Tensor, list[PromptLogprobs]]:
        """The rows' logits, and of scored prompts (all are, or none) their logprobs.

        One forward over these; those of their cached tokens that fall into it are computed again.
        """
        lengths = [len(plan.newcomer.tokens) for plan in part]
        width, queries = max(lengths), max(plan.fresh for plan in part)
        window = self._slots.scratch(lengths, blank=queries < width)
        for row, (plan, length) in enumerate(zip(part, lengths, strict=True)):
            ready = length - queries
            if ready > 0 and plan.cached is not None:
                begin = width - length
                for memory, cached in zip(window.memories, plan.cached.memories, strict=True):
                    memory[:, row, :, begin : begin + ready].copy_(cached[:, :, :ready])
        ids = self._padded([plan.newcomer.tokens for plan in part], width)
        scores: list[PromptLogprobs] = []
        if part[0].newcomer.scored:
            piece = piece_width(len(part), self._forward.outputs, PREFILL_TOKENS)
            logits, scores = prefill_scored(self._forward, ids, window, lengths, piece)
        else:
            logits = self._forward(ids[:, width - queries :], window)
        self.computed += sum(min(length, queries) for length in lengths)
        copies = [plan.newcomer.copies for plan in part]
        self._slots.place(window, lengths, copies)
        self._remember_prompts(part, lengths, window)
        pick = on_device(np.repeat(np.arange(len(part)), copies), self._device)
        return logits.index_select(0, pick), scores

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
                lambda own=own: tuple(memory[own].clone() for memory in window.memories),  # type: ignore[misc]
            )

    def _padded(self, sequences: Sequence[Tokens], width: int) -> torch.Tensor:
        """int64 `[sequences, width]`, each sequence at the end of its row."""
        ids = np.zeros((len(sequences), width), dtype=np.int64)
        for row, sequence in enumerate(sequences):
            ids[row, width - len(sequence) :] = sequence
        return on_device(ids, self._device)


def _split(planned: Sequence[_Planned], forward_tokens: int) -> list[list[_Planned]]:
    """Group prompts of similar length: a forward computes as many tokens of each row as its longest row needs.

    A new group begins where the padding computed for nothing would cost more than one more forward, `forward_tokens`, and
    where prompts are scored.
    """
    parts: list[list[_Planned]] = []
    for plan in sorted(planned, key=lambda plan: (plan.newcomer.scored, plan.fresh)):
        part = parts[-1] if parts and parts[-1][0].newcomer.scored == plan.newcomer.scored else []
        idle = max((count * (plan.fresh - before.fresh) for count, before in enumerate(part, 1)), default=0)
        if part and idle <= forward_tokens:
            part.append(plan)
        else:
            parts.append([plan])
    return parts

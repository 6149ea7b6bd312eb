"""Prefill: prompts to keys, values and first logits, each distinct prefix computed once where it can be shared.

newcomers ─► equal ones as one ─► rounds (one waits for another that begins alike) ─► cached prefix ─► one forward ─► rows
                                                                                           ▲               │
                                                                                           └─ what is held ┘
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rollout_server.engines.kv_slots import KvSlots, KvWindow
from rollout_server.engines.policy_forward import PolicyForward
from rollout_server.engines.prefix_cache import CachedSequence, PrefixCache, Tokens

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
        self, forward: PolicyForward, slots: KvSlots, device: torch.device, cache: PrefixCache | None = None
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

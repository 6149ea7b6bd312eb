"""What changes a row's logits by what it has drawn so far: `min_tokens`, then the penalties, in vLLM's order.

    logits ─► stop tokens to −inf until min_tokens ─► repetition ─► frequency, presence ─► the sampler

Only rows that ask for it are touched. The counts are made when rows come or go and then kept up token by token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from services.wire.sampling import SamplingParams


@dataclass(frozen=True)
class ShapedRow:
    """A row of the batch whose parameters shift its logits. `drawn`: its tokens so far; `stops`: what may end it."""

    row: int
    sampling: SamplingParams
    prompt: Sequence[int]
    drawn: Sequence[int]
    stops: Collection[int]


class LogitShaping:
    """For one composition of the batch. Call `apply` before each draw and `drew` with the tokens after it."""

    def __init__(self, rows: Sequence[ShapedRow], vocabulary: int, device: torch.device) -> None:
        def column(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

        def table(ids: Sequence[Collection[int]]) -> torch.Tensor:
            return torch.from_numpy(np.stack([_counts(each, vocabulary) for each in ids])).to(device)

        self._rows = torch.tensor([each.row for each in rows], device=device)
        self._places = [each.row for each in rows]
        self._until = [each.sampling.min_tokens - len(each.drawn) for each in rows]
        self._in_prompt = table([each.prompt for each in rows]) > 0
        self._drawn = table([each.drawn for each in rows])
        self._stops = table([each.stops for each in rows]) > 0
        self._presence = column([each.sampling.presence_penalty for each in rows])
        self._frequency = column([each.sampling.frequency_penalty for each in rows])
        self._repetition = column([each.sampling.repetition_penalty for each in rows])

    def apply(self, logits: torch.Tensor) -> None:
        """Shape float32 `logits` `[rows of the batch, vocabulary]` in place."""
        own = logits.index_select(0, self._rows)
        if any(left > 0 for left in self._until):
            early = torch.tensor([left > 0 for left in self._until], device=own.device).unsqueeze(1)
            own = own.masked_fill(self._stops & early, float("-inf"))
        drawn = self._drawn > 0
        factor = torch.where(self._in_prompt | drawn, self._repetition, torch.ones_like(self._repetition))
        own = torch.where(own > 0, own / factor, own * factor)
        own = own - self._frequency * self._drawn - self._presence * drawn
        logits.index_copy_(0, self._rows, own)

    def drew(self, tokens: Sequence[int]) -> None:
        """Every row of the batch drew a token."""
        own = torch.tensor([[tokens[row]] for row in self._places], device=self._drawn.device)
        self._drawn.scatter_add_(1, own, torch.ones_like(own, dtype=torch.float32))
        self._until = [left - 1 for left in self._until]


def _counts(ids: Collection[int], vocabulary: int) -> npt.NDArray[np.float32]:
    """How often each token of the vocabulary is among `ids`."""
    found = np.bincount(np.fromiter(ids, dtype=np.int64, count=len(ids)), minlength=vocabulary)
    return found[:vocabulary].astype(np.float32)

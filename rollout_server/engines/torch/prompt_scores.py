"""Prefill that also tells the logprobs of the prompts' own tokens, piece by piece.

    columns   ├── piece ──┤├── piece ──┤├─ piece ─┤     the language head over one piece at a time: its logits are what
    memory    logits ──► logprobs, ranks ──► freed      takes memory (2,000 tokens, 152,000 outputs: 1.2 GB)

No cached prefix is used: of tokens that are not computed there are no logits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rollout_server.engines.base import PromptLogprobs
from rollout_server.engines.torch.forward import PolicyForward
from rollout_server.engines.torch.kv_cache import KvWindow

MOST_LOGITS = 1 << 25
"""Of one piece: 128 MiB in float32. Their log-softmax takes as much again, a comparison a quarter of it."""


def prefill_scored(
    forward: PolicyForward, ids: torch.Tensor, window: KvWindow, lengths: Sequence[int], piece: int
) -> tuple[torch.Tensor, list[PromptLogprobs]]:
    """Fill a scratch window with prompts of these `lengths`, `piece` columns at a time.

    `ids`: int64 `[rows, columns]`, each prompt at the end of its row. Returns float32 `[rows, outputs]`, the logits after
    each prompt, and the logprobs of each.
    """
    width = ids.shape[1]
    last, logprobs, ranks = ids, [], []
    for begin in range(0, width, piece):
        end = min(begin + piece, width)
        logits = forward.logits_of_all(ids[:, begin:end], window.up_to(end))
        # What comes after a column is the next one's token; after the last one it is still to be sampled.
        targets = ids[:, begin + 1 : end + 1].unsqueeze(-1)
        known = logits[:, : targets.shape[1]]
        ranks.append((known >= known.gather(-1, targets)).sum(-1))
        logprobs.append(known.log_softmax(-1).gather(-1, targets).squeeze(-1))
        last = logits[:, -1].clone()
    rows = zip(lengths, torch.cat(logprobs, 1).tolist(), torch.cat(ranks, 1).tolist(), strict=True)
    return last, [_of_row(*row) for row in rows]


def piece_width(rows: int, outputs: int, most_tokens: int) -> int:
    """How many columns of so many rows to compute at once: `most_tokens` tokens at most, and `MOST_LOGITS` logits."""
    return max(1, min(most_tokens, MOST_LOGITS // outputs) // rows)


def undefined(scores: PromptLogprobs) -> bool:
    """Whether a logprob is not a number (−inf is one)."""
    return math.isnan(sum(scores.logprobs))


def _of_row(length: int, logprobs: list[float], ranks: list[int | None]) -> PromptLogprobs:
    begin = len(logprobs) - (length - 1)
    return PromptLogprobs(logprobs[begin:], ranks[begin:])

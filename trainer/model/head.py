"""The language head in chunks: hidden states to logprobs, entropy and likeliest tokens, without `[M, V]` logits.

    hidden [M, H] ──a chunk of rows──► z = x·Wᵀ / T ──► logprob, entropy, likeliest ──► [M]        z is let go of
    their gradients ──a chunk──► z once more ──► ∂z ──► ∂x, added to ∂W                             in its place

    log π(t) = z_t − log Σ exp z        ∂ log π(t) / ∂z_j = 1[j = t] − p_j
    H = log Σ exp z − Σ p·z             ∂H / ∂z_j         = −p_j · (log p_j + H)

Where the vocabulary is on several ranks (`trainer.parallel.vocabulary`) each computes its own part of z for all tokens, and
they exchange a few numbers a token: the largest z, Σ exp z, z_t, Σ p·z; and ∂x, of which each has a part.

Computing z again costs a matrix product of four; keeping it would cost M·V floats several times over, 2.5 GB each for 4096
tokens of a vocabulary of 151,936. What fits a chunk as a whole is kept: there is nothing to save.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trainer.data.packing import KeptTokens
from trainer.parallel.vocabulary import VocabularyShard

_CHUNK = {"cpu": 1 << 23, "cuda": 1 << 27}
"""Logits of a chunk: 32 MiB of float32, of which two are held, and half of one more in 16 bits; twice as many would save 5
to 10 % of the head's time on a CPU. GPUs want more rows."""
_NO_CHANCE = -1e30


@dataclass(frozen=True)
class Terms:
    """Of `M` tokens: `logprobs` float32 `[M]`; `entropy` `[M]`, in nats, and of the `k` likeliest tokens `top_logprobs` and
    `top_ids` `[M, k]`, the likeliest first, where they were asked for."""

    logprobs: Tensor
    entropy: Tensor | None = None
    top_logprobs: Tensor | None = None
    top_ids: Tensor | None = None


def head_terms(
    hidden: Tensor,
    weight: Tensor,
    tokens: Tensor,
    temperature: Tensor | None = None,
    *,
    kept: KeptTokens | None = None,
    bias: Tensor | None = None,
    entropy: bool = False,
    top: int = 0,
    chunk: int | None = None,
    shard: VocabularyShard | None = None,
) -> Terms:
    """What a linear head says of `tokens`, with gradients for `hidden`, `weight` and `bias`.

    `hidden` `[M, H]`; `weight` `[V, H]`, multiplied in `hidden`'s dtype; `tokens` int64 `[M]`; `temperature` float32 `[M]`,
    None for 1 everywhere; `bias` `[V]`. `kept`: the tokens, of the whole vocabulary, that there were to sample from; all
    others have no chance. `top`: how many of the likeliest tokens are asked for. `chunk`: logits of a chunk.
    Sums are made in float32, in float64 where `hidden` is.

    `shard`: which part of the vocabulary `weight` and `bias` are, `V` of it, where other ranks have the others: all call
    this with the same of all else, have the same loss of what it returns, and get the whole gradient of `hidden`.
    """
    wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    chunk = _CHUNK.get(hidden.device.type, _CHUNK["cpu"]) if chunk is None else chunk
    # As many on all ranks.
    rows = max(1, chunk // (weight.shape[0] if shard is None else shard.most))
    if temperature is not None:
        temperature = temperature.to(wide)
    found: tuple[Tensor, Tensor, Tensor] = _ChunkedHead.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, tokens, temperature, kept, entropy, top, rows, shard, chunk
    )
    logprobs, of_entropy, ids = found
    return Terms(
        logprobs[:, 0],
        of_entropy if entropy else None,
        logprobs[:, 1:] if top else None,
        ids[:, 1:] if top else None,
    )


class _ChunkedHead(torch.autograd.Function):
    """Returns logprobs `[M, 1 + k]` of each row's token and of the `k` likeliest, entropy `[M]` (or empty), and their ids
    `[M, 1 + k]`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        tokens: Tensor,
        temperature: Tensor | None,
        cuts: KeptTokens | None,
        entropy: bool,
        top: int,
        rows: int,
        shard: VocabularyShard | None,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        count = len(hidden)
        cast, cast_bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        logprobs = torch.empty((count, 1 + top), dtype=wide, device=hidden.device)
        ids = torch.empty((count, 1 + top), dtype=torch.int64, device=hidden.device)
        normaliser = torch.empty(count, dtype=wide, device=hidden.device)
        of_entropy = torch.empty(count if entropy else 0, dtype=wide, device=hidden.device)
        ids[:, 0] = tokens
        kept: Tensor | None = None
        for start in range(0, count, rows):
            own = slice(start, start + rows)
            logits = _logits(hidden[own], cast, cast_bias, _of(temperature, own), wide)
            if cuts is not None:
                cut_(logits, cuts, own, shard)
            if shard is not None:
                log_p = _of_shard(
                    logits, shard, ids[own], logprobs[own], normaliser[own], _of(of_entropy, own, entropy)
                )
                kept = log_p if count <= rows else None
                del logits, log_p
                continue
            normaliser[own] = logits.logsumexp(-1)
            if top:
                ids[own, 1:] = logits.topk(top, dim=-1).indices
            logprobs[own] = logits.gather(-1, ids[own]) - normaliser[own, None]
            log_p = logits.sub_(normaliser[own, None])
            if entropy:
                # H = −Σ p · log p
                of_entropy[own] = -torch.linalg.vecdot(log_p.exp(), log_p)
            kept = log_p if count <= rows else None
            # Not beside the next chunk's.
            del logits, log_p
        ctx.save_for_backward(hidden, weight, bias, temperature, ids, normaliser, of_entropy, kept)
        ctx.entropy, ctx.rows, ctx.shard, ctx.cuts, ctx.chunk = entropy, rows, shard, cuts, chunk
        ctx.mark_non_differentiable(ids)
        return logprobs, of_entropy, ids

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        to_logprobs, to_entropy, _ = gradients
        hidden, weight, bias, temperature, ids, normaliser, of_entropy, kept = ctx.saved_tensors
        shard: VocabularyShard | None = ctx.shard
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        wide = normaliser.dtype
        cast, cast_bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        to_hidden = torch.empty_like(hidden) if wants_hidden else None
        to_weight = torch.zeros_like(weight) if wants_weight else None
        to_bias = torch.zeros_like(bias) if wants_bias else None
        pulled = to_logprobs.sum(1)
        for start in range(0, len(hidden), ctx.rows):
            own = slice(start, start + ctx.rows)
            scale = _of(temperature, own)
            if kept is not None:
                log_p = kept
            else:
                log_p = _logits(hidden[own], cast, cast_bias, scale, wide)
                if ctx.cuts is not None:
                    cut_(log_p, ctx.cuts, own, shard)
                log_p.sub_(normaliser[own, None])
            slopes, pull = log_p.exp(), pulled[own, None]
            if ctx.entropy:
                # What is kept may be asked for again.
                toward = log_p.clone() if kept is not None else log_p
                pull = toward.add_(of_entropy[own, None]).mul_(to_entropy[own, None]).add_(pull)
            slopes.mul_(pull).neg_()
            if shard is None:
                slopes.scatter_add_(1, ids[own], to_logprobs[own])
            elif shard.size:
                places, inside = shard.own(ids[own])
                slopes.scatter_add_(1, places, to_logprobs[own] * inside)
            if scale is not None:
                slopes.mul_(scale.reciprocal()[:, None])
            if to_bias is not None:
                to_bias += slopes.sum(0)
            steep = slopes.to(hidden.dtype)
            # Not beside the products.
            del log_p, slopes
            if to_hidden is not None:
                torch.mm(steep, cast, out=to_hidden[own])
            if to_weight is not None:
                _add_product(to_weight, steep, hidden[own], ctx.chunk)
            del steep
        if shard is not None and to_hidden is not None:
            shard.summed(to_hidden)
        return to_hidden, to_weight, to_bias, *[None] * 8


def _add_product(total: Tensor, slopes: Tensor, hidden: Tensor, most: int) -> None:
    """`total` `[V, H]` += `slopes` `[M, V]`ᵀ · `hidden` `[M, H]`; of 16-bit floats `most` numbers at a time: their product
    is beside the sum, and on a CPU a float32 copy of it too."""
    if total.dtype == slopes.dtype:
        total.addmm_(slopes.t(), hidden)
        return
    rows = max(1, most // total.shape[1])
    for part, of_part in zip(torch.split(total, rows), torch.split(slopes, rows, dim=1), strict=True):
        part += of_part.t() @ hidden


def _of_shard(
    logits: Tensor, shard: VocabularyShard, ids: Tensor, logprobs: Tensor, normaliser: Tensor, entropy: Tensor | None
) -> Tensor:
    """Of `logits` `[rows, size]`, which are this rank's and the caller's to change: log p of the same tokens.

    `logprobs`, `normaliser` and `entropy` are written, and `ids` behind its first column, as `_ChunkedHead` has them.
    """
    top = ids.shape[1] - 1
    highest = shard.largest(logits)
    # Of what is left, nothing is large: the sums are as exact as those of one rank.
    z = logits.sub_(highest[:, None])
    weights = z.exp()
    columns = [weights.sum(-1)]
    if shard.size:
        places, inside = shard.own(ids[:, 0])
        columns.append(z.gather(1, places[:, None])[:, 0] * inside)
    else:
        columns.append(torch.zeros_like(highest))
    if entropy is not None:
        columns.append(torch.linalg.vecdot(weights, z))
    total, chosen, *expected = shard.summed(torch.stack(columns))
    log_total = total.log()
    normaliser.copy_(highest + log_total)
    logprobs[:, 0] = chosen - log_total
    if top:
        likeliest, ids[:, 1:] = shard.likeliest(z, top)
        logprobs[:, 1:] = likeliest - log_total[:, None]
    if entropy is not None:
        # H = log Σ exp z − Σ p·z
        entropy.copy_(log_total - expected[0] / total)
    return z.sub_(log_total[:, None])


def _logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: Tensor | None, wide: torch.dtype
) -> Tensor:
    """`[rows, V]`, the caller's to change."""
    logits = torch.nn.functional.linear(hidden, weight, bias).to(wide)
    return logits if temperature is None else logits.div_(temperature[:, None])


def cut_(logits: Tensor, kept: KeptTokens, own: slice, shard: VocabularyShard | None = None) -> None:
    """Leave no chance, in place, to what is not `kept` of rows `own`. `logits` `[rows, V]`, or the shard's columns of it.

    A finite number stands for −∞: its product with a probability of 0 must be 0.
    """
    counts = kept.counts[own]
    before = int(kept.counts[: own.start].sum())
    ids = kept.ids[before : before + int(counts.sum())]
    rows = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    if shard is not None:
        ids, inside = shard.own(ids)
        inside = inside.bool()
        rows, ids = rows[inside], ids[inside]
    gone = (counts > 0)[:, None].expand(logits.shape).clone()
    gone[rows, ids] = False
    logits.masked_fill_(gone, _NO_CHANCE)


def _of(column: Tensor | None, own: slice, wanted: bool = True) -> Tensor | None:
    return None if column is None or not wanted else column[own]


def linear_head(model: PreTrainedModel) -> nn.Linear | None:
    """The head of `model`, where it is one linear layer whose logits it may be that nothing changes: seen by trying.

    None for a head that something is added to, such as an adapter, and for logits that are bent (`final_logit_softcapping`:
    so little near 0 that a trial may not see it).
    """
    head = model.get_output_embeddings()
    bent = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    return head if type(head) is nn.Linear and not bent else None


def logit_terms(
    logits: Tensor,
    tokens: Tensor,
    temperature: Tensor | None,
    *,
    kept: KeptTokens | None = None,
    entropy: bool = False,
) -> Terms:
    """The same of logits that are there: `logits` `[…, V]`, `tokens` int64 `[…]`, `temperature` float32 `[…]` or None; with
    `kept`, `logits` `[N, V]`."""
    logits = logits.float()
    if temperature is not None:
        logits = logits / temperature.unsqueeze(-1)
    if kept is not None:
        logits = logits.clone()
        cut_(logits, kept, slice(0, len(logits)))
    chosen = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    normaliser = logits.logsumexp(-1)
    logprobs: Tensor = chosen - normaliser
    if not entropy:
        return Terms(logprobs)
    # H = log Z − Σ p·z
    expected = ((logits - normaliser.unsqueeze(-1)).exp() * logits).sum(-1)
    return Terms(logprobs, normaliser - expected)

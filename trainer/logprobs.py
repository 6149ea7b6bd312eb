"""Log-probabilities of tokens under a causal language model: the one place where logits become logprobs.

log π(x_t | x_<t) = z[x_t] / T − logsumexp(z / T)          z: the model's logits before position t
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from trainer.packed_forward import PackedForward
from trainer.packing import MicroBatch


def sampled_terms(policy: PackedForward, micro: MicroBatch, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
    """Logprobs, float32 `[M]`, of the sampled tokens of a micro-batch at the temperatures that they were drawn with.

    With `entropy` also that of the distribution that each was drawn from, in nats.
    """
    logits = policy.logits(micro.row, micro.places - 1)
    return _terms(logits, micro.row.input_ids[0, micro.places], micro.temperature, entropy=entropy)


def token_logprobs(model: PreTrainedModel, input_ids: Tensor, first: int = 1) -> Tensor:
    """Logprobs of `input_ids[:, first:]`, each given what stands before it.

    `input_ids`: int64 `[B, T]`, padded on the right, where a causal model's earlier positions cannot see it; `first`: ≥ 1,
    so that columns nobody asks for cost no logits. Returns float32 `[B, T − first]`; what stands at padding means nothing.
    """
    wanted = torch.arange(first - 1, input_ids.shape[1] - 1, device=input_ids.device)
    logits = model(input_ids=input_ids, use_cache=False, logits_to_keep=wanted).logits
    return _terms(logits, input_ids[:, first:], None, entropy=False)[0]


def _terms(
    logits: Tensor, tokens: Tensor, temperature: Tensor | None, *, entropy: bool
) -> tuple[Tensor, Tensor | None]:
    """`logits` `[…, V]`, `tokens` int64 `[…]`, `temperature` float32 `[…]`, None for 1 everywhere."""
    logits = logits.float()
    if temperature is not None:
        logits = logits / temperature.unsqueeze(-1)
    chosen = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    normaliser = logits.logsumexp(-1)
    logprobs: Tensor = chosen - normaliser
    if not entropy:
        return logprobs, None
    # H = log Z − Σ p·z
    expected = ((logits - normaliser.unsqueeze(-1)).exp() * logits).sum(-1)
    return logprobs, normaliser - expected

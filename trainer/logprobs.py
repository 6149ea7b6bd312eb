"""Log-probabilities of tokens under a causal language model: the one place where logits become logprobs.

log π(x_t | x_<t) = z[x_t] / T − logsumexp(z / T)          z: the model's logits before position t
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel


def token_logprobs(
    model: PreTrainedModel, input_ids: Tensor, first: int = 1, temperature: Tensor | None = None
) -> Tensor:
    """Logprobs of `input_ids[:, first:]`, each given what stands before it.

    `input_ids`: int64 `[B, T]`, padded on the right; `first`: ≥ 1, so that columns nobody asks for cost no logits.
    `temperature`: float32 `[B, T − first]` or `[B, 1]`, what the logits are divided by; None means 1 everywhere.
    Returns float32 `[B, T − first]`; what stands at padding means nothing.
    """
    return token_terms(model, input_ids, first, temperature)[0]


def token_terms(
    model: PreTrainedModel,
    input_ids: Tensor,
    first: int = 1,
    temperature: Tensor | None = None,
    *,
    entropy: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """As `token_logprobs`; with `entropy` also that of the distribution that each token was drawn from, in nats.

    No attention mask is needed: padding stands on the right, where a causal model's earlier positions cannot see it.
    """
    length = input_ids.shape[1]
    wanted = torch.arange(first - 1, length - 1, device=input_ids.device)
    output = model(input_ids=input_ids, use_cache=False, logits_to_keep=wanted)
    logits = output.logits.float()
    if temperature is not None:
        logits = logits / temperature.unsqueeze(-1)
    chosen = logits.gather(-1, input_ids[:, first:].unsqueeze(-1)).squeeze(-1)
    normaliser = logits.logsumexp(-1)
    logprobs: Tensor = chosen - normaliser
    if not entropy:
        return logprobs, None
    # H = log Z − Σ p·z
    expected = ((logits - normaliser.unsqueeze(-1)).exp() * logits).sum(-1)
    return logprobs, normaliser - expected

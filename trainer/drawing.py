"""Drawing answers from a policy with plain `transformers`: batched, a KV cache, no padding, no server.

For what stands beside the mesh (the warm start's bar, benchmarks); a run's own rollouts come from the rollout servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel


@dataclass(frozen=True)
class Drawn:
    """One answer: its `n` tokens, the end token included if it `ended`, and the logprob with which each was drawn."""

    tokens: list[int]
    logprobs: list[float]
    ended: bool

    @property
    def said(self) -> list[int]:
        """The tokens without the end token."""
        return self.tokens[:-1] if self.ended else self.tokens


@torch.inference_mode()
def draw(
    model: PreTrainedModel, prompts: Tensor, end: int, max_new_tokens: int, generator: torch.Generator | None
) -> list[Drawn]:
    """One answer to each row of `prompts` (int64 `[B, P]`), at temperature 1; greedily without a `generator`."""
    tokens: list[Tensor] = []
    logprobs: list[Tensor] = []
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    inputs, cache = prompts, None
    while len(tokens) < max_new_tokens and not bool(ended.all()):
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        logits = output.logits[:, -1].float()
        if generator is None:
            inputs = logits.argmax(-1, keepdim=True)
        else:
            inputs = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        tokens.append(inputs)
        logprobs.append(logits.log_softmax(-1).gather(-1, inputs))
        ended |= inputs.squeeze(1) == end
    rows = zip(torch.cat(tokens, dim=1).tolist(), torch.cat(logprobs, dim=1).tolist(), strict=True)
    return [_until_end(row, drawn_at, end) for row, drawn_at in rows]


def _until_end(tokens: Sequence[int], logprobs: Sequence[float], end: int) -> Drawn:
    ended = end in tokens
    length = tokens.index(end) + 1 if ended else len(tokens)
    return Drawn(list(tokens[:length]), list(logprobs[:length]), ended)

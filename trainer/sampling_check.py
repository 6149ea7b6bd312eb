"""Sampling answers from a policy with plain `transformers`: how the warm start knows when it has taught enough."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from services.wire.demonstrations import Question


@torch.inference_mode()
def sampled_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    checks: Sequence[Question],
    max_new_tokens: int,
    generator: torch.Generator,
) -> float:
    """Which part of `checks` one sampled answer each (temperature 1) gets right: it ends in `answer` before its end token.

    Prompts of one length go through the model together, with a KV cache and without padding.
    """
    by_length: dict[int, list[tuple[list[int], str]]] = defaultdict(list)
    for check in checks:
        prompt = tokenizer.encode(check.prompt, add_special_tokens=False)
        by_length[len(prompt)].append((prompt, check.answer))
    right = 0
    for same_length in by_length.values():
        prompts = torch.tensor([prompt for prompt, _ in same_length])
        drawn = draw(model, prompts, tokenizer.eos_token_id, max_new_tokens, generator)
        for tokens, (_, answer) in zip(drawn, same_length, strict=True):
            right += tokens is not None and tokenizer.decode(tokens).endswith(answer)
    return right / len(checks)


def draw(
    model: PreTrainedModel, prompts: torch.Tensor, end: int, max_new_tokens: int, generator: torch.Generator
) -> list[list[int] | None]:
    """Sample a continuation of each row of `prompts` (int64 `[B, P]`): its tokens before `end`, None if it never ended."""
    columns: list[torch.Tensor] = []
    ended = torch.zeros(len(prompts), dtype=torch.bool)
    inputs, cache = prompts, None
    while len(columns) < max_new_tokens and not bool(ended.all()):
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        drawn = torch.multinomial(output.logits[:, -1].float().softmax(-1), 1, generator=generator)
        columns.append(drawn)
        ended |= drawn.squeeze(1) == end
        inputs = drawn
    rows = torch.cat(columns, dim=1).tolist()
    return [row[: row.index(end)] if end in row else None for row in rows]

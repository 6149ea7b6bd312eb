"""Sampled accuracy of a policy on demonstrated problems: the warm start's stopping criterion."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from services.wire.tasks.demonstrations import Question


def sampled_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    checks: Sequence[Question],
    max_new_tokens: int,
    generator: torch.Generator | None,
) -> float:
    """Which part of `checks` one answer each gets right: sampled at temperature 1, or greedily without a `generator`.

    Prompts of one length go through the model together.
    """
    by_length: dict[int, list[tuple[list[int], Question]]] = defaultdict(list)
    for check in checks:
        prompt = tokenizer.encode(check.prompt, add_special_tokens=False)
        by_length[len(prompt)].append((prompt, check))
    right = 0
    for same_length in by_length.values():
        prompts = torch.tensor([prompt for prompt, _ in same_length])
        answers = sample_answers(model, prompts, tokenizer.eos_token_id, max_new_tokens, generator)
        for answer, (_, check) in zip(answers, same_length, strict=True):
            right += is_right(tokenizer, check, answer)
    return right / len(checks)


def is_right(tokenizer: PreTrainedTokenizerBase, question: Question, answer: Sampled) -> bool:
    """Whether an answer ended and is right, as `Question.accepts` says."""
    if not answer.ended:
        return False
    text = str(tokenizer.decode(answer.said))
    return re.fullmatch(question.accepts, text) is not None if question.accepts else text.endswith(question.answer)


# Batched generation with plain `transformers`: a KV cache, no padding, no server. For the warm start and benchmarks;
# a run's own rollouts come from the rollout servers.


@dataclass(frozen=True)
class Sampled:
    """One answer: its `n` tokens, the end token included if it `ended`, and the logprob with which each was sampled."""

    tokens: list[int]
    logprobs: list[float]
    ended: bool

    @property
    def said(self) -> list[int]:
        """The tokens without the end token."""
        return self.tokens[:-1] if self.ended else self.tokens


@torch.inference_mode()
def sample_answers(
    model: PreTrainedModel, prompts: Tensor, end: int, max_new_tokens: int, generator: torch.Generator | None
) -> list[Sampled]:
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
    return [_until_end(row, sampled_at, end) for row, sampled_at in rows]


def _until_end(tokens: Sequence[int], logprobs: Sequence[float], end: int) -> Sampled:
    ended = end in tokens
    length = tokens.index(end) + 1 if ended else len(tokens)
    return Sampled(list(tokens[:length]), list(logprobs[:length]), ended)

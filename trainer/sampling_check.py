"""How often a policy answers right: by this the warm start knows when it has taught enough."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from services.wire.demonstrations import Question
from trainer.drawing import Drawn, draw


def sampled_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    checks: Sequence[Question],
    max_new_tokens: int,
    generator: torch.Generator | None,
) -> float:
    """Which part of `checks` one answer each gets right: drawn at temperature 1, or greedily without a `generator`.

    Prompts of one length go through the model together.
    """
    by_length: dict[int, list[tuple[list[int], Question]]] = defaultdict(list)
    for check in checks:
        prompt = tokenizer.encode(check.prompt, add_special_tokens=False)
        by_length[len(prompt)].append((prompt, check))
    right = 0
    for same_length in by_length.values():
        prompts = torch.tensor([prompt for prompt, _ in same_length])
        answers = draw(model, prompts, tokenizer.eos_token_id, max_new_tokens, generator)
        for answer, (_, check) in zip(answers, same_length, strict=True):
            right += is_right(tokenizer, check, answer)
    return right / len(checks)


def is_right(tokenizer: PreTrainedTokenizerBase, question: Question, answer: Drawn) -> bool:
    """Whether an answer ended and is right, as `Question.accepts` says."""
    if not answer.ended:
        return False
    text = str(tokenizer.decode(answer.said))
    return re.fullmatch(question.accepts, text) is not None if question.accepts else text.endswith(question.answer)

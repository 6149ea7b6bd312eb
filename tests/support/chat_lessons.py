"""A few seconds of supervised steps that teach the tiny chat policy to answer as a task's form asks, if seldom rightly.

lesson: [user, assistant, user, assistant, …] ──template──► tokens, the assistant's words trained
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from tests.support.chat_policy import TURN_END, build_chat_model, build_chat_tokenizer
from trainer.model.logprobs import token_logprobs

Lesson = Sequence[str]
"""What the user and the assistant say in turn, the user first."""


def teach(folder: Path, make_lesson: Callable[[random.Random], Lesson], *, steps: int, batch: int = 16) -> None:
    """Train a fresh chat policy on lessons, and save it as a Hugging Face folder."""
    tokenizer, model = build_chat_tokenizer(), build_chat_model(0)
    model.eval()
    numbers = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 3e-3 * min(1.0, (step + 1) / 10)
        rows = [_tokens(tokenizer, make_lesson(numbers)) for _ in range(batch)]
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.tensor([ids + [tokenizer.pad_token_id] * (longest - len(ids)) for ids, _ in rows])
        trained = torch.tensor([mask + [0.0] * (longest - len(mask)) for _, mask in rows])
        first = max(1, int(trained.any(dim=0).float().argmax()))
        loss = -(token_logprobs(model, ids, first) * trained[:, first:]).sum() / trained.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokens(tokenizer: object, lesson: Lesson) -> tuple[list[int], list[float]]:
    ids: list[int] = []
    mask: list[float] = []
    for number, text in enumerate(lesson):
        spoken = bool(number % 2)
        opening = "\n" if number else ""
        head = f"{opening}<|im_start|>{'assistant' if spoken else 'user'}\n"
        for part, trained in ((head, False), (f"{text}{TURN_END}", spoken)):
            piece = tokenizer(part, add_special_tokens=False)["input_ids"]  # type: ignore[operator]
            ids += piece
            mask += [float(trained)] * len(piece)
    return ids, mask

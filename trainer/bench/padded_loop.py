"""What one writes without a trainer: a padded Hugging Face loop with the same loss, optimizer and model.

answers ──padded to the longest of the batch──► chunks of rows ──► all logits ──► PPO clip, mean over tokens ──► AdamW
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from services.settings import TrainerSettings
from trainer.bench.heavy_tail import Answer


class PaddedLoop:
    """`rows`: of a forward/backward pass. `cut`: whether a pass is cut to the longest of its own rows."""

    def __init__(self, model: PreTrainedModel, settings: TrainerSettings, rows: int, *, cut: bool) -> None:
        self.model = model.eval()
        self._settings, self._rows, self._cut = settings, rows, cut
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def step(self, answers: Sequence[Answer]) -> None:
        """One optimizer step."""
        ids = _padded([torch.tensor([*answer.prompt, *answer.completion]) for answer in answers])
        there = _padded([torch.ones(len(answer.prompt) + len(answer.completion)) for answer in answers])
        behaviour = _padded([torch.tensor([0.0] * len(answer.prompt) + answer.logprobs) for answer in answers])
        drawn = there.clone()
        for row, answer in zip(drawn, answers, strict=True):
            row[: len(answer.prompt)] = 0.0
        advantages = torch.tensor([answer.advantage for answer in answers])[:, None]
        tokens = drawn.sum()
        for start in range(0, len(answers), self._rows):
            chunk = slice(start, start + self._rows)
            width = int(there[chunk].sum(1).max()) if self._cut else ids.shape[1]
            columns = (ids[chunk, :width], there[chunk, :width], behaviour[chunk, 1:width], drawn[chunk, 1:width])
            (self._loss(*columns, advantages[chunk]) / tokens).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._settings.clip_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _loss(self, ids: Tensor, there: Tensor, behaviour: Tensor, drawn: Tensor, advantages: Tensor) -> Tensor:
        logits = self.model(input_ids=ids, attention_mask=there.long(), use_cache=False).logits[:, :-1].float()
        logprobs = logits.gather(-1, ids[:, 1:, None]).squeeze(-1) - logits.logsumexp(-1)
        ratio = ((logprobs - behaviour) * drawn).exp()
        loss = self._settings.loss
        bounded = ratio.clamp(1 - loss.clip_low, 1 + loss.clip_high)
        return -(torch.minimum(ratio * advantages, bounded * advantages) * drawn).sum()


def _padded(rows: Sequence[Tensor]) -> Tensor:
    return pad_sequence(list(rows), batch_first=True)

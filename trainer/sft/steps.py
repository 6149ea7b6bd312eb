"""Optimizer steps on encoded examples, and the loss of those that are held out.

rows ──packed, learned tokens as fresh ones of advantage 1──► learner's step (`trainer.model.learner`)
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from services.policies.token_budget import smaller_budget
from services.wire.run_metrics import TokenStatistics
from trainer.data.packing import MicroBatch, PackedBatch, pack
from trainer.data.rows import Rows
from trainer.data.staleness import NOT_SAMPLED, StalenessTally
from trainer.model.anomaly import AnomalyError, is_out_of_memory, release_memory
from trainer.model.learner import Learner, trained_weights
from trainer.sft.encoding import EncodedRow
from trainer.sft.report import ExampleCounts, StepLine, Summary
from trainer.sft.selection import Order
from trainer.sft.sft_settings import SftSettings


@dataclass(frozen=True)
class Chosen:
    """The rows of each example that is trained on, and of all that are measured."""

    trained: Sequence[Sequence[EncodedRow]]
    measured: Sequence[EncodedRow]
    counts: ExampleCounts


def packed(
    rows: Sequence[EncodedRow], budget: int, device: torch.device | None = None, stem_width: int | None = None
) -> PackedBatch:
    """Rows in passes of at most `budget` tokens, as `trainer.data.packing.pack` does: every learned token fresh, its
    advantage 1, so that the plain policy gradient is the mean negative logprob."""
    lengths = np.array([len(row.token_ids) for row in rows], dtype=np.int64)
    learned = np.concatenate([row.learned for row in rows])
    tally = StalenessTally(Counter({0: int(learned.sum())}), segments=len(rows))
    flat = Rows(
        lengths=lengths,
        token_ids=np.concatenate([row.token_ids for row in rows]),
        logprobs=np.zeros(len(learned), dtype=np.float32),
        ages=np.where(learned, 0, NOT_SAMPLED).astype(np.int16),
        current_until=np.zeros(len(rows), dtype=np.int64),
        group=np.zeros(len(rows), dtype=np.int64),
        advantages=learned.astype(np.float32),
        temperatures=None,
    )
    return pack(flat, tally, budget, device, stem_width)


class SupervisedTraining:
    """The optimizer steps of one training, its measurements and figures."""

    def __init__(self, learner: Learner, settings: SftSettings, chosen: Chosen, order: Order, steps: int) -> None:
        self.learner, self._settings, self._chosen, self._order, self._steps = learner, settings, chosen, order, steps
        self._budget = settings.trainer.micro_batch_tokens
        self._measured: list[MicroBatch] = []
        if chosen.measured:
            self._measured = self._packed(chosen.measured).micro_batches
        self._losses: dict[int, float] = {}
        """Of the held-out examples, by step."""
        self._best: tuple[int, dict[str, Tensor]] | None = None
        self._tokens = self._learned = 0
        self._train_s = 0.0

    @property
    def parameters(self) -> int:
        return sum(one.numel() for one in self.learner.model.parameters() if one.requires_grad)

    @property
    def loss_before(self) -> float | None:
        return self._losses.get(0)

    @property
    def newest_loss(self) -> float | None:
        return next(reversed(self._losses.values()), None)

    def step(self, number: int) -> StepLine:
        """Make optimizer step `number`, from 1."""
        began = time.perf_counter()
        batch = self._order.batch(number - 1)
        rows = [row for place in batch for row in self._chosen.trained[place]]
        rate = self.learner.learning_rate(self.learner.steps_made)
        statistics = self._made(rows)
        seconds = time.perf_counter() - began
        tokens = sum(len(row.token_ids) for row in rows)
        learned = sum(int(row.learned.sum()) for row in rows)
        self._tokens, self._learned, self._train_s = (
            self._tokens + tokens,
            self._learned + learned,
            self._train_s + seconds,
        )
        every = self._settings.evaluation.every
        due = number == self._steps or (every and number % every == 0)
        return StepLine(
            step=number,
            epoch=self._order.epoch(number - 1),
            loss=float(statistics.loss or 0.0),
            learning_rate=rate,
            grad_norm=statistics.grad_norm,
            examples=len(batch),
            tokens=tokens,
            learned_tokens=learned,
            seconds=round(seconds, 4),
            held_out_loss=self.measure(number) if due else None,
        )

    def measure(self, step: int) -> float | None:
        """The loss of the held-out examples after so many steps; None where there are none."""
        if not self._measured:
            return None
        total = tokens = 0.0
        for micro in self._measured:
            logprobs = self.learner.logprobs(micro)
            total -= float(logprobs.double().sum())
            tokens += len(logprobs)
        loss = total / tokens
        if self._settings.evaluation.keep_best and loss < min(self._losses.values(), default=float("inf")):
            held = {name: weight.detach().cpu().clone() for name, weight in trained_weights(self.learner.model).items()}
            self._best = (step, held)
        self._losses[step] = loss
        return loss

    def take_best(self) -> int:
        """Put the best weights that were measured into the model; returns the step that they are of."""
        assert self._best is not None
        step, held = self._best
        with torch.no_grad():
            for name, weight in trained_weights(self.learner.model).items():
                weight.copy_(held[name])
        return step

    def summary(self, *, model: Path, data: Path, kind: str, written: int, rate_from: str) -> Summary:
        return Summary(
            model=str(model),
            data=str(data),
            kind=kind,
            parameters_trained=self.parameters,
            examples=self._chosen.counts,
            steps=self._steps,
            written_step=written,
            loss_before=self._losses.get(0),
            loss_after=self._losses.get(self._steps),
            loss_written=self._losses.get(written),
            learning_rate=self._settings.trainer.learning_rate,
            learning_rate_from=rate_from,
            tokens=self._tokens,
            learned_tokens=self._learned,
            train_s=round(self._train_s, 3),
            tokens_per_s=round(self._tokens / max(self._train_s, 1e-9), 1),
        )

    def _made(self, rows: Sequence[EncodedRow]) -> TokenStatistics:
        """A step, in smaller passes from then on where memory runs out."""
        learner = self.learner
        while True:
            version = learner.version
            try:
                return learner.step(self._packed(rows))
            except AnomalyError as error:
                raise AnomalyError(error.what, "look at the data; a smaller trainer.learning_rate may help") from error
            except Exception as error:
                lengths, sharing = [len(row.token_ids) for row in rows], learner.stem_width is not None
                smaller = smaller_budget(lengths, self._budget, sharing=sharing) if is_out_of_memory(error) else None
                if smaller is None or learner.version != version:
                    raise
                self._budget = smaller
            # Here, where the error no longer holds on to what the pass had computed.
            learner.forget_gradient()
            release_memory()

    def _packed(self, rows: Sequence[EncodedRow]) -> PackedBatch:
        return packed(rows, self._budget, self.learner.model.device, self.learner.stem_width)

"""The step that a plan is of: a batch as full as the settings allow, and one optimizer step on it, as the trainer makes it.

It is run with fake tensors (`trainer.planning.fake_run`), and by benchmarks and tests with real ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from trainer.data.packing import PackedBatch, pack
from trainer.data.rows import Row
from trainer.data.staleness import NOT_SAMPLED, Ages, StalenessTally
from trainer.model.roles import Roles
from trainer.planning.timeline import STEP
from trainer.planning.watch import Watch


def full_batch(roles: Roles, tokens: int, row: int | None = None, passes: int = 1) -> PackedBatch:
    """`passes` of `tokens` each, in rows of `row` (left out: one row a pass), all sampled but the first of each row."""
    length = max(2, tokens if row is None else min(row, tokens))
    rows = []
    for number in range(passes * max(1, tokens // length)):
        ages = np.zeros(length, dtype=np.int16)
        ages[0] = NOT_SAMPLED
        # No two rows begin alike: nothing is shared.
        ids = (np.arange(length, dtype=np.int32) + number) % 64
        column = np.ones(length, dtype=np.float32)
        of_critic = None if roles.critic is None else column
        rows.append(Row(ids, -column, Ages(ages, length), column, None, of_critic, of_critic))
    tally = StalenessTally(Counter({0: len(rows) * (length - 1)}), 0, len(rows))
    return pack(rows, tally, tokens, roles.learner.model.device, roles.learner.stem_width)


def run_step(roles: Roles, batch: PackedBatch, watch: Watch | None = None) -> None:
    """In the order of `trainer.model.train_batch`. `watch` is told what goes on."""
    learner, critic = roles.learner, roles.critic
    (proximal,) = learner.proximals([batch])
    learner.gradient(batch, proximal)
    if watch is not None:
        watch.holds("gradients", _gradients(learner.model))
    if critic is not None:
        critic.gradient(batch, learner.steps_made)
        if watch is not None:
            watch.holds("critic", _gradients(critic.model))
    if watch is not None:
        watch.begins(STEP)
    learner.apply()
    if watch is not None:
        watch.holds("optimizer", _state(learner.optimizer))
    if critic is not None:
        if watch is not None:
            watch.begins(f"critic's {STEP}")
        critic.apply()
        if watch is not None:
            watch.holds("critic", _state(critic.optimizer))


def _gradients(model: nn.Module) -> Iterator[Tensor]:
    return (weight.grad for weight in model.parameters() if weight.grad is not None)


def _state(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (each for state in optimizer.state.values() for each in state.values() if isinstance(each, Tensor))

"""Seconds of an optimizer step where what siblings have in common is computed once, beside the same step without.

round:  shared ─► whole rows        of one model, on one batch of groups of 8, one after the other
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace

from transformers import PreTrainedModel

from benchmarks.trainer.report import Measured
from benchmarks.trainer.step_speed import HeavyTail, as_groups, timed
from services.config.settings import TrainerSettings
from services.policies.batching import Group
from services.wire.trajectory import Trajectory
from trainer.data.packing import pack
from trainer.data.rows import rows_of
from trainer.model.learner import Learner
from trainer.sft.tiny_model import build_model

SHAPES = {"shared_prefix_time": (256, 64), "short_prefix_time": (64, 256)}
"""Tokens of a prompt and of an answer."""


async def measure_prefixes(
    rounds: int, threads: int, seed: int, say: Callable[[str], None], shapes: Mapping[str, tuple[int, int]] = SHAPES
) -> Measured:
    """`rounds` pairs of steps of each shape, after one that is not counted."""
    ratios: dict[str, list[float]] = {name: [] for name in shapes}
    for name, (prompt, answer) in shapes.items():
        tail = HeavyTail(prompt=prompt, median=answer, sigma=0.0, longest=answer)
        groups, model = as_groups(tail.answers(seed), tail.group_size), build_model(seed, hidden_size=128, layers=4)
        shared, whole = (timed(_step(copy.deepcopy(model), groups, shares=shares), threads) for shares in (True, False))
        for number in range(rounds + 1):
            took, otherwise = await shared(), await whole()
            if number:
                ratios[name].append(took / otherwise)
                say(f"{name} {number}: {took:.2f} s, whole rows {otherwise:.2f} s")
    return Measured(rounds=ratios)


def _step(model: PreTrainedModel, groups: list[Group[Trajectory]], *, shares: bool) -> Callable[[], None]:
    settings = TrainerSettings(warmup_steps=0)
    learner = Learner(model, settings)

    def step() -> None:
        rows, tally = rows_of(groups, learner.version, learner.version)
        batch = pack(rows, tally, settings.micro_batch_tokens, stem_width=learner.stem_width if shares else None)
        if not shares:
            whole = [replace(micro, row=replace(micro.row, needs=None)) for micro in batch.micro_batches]
            batch = replace(batch, micro_batches=whole)
        learner.step(batch)

    return step

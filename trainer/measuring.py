"""Measuring: what a model says of every sampled token of some trajectories, before they are trained on.

trajectories ──► rows ──► micro-batches ──model──► [N] in the order of the trajectories' segments
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from services.policies.token_budget import split_rows
from services.wire.trajectory import Segment, Trajectory
from trainer.advantages.scored import Float64Array
from trainer.packing import MicroBatch, micro_batch
from trainer.rows import Row, as_row
from trainer.window import StalenessTally, judge


@torch.no_grad()
def measure(
    trajectories: Sequence[Trajectory],
    model: Callable[[MicroBatch], Tensor],
    budget: int,
    device: torch.device,
) -> Float64Array:
    """`[N]`: what `model` says, one number a fresh token of a micro-batch, of every sampled token, whatever its age.

    `budget`: tokens of a micro-batch.
    """
    rows = [
        _row(segment, trajectory)
        for trajectory in trajectories
        for segment in trajectory.segments
        if segment.version_spans
    ]
    found: list[Float64Array] = [np.zeros(0) for _ in rows]
    for together in split_rows([len(row.token_ids) for row in rows], budget)[0]:
        said = model(micro_batch([rows[index] for index in together], device)).double().cpu().numpy()
        ends = np.cumsum([int((rows[index].ages.values >= 0).sum()) for index in together])
        for index, piece in zip(together, np.split(said, ends[:-1]), strict=True):
            found[index] = piece
    return np.concatenate(found) if found else np.zeros(0)


def _row(segment: Segment, trajectory: Trajectory) -> Row:
    newest = max(span.version for span in segment.version_spans)
    length = len(segment.loss_mask)
    everything = judge(segment.version_spans, length, newest, newest, StalenessTally())
    return as_row(segment, trajectory.samplings, everything, np.zeros(length, dtype=np.float32))

"""Training on one batch: advantages computed once, split by whole groups, one optimizer step a part.

    batch of U · n groups ──advantages──► parts of n groups ──mask, pack──► step from v ─► from v + 1 ─► … ─► v + U

Part i is judged for the step that it is consumed by, from v + i: staleness is counted in optimizer steps here too. All else
that a part depends on (advantages, values, the proximal policy) is of the batch, before its first step. A critic takes a
step beside each of the policy's. Deterministic: the same state and groups give the same bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from services.config.settings import RunSettings
from services.policies.batching import Group
from services.wire.run_metrics import CreditStatistics, TokenStatistics, ValueStatistics
from services.wire.trajectory import Trajectory
from trainer.data.packing import pack
from trainer.data.rows import rows_of
from trainer.data.staleness import StalenessTally
from trainer.model.roles import Roles

Part = Sequence[Group[Trajectory]]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One optimizer step. `version`: that it made; `rows`: segments that gave a gradient; `given advantages`: of the
    whole batch.

    `pack_s`: seconds of computing advantages and packing the batch, 0 but for its first step; `train_s`: of the step
    itself.
    """

    version: int
    groups: Part
    tally: StalenessTally
    rows: int
    learning_rate: float
    statistics: TokenStatistics
    credited: CreditStatistics
    valued: ValueStatistics
    pack_s: float
    train_s: float


def parts_of(groups: Part, updates: int) -> list[Part]:
    """`updates` parts of equally many groups, in their order. Raises ValueError where they cannot be."""
    size, left = divmod(len(groups), updates)
    if left or not size:
        raise ValueError(f"{len(groups)} groups do not make {updates} equal parts")
    return [groups[start : start + size] for start in range(0, len(groups), size)]


def train_batch(roles: Roles, settings: RunSettings, groups: Part, updates: int) -> list[Trained]:
    """Train on `groups` in `updates` optimizer steps; one result for each."""
    learner, critic, advantage_computer = roles.learner, roles.critic, roles.advantage_computer
    parts, version, began = parts_of(groups, updates), learner.version, time.perf_counter()
    credits, credited = advantage_computer.of(groups)
    judged = [
        rows_of(part, version + number, settings.k, credits, skip_idle=roles.skips_idle)
        for number, part in enumerate(parts)
    ]
    packed = [pack(rows, tally, settings.trainer.micro_batch_tokens, learner.model.device) for rows, tally in judged]
    ready = time.perf_counter()
    pack_s, trained = ready - began, []
    steps = learner.steps(packed)
    for part, (rows, tally), batch in zip(parts, judged, packed, strict=True):
        rate = learner.learning_rate(learner.version)
        statistics = next(steps)
        valued = ValueStatistics() if critic is None else critic.step(batch)
        ended = time.perf_counter()
        trained.append(
            Trained(
                version=learner.version,
                groups=part,
                tally=tally,
                rows=len(rows),
                learning_rate=rate,
                statistics=statistics,
                credited=credited,
                valued=valued,
                pack_s=pack_s,
                train_s=ended - ready,
            )
        )
        pack_s, ready = 0.0, ended
    advantage_computer.learn(groups)
    return trained

"""Training on one batch: advantages computed once, split by whole groups, an optimizer step for each part and epoch.

    batch of M · n groups ──advantages──► M parts of n groups ──mask, pack──► step from v ─► from v + 1 ─► … ─► v + M
                                               │                                                             │
                                               └── the same parts once more for each further epoch ──────────┴─► v + M · E

A part is judged for each step that it is consumed by: staleness is counted in optimizer steps here too, so tokens may leave
the loss from one epoch to the next. All else that a part depends on (advantages, values, the proximal policy) is of the
batch, before its first step. A critic takes a step beside each of the policy's. The same state, settings and groups give
the same bytes where the kernels do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import structlog

from services.config.settings import RunSettings, TrainerSettings
from services.policies.batching import Group
from services.policies.token_budget import smaller_budget
from services.wire.packed import Float32Array
from services.wire.run_metrics import CreditStatistics, DeviceUse, TokenStatistics, ValueStatistics
from services.wire.trajectory import Trajectory
from trainer.algorithms.advantages.batch import Int64Array
from trainer.algorithms.advantages.compute import BatchCredits
from trainer.algorithms.advantages.rewards import Batch
from trainer.data.packing import PackedBatch, share_out
from trainer.data.rows import rows_of
from trainer.data.staleness import StalenessTally
from trainer.model.anomaly import AnomalyError, is_out_of_memory, release_memory
from trainer.model.logprobs import measure_passes
from trainer.model.roles import Roles
from trainer.parallel.orders import Measure, Part, Train, part_of, rows_of_passes, tell_shares
from trainer.parallel.ranks import meeting

_log = structlog.get_logger()

Groups = Sequence[Group[Trajectory]]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """One optimizer step, number `step` of the run. `version`: that it made; `epoch`: from 1; `rows`: segments that gave a
    gradient; `credited`: of the whole batch; `packed_ahead`: the batch came prepared.

    `credits`: of the part that was trained on; `logprobs`, `sources`: of each share of the ranks, the policy's logprobs
    before the step (`Learner.sampled_logprobs`), and the segments of the part that they are of; without any unless kept.

    `pack_s`: seconds that the training thread took to compute advantages and pack the batch, 0 but for its first step, and
    where that was done ahead; `train_s`: of the step itself. `used`: of memory and arithmetic.
    """

    step: int
    version: int
    epoch: int
    batch: Batch
    tally: StalenessTally
    rows: int
    learning_rate: float
    statistics: TokenStatistics
    credited: CreditStatistics
    valued: ValueStatistics
    pack_s: float
    train_s: float
    used: DeviceUse
    credits: BatchCredits
    logprobs: Sequence[Float32Array]
    sources: Sequence[Int64Array]
    packed_ahead: bool = False

    @property
    def groups(self) -> Groups:
        return self.batch.groups


def parts_of(groups: Groups, minibatches: int) -> list[Groups]:
    """`minibatches` parts of equally many groups, in their order. Raises ValueError where they cannot be."""
    size, left = divmod(len(groups), minibatches)
    if left or not size:
        raise ValueError(f"{len(groups)} groups do not make {minibatches} equal parts")
    return [groups[start : start + size] for start in range(0, len(groups), size)]


@dataclass(frozen=True, kw_only=True)
class PreparedBatch:
    """A batch of `groups`, laid out for its optimizer steps from `version` under `settings`."""

    settings: RunSettings
    groups: Groups
    version: int
    steps: list[PreparedStep]
    credited: CreditStatistics

    def is_for(self, settings: RunSettings, groups: Groups, version: int) -> bool:
        return self.settings is settings and self.groups is groups and self.version == version


@dataclass(frozen=True, kw_only=True)
class PreparedStep:
    """`epoch`: from 1; `part`: of the batch; `rows`: segments that give a gradient; `sources`: which of the part's, in the
    order of each share's passes."""

    epoch: int
    part: Batch
    credits: BatchCredits
    tally: StalenessTally
    rows: int
    packed: PackedBatch
    sources: list[Int64Array]
    orders: list[Part]
    """What other ranks train on, by their share of the rows; empty where there is one rank."""


def prepare(roles: Roles, settings: RunSettings, groups: Groups, updates: int, version: int) -> PreparedBatch:
    """Compute the advantages of `groups`, and pack them for `updates` optimizer steps from `version`.

    Where `roles.prepares_ahead`, also on another thread, while steps before `version` are made.
    """
    learner, ranks, shape = roles.learner, roles.ranks, settings.trainer.shape.of(updates)
    parts = parts_of(groups, shape.minibatches)
    credits, credited = roles.advantage_computer.of(groups, version)
    of_parts = [credits.part(part) for part in parts]
    budget, device, steps = settings.trainer.micro_batch_tokens, learner.model.device, []
    for number, (epoch, place) in enumerate(shape.places()):
        of_part = of_parts[place]
        rows, tally = rows_of(parts[place], version + number, settings.k, of_part, skip_idle=roles.skips_idle)
        tally.since_taken = number
        shared = share_out(rows, tally, budget, learner.stem_width, ranks.layout.shares)
        packed = shared.packed(ranks.share, device, learner.stem_width)
        orders = [part_of(shared, share) for share in range(ranks.layout.shares)] if ranks.several else []
        sources = shared.sources if learner.keeps_logprobs else []
        steps.append(
            PreparedStep(
                epoch=epoch,
                part=of_part.batch,
                credits=of_part,
                tally=tally,
                rows=len(rows),
                packed=packed,
                sources=sources,
                orders=orders,
            )
        )
    return PreparedBatch(settings=settings, groups=groups, version=version, steps=steps, credited=credited)


def train_batch(
    roles: Roles, settings: RunSettings, groups: Groups, updates: int, made: int | None = None
) -> list[Trained]:
    """Train on `groups` in `updates` optimizer steps, those of all epochs; one result for each.

    `made`: only so many of them, where an earlier time came no further. Raises AnomalyError for a step whose loss or
    gradient is not finite; those before it are made. Raises ValueError where the steps make no whole epochs, or the groups
    no equal parts.
    """
    steps = list(_steps(roles, settings, groups, updates, made=made))
    if len(steps) == updates:
        roles.advantage_computer.learn(groups)
    return steps


@dataclass(frozen=True)
class Tried:
    """What became of a batch: `steps` that were made, in passes of `micro_batch_tokens`; what kept it from the rest."""

    steps: list[Trained]
    micro_batch_tokens: int
    anomaly: AnomalyError | None = None


def try_batch(
    roles: Roles, settings: RunSettings, groups: Groups, updates: int, prepared: PreparedBatch | None = None
) -> Tried:
    """`train_batch`, in smaller passes where memory runs out before the first step: half the tokens each time, down to one
    row. Where it runs out even so, or after a step, its error is raised: the weights are no longer those of before.

    `prepared`: of these groups, taken where it is for the learner's version and these settings.
    """
    version = roles.learner.version
    while True:
        tokens, steps = settings.trainer.micro_batch_tokens, list[Trained]()
        try:
            for step in _steps(roles, settings, groups, updates, prepared):
                steps.append(step)
            roles.advantage_computer.learn(groups)
            return Tried(steps, tokens)
        except AnomalyError as anomaly:
            roles.forget_gradients()
            return Tried(steps, tokens, anomaly)
        except Exception as error:
            sharing = roles.learner.stem_width is not None
            # One of several ranks has no way to call the others back from the pass.
            again = is_out_of_memory(error) and not roles.ranks.several
            smaller = smaller_budget(_lengths(groups), tokens, sharing=sharing) if again else None
            if smaller is None or roles.learner.version != version:
                raise
            _log.warning("memory ran out: smaller passes", micro_batch_tokens=smaller, before=tokens, why=str(error))
        # Here, where the error no longer holds on to what the pass had computed.
        roles.forget_gradients()
        release_memory()
        trainer = settings.trainer.model_copy(update={"micro_batch_tokens": smaller})
        settings = settings.model_copy(update={"trainer": trainer})


def _lengths(groups: Groups) -> list[int]:
    """Tokens of each segment up to its last sampled one, at the least what a pass computes of it."""
    segments = (segment for group in groups for one in group.members for segment in one.payload.segments)
    return [max(1, len(segment.loss_mask.rstrip(b"\0")) - 1) for segment in segments]


def _steps(
    roles: Roles,
    settings: RunSettings,
    groups: Groups,
    updates: int,
    prepared: PreparedBatch | None = None,
    made: int | None = None,
) -> Iterator[Trained]:
    if made == 0:
        return
    roles.use(settings.trainer, settings.steps)
    learner, ranks, began = roles.learner, roles.ranks, time.perf_counter()
    ahead = prepared is not None and prepared.is_for(settings, groups, learner.version)
    if prepared is None or not ahead:
        prepared = prepare(roles, settings, groups, updates, learner.version)
    steps, minibatches = prepared.steps[:made], settings.trainer.shape.of(updates).minibatches
    if ranks.several:
        told = settings.trainer.model_dump_json().encode()
        at = (learner.version, learner.skipped)
        tell_shares(
            ranks, lambda share: Train(*at, [step.orders[share] for step in steps], told, settings.steps, minibatches)
        )
    ready = time.perf_counter()
    pack_s = ready - began
    making = _make(roles, [step.packed for step in steps], minibatches)
    for step in steps:
        rate = learner.learning_rate(learner.steps_made)
        statistics, valued = next(making)
        ended = time.perf_counter()
        yield Trained(
            step=learner.steps_made,
            version=learner.version,
            epoch=step.epoch,
            batch=step.part,
            tally=step.tally,
            rows=step.rows,
            learning_rate=rate,
            statistics=statistics,
            credited=prepared.credited,
            valued=valued,
            pack_s=pack_s,
            train_s=ended - ready,
            used=learner.gauge.read(step.packed, ended - ready),
            credits=step.credits,
            logprobs=learner.sampled_logprobs,
            sources=step.sources,
            packed_ahead=ahead,
        )
        pack_s, ready = 0.0, time.perf_counter()


def _make(
    roles: Roles, batch: Sequence[PackedBatch], minibatches: int
) -> Iterator[tuple[TokenStatistics, ValueStatistics]]:
    """The optimizer steps of a batch, on each rank with its own passes. Raises AnomalyError on all ranks alike."""
    learner, critic = roles.learner, roles.critic
    with meeting():
        proximals = learner.proximals(batch, minibatches)
    for packed, proximal in zip(batch, proximals, strict=True):
        with meeting():
            statistics = learner.gradient(packed, proximal)
            # Both gradients before either step: one that is not finite keeps the other from being made, too.
            valued = ValueStatistics() if critic is None else critic.gradient(packed, learner.steps_made)
            learner.apply()
            if critic is not None:
                critic.apply()
        yield statistics, valued


def follow(roles: Roles, order: Train | Measure) -> None:
    """Do this rank's part of an order of rank 0."""
    learner, ranks = roles.learner, roles.ranks
    if isinstance(order, Measure):
        passes = rows_of_passes(order.passes)
        if order.model == "critic":
            assert roles.critic is not None
            measure_passes(passes, roles.critic.model, ranks)
        else:
            assert learner.reference is not None
            with learner.reference.within():
                measure_passes(passes, learner.reference.logprobs, ranks)
        return
    roles.use(TrainerSettings.model_validate_json(order.settings), order.run_steps)
    learner.version, learner.skipped = order.version, order.skipped
    batch = [part.packed(learner.model.device, learner.stem_width) for part in order.parts]
    try:
        for _ in _make(roles, batch, order.minibatches):
            pass
    except AnomalyError:
        # Rank 0 has seen the same, and says what becomes of the batch.
        roles.forget_gradients()

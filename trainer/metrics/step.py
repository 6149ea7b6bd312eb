"""What is measured at each optimizer step: one flat line of metrics.jsonl."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from services.policies.batching import Group
from services.policies.length_stats import Lengths
from services.wire.trajectory import Trajectory
from trainer.algorithms.advantages.compute import CreditStatistics
from trainer.data.staleness import StalenessTally
from trainer.data.stream_reader import Arrivals
from trainer.model.critic import ValueStatistics
from trainer.model.token_stats import TokenStatistics


@dataclass(frozen=True, kw_only=True)
class BatchOutcome:
    """What the environments said of a batch."""

    groups: int
    trajectories: int
    reward: float
    success: float
    """Mean of the reward component `success`; of `reward > 0` where an environment has none."""
    response_length: float
    """Mean number of sampled tokens a trajectory."""
    response_lengths: dict[str, int]
    """How many trajectories sampled so many tokens, by bucket (`services.policies.length_stats`)."""
    lost_siblings: int
    """Trajectories that its groups are trained without: they expired, were aborted, or their agents failed."""
    mixed_segments: int
    """Segments in which a weight commit fell between two sampled tokens of one answer or of two turns."""
    first_opened_at: float
    """Unix seconds: when the first of its groups was opened."""


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Milliseconds. The first four are the training thread's, and make up nearly all of `step_ms`."""

    wait_ms: float
    """For a batch."""
    pack_ms: float
    train_ms: float
    publish_ms: float
    """Cast, hash, and waiting for an arena to be free."""
    step_ms: float
    stream_ms: float
    """Background: reading, decoding and settling entries since the line before."""
    http_ms: float
    """Background: what the trainer's last call to the weight bus took beyond the update itself."""
    commit_ms: float
    """From publish to commit at every engine, of the update that settled last; 0 where it was superseded."""
    stage_ms: float
    """Of the slowest engine, same update."""
    flip_ms: float


@dataclass(frozen=True, kw_only=True)
class StepMetrics(TokenStatistics, CreditStatistics, ValueStatistics, BatchOutcome, StepTimes):
    """`step` counts from 1; `version` is the policy version that it made. It consumed tokens for `version − 1`.

    Since the line before, `arrived` trajectories fit to be trained came of the stream, with `arrived_length` sampled tokens
    in the mean (0 where none came), and `dropped` ones will never be trained, by cause.

    `tokens`: fresh sampled tokens, the loss's denominator; `masked_tokens`: those over K. `rows_trained`: segments that
    gave a gradient. `update_version`, `update_state`: the weight update that settled last before this line. `commits`:
    updates that engines have committed so far, the first version not counted.
    """

    step: int
    version: int
    time: float
    """Unix seconds, at the end of the step."""
    rows_trained: int
    tokens: int
    tokens_per_s: float
    """Sampled tokens of the batch over the whole step, waiting included."""
    staleness_mean: float
    staleness_max: int
    staleness_histogram: dict[str, int]
    masked_tokens: int
    masked_fraction: float
    arrived: int
    arrived_length: float
    dropped: dict[str, int]
    learning_rate: float
    commits: int
    update_version: int | None
    update_state: str | None


def outcome(groups: Sequence[Group[Trajectory]]) -> BatchOutcome:
    trajectories = [member.payload for group in groups for member in group.members]
    count = len(trajectories)
    sampled = [trajectory.sampled_tokens() for trajectory in trajectories]
    lengths = Lengths.of(Counter(sampled))
    return BatchOutcome(
        groups=len(groups),
        trajectories=count,
        reward=sum(trajectory.reward for trajectory in trajectories) / count,
        success=sum(_success(trajectory) for trajectory in trajectories) / count,
        response_length=sum(sampled) / count,
        response_lengths={str(bucket): count for bucket, count in sorted(lengths.buckets.items())},
        lost_siblings=sum(group.lost for group in groups),
        mixed_segments=sum(
            len({span.version for span in segment.version_spans}) > 1
            for trajectory in trajectories
            for segment in trajectory.segments
        ),
        first_opened_at=min(trajectory.opened_at for trajectory in trajectories),
    )


def step_metrics(
    *,
    version: int,
    now: float,
    batch: BatchOutcome,
    tally: StalenessTally,
    rows_trained: int,
    learning_rate: float,
    statistics: TokenStatistics,
    credited: CreditStatistics,
    valued: ValueStatistics,
    times: StepTimes,
    arrivals: Arrivals,
    commits: int,
    update: tuple[int, str] | None,
) -> StepMetrics:
    return StepMetrics(
        **vars(batch),
        **vars(statistics),
        **vars(credited),
        **vars(valued),
        **vars(times),
        step=version,
        version=version,
        time=now,
        rows_trained=rows_trained,
        tokens=tally.fresh,
        tokens_per_s=batch.response_length * batch.trajectories / max(1e-6, times.step_ms / 1000),
        staleness_mean=tally.mean,
        staleness_max=tally.largest,
        staleness_histogram={str(age): count for age, count in sorted(tally.histogram.items())},
        masked_tokens=tally.masked,
        masked_fraction=tally.masked_fraction,
        arrived=arrivals.trajectories,
        arrived_length=arrivals.tokens / max(1, arrivals.trajectories),
        dropped=dict(sorted(arrivals.dropped.items())),
        learning_rate=learning_rate,
        commits=commits,
        update_version=None if update is None else update[0],
        update_state=None if update is None else update[1],
    )


def _success(trajectory: Trajectory) -> float:
    return trajectory.reward_components.get("success", float(trajectory.reward > 0))

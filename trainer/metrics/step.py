"""Builds the metrics of an optimizer step, a line of metrics.jsonl, out of what the parts of the step measured."""

from __future__ import annotations

from collections import Counter

from services.policies.length_stats import Lengths
from services.wire import run_metrics
from trainer.algorithms.advantages.rewards import Batch
from trainer.data.staleness import StalenessTally
from trainer.data.tally import Arrivals


def outcome(batch: Batch) -> run_metrics.BatchOutcome:
    groups, trajectories, sampled = batch.groups, batch.trajectories, batch.lengths.tolist()
    count = len(trajectories)
    solved = [one.reward_components.get("success", float(one.reward > 0)) for one in trajectories]
    lengths = Lengths.of(Counter(sampled))
    return run_metrics.BatchOutcome(
        groups=len(groups),
        trajectories=count,
        reward=sum(trajectory.reward for trajectory in trajectories) / count,
        success=sum(solved) / count,
        response_length=sum(sampled) / count,
        response_lengths={str(bucket): count for bucket, count in sorted(lengths.buckets.items())},
        lost_siblings=sum(group.lost for group in groups),
        mixed_segments=batch.segments.of_several_versions(),
        first_opened_at=min(trajectory.opened_at for trajectory in trajectories),
    )


def step_metrics(
    *,
    step: int,
    version: int,
    epoch: int,
    packed_ahead: bool,
    now: float,
    batch: run_metrics.BatchOutcome,
    tally: StalenessTally,
    rows_trained: int,
    learning_rate: float,
    statistics: run_metrics.TokenStatistics,
    credited: run_metrics.CreditStatistics,
    valued: run_metrics.ValueStatistics,
    times: run_metrics.StepTimes,
    arrivals: Arrivals,
    commits: int,
    update: tuple[int, str] | None,
) -> run_metrics.StepMetrics:
    return run_metrics.StepMetrics(
        **vars(batch),
        **vars(statistics),
        **vars(credited),
        **vars(valued),
        **vars(times),
        step=step,
        version=version,
        epoch=epoch,
        packed_ahead=packed_ahead,
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

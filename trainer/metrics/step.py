"""Builds the metrics of an optimizer step, a line of metrics.jsonl, out of what the parts of the step measured."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from statistics import fmean

import numpy as np

from services.policies.length_stats import Lengths
from services.wire import run_metrics
from services.wire.trajectory import Trajectory
from trainer.algorithms.advantages.rewards import Batch, success_of
from trainer.data.staleness import StalenessTally
from trainer.data.tally import Arrivals


def outcome(batch: Batch, unknown_token: int | None = None) -> run_metrics.BatchOutcome:
    """`unknown_token`: what the tokenizer puts for text that its vocabulary has not; None where there is no such text."""
    groups, trajectories, sampled = batch.groups, batch.trajectories, batch.lengths.tolist()
    count = len(trajectories)
    solved = [success_of(one) for one in trajectories]
    lengths = Lengths.of(Counter(sampled))
    rewards = [one.reward for one in trajectories]
    segments = batch.segments
    said = segments.logprobs[segments.places]
    # None of those that were sampled: a policy may say whatever it likes.
    unknown = 0
    if unknown_token is not None:
        found = segments.token_ids == unknown_token
        unknown = int(np.count_nonzero(found) - np.count_nonzero(found[segments.places]))
    return run_metrics.BatchOutcome(
        groups=len(groups),
        trajectories=count,
        reward=sum(rewards) / count,
        success=sum(solved) / count,
        response_length=sum(sampled) / count,
        response_lengths={str(bucket): count for bucket, count in sorted(lengths.buckets.items())},
        lost_siblings=sum(group.lost for group in groups),
        mixed_segments=batch.segments.of_several_versions(),
        first_opened_at=min(trajectory.opened_at for trajectory in trajectories),
        reward_spread=float(np.std(rewards)),
        components=_components(trajectories),
        equal_groups=sum(len({each.payload.reward for each in group.members}) == 1 for group in groups) / len(groups),
        truncated=sum(one.finish_reason == "length" for one in trajectories) / count,
        entropy=-float(said.mean(dtype=np.float64)) if len(said) else None,
        unknown_tokens=unknown,
        unrendered_tools=sum(one.unrendered_tools for one in trajectories),
        tasks=_tasks(batch, solved, sampled),
    )


def _tasks(batch: Batch, solved: Sequence[float], sampled: Sequence[int]) -> dict[str, run_metrics.TaskOutcome]:
    of = defaultdict[str, list[int]](list)
    for place, one in enumerate(batch.trajectories):
        of[one.task].append(place)
    return {
        task: run_metrics.TaskOutcome(
            groups=len({int(batch.group[place]) for place in places}),
            trajectories=len(places),
            reward=fmean(batch.trajectories[place].reward for place in places),
            success=fmean(solved[place] for place in places),
            response_length=fmean(sampled[place] for place in places),
            skipped=_mean_or_none(
                [batch.trajectories[place].reward_components.get(run_metrics.SKIPPED) for place in places]
            ),
        )
        for task, places in sorted(of.items())
    }


def over_steps(lines: Sequence[run_metrics.StepMetrics]) -> dict[str, run_metrics.TaskOutcome]:
    """What tasks have been worth over several steps."""
    found = defaultdict[str, list[run_metrics.TaskOutcome]](list)
    for line in lines:
        for task, one in line.tasks.items():
            found[task].append(one)
    return {task: _summed(outcomes) for task, outcomes in sorted(found.items())}


def _summed(outcomes: Sequence[run_metrics.TaskOutcome]) -> run_metrics.TaskOutcome:
    count = sum(one.trajectories for one in outcomes)
    return run_metrics.TaskOutcome(
        groups=sum(one.groups for one in outcomes),
        trajectories=count,
        reward=sum(one.reward * one.trajectories for one in outcomes) / count,
        success=sum(one.success * one.trajectories for one in outcomes) / count,
        response_length=sum(one.response_length * one.trajectories for one in outcomes) / count,
        skipped=outcomes[-1].skipped,
    )


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    """Of those that there are."""
    there = [value for value in values if value is not None]
    return fmean(there) if there else None


def _components(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    found = defaultdict[str, list[float]](list)
    for one in trajectories:
        for name, value in one.reward_components.items():
            found[name].append(value)
    return {name: fmean(values) for name, values in sorted(found.items())}


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
    used: run_metrics.DeviceUse,
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
        **vars(used),
        step=step,
        version=version,
        epoch=epoch,
        packed_ahead=packed_ahead,
        time=now,
        rows_trained=rows_trained,
        tokens=tally.fresh,
        tokens_per_s=batch.response_length * batch.trajectories / max(1e-6, times.step_ms / 1000),
        staleness_mean=tally.mean,
        staleness_generation=tally.while_generated,
        staleness_queue=tally.while_queued,
        staleness_training=tally.while_trained,
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

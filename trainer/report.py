"""trainer_report.json: what the trainer says of a whole run, read off metrics.jsonl so that restarts lose nothing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from services.host.files import writing
from services.policies.length_stats import Lengths, distance
from trainer.metrics import StepMetrics


class LengthReport(msgspec.Struct, frozen=True):
    """A distribution of sampled tokens an episode; `buckets` are named by their least length."""

    episodes: int
    mean: float | None
    buckets: dict[str, int]


class TrainerReport(msgspec.Struct, frozen=True, kw_only=True):
    """Times are Unix seconds, at the end of a step. Staleness is over tokens that entered a loss."""

    run_id: str
    formula: str
    steps: int
    final_version: int
    first_group_opened_at: float | None
    first_step_at: float | None
    last_step_at: float | None
    tokens_trained: int
    trajectories_trained: int
    max_staleness: int
    mean_staleness: float
    masked_fraction: float
    logprob_gap_mean: float | None
    """Mean |engine − trainer| over tokens of the current version, weighed by tokens (`trainer.step_sums`)."""
    logprob_gap_max: float | None
    weights_digest_match: bool
    root_digest: str | None
    mixed_segments: int
    """Segments whose sampled tokens were drawn by more than one policy version."""
    commits: int
    """Weight updates that engines committed, the first version not counted."""
    reward_first: float | None
    reward_last: float | None
    success_first: float | None
    success_last: float | None
    length_first: float | None
    length_last: float | None
    lengths_generated: LengthReport
    """Of all sessions that were published or given up: what a session that expired had drawn by then counts."""
    lengths_trained: LengthReport
    length_distance: float | None
    """Between the two (`services.policies.length_stats.distance`): 0 where what is trained is what was drawn."""
    lost_siblings: int
    """Trajectories that groups were trained without."""
    dropped: dict[str, int]
    """Published trajectories that were never trained, by cause."""


def make_report(
    lines: Sequence[StepMetrics],
    *,
    run_id: str,
    formula: str,
    final_version: int,
    digest_match: bool,
    root_digest: str | None,
    commits: int,
    generated: Lengths,
    dropped: Mapping[str, int],
) -> TrainerReport:
    tokens = sum(line.tokens for line in lines)
    masked = sum(line.masked_tokens for line in lines)
    gaps = [(line.logprob_gap_mean, line.gap_tokens) for line in lines]
    measured = [(gap, count) for gap, count in gaps if gap is not None]
    largest = [line.logprob_gap_max for line in lines if line.logprob_gap_max is not None]
    trained = trained_lengths(lines)
    first, last = (lines[0] if lines else None), (lines[-1] if lines else None)
    return TrainerReport(
        run_id=run_id,
        formula=formula,
        steps=len(lines),
        final_version=final_version,
        first_group_opened_at=min((line.first_opened_at for line in lines), default=None),
        first_step_at=None if first is None else first.time,
        last_step_at=None if last is None else last.time,
        tokens_trained=tokens,
        trajectories_trained=sum(line.trajectories for line in lines),
        max_staleness=max((line.staleness_max for line in lines), default=0),
        mean_staleness=sum(line.staleness_mean * line.tokens for line in lines) / max(1, tokens),
        masked_fraction=masked / max(1, masked + tokens),
        logprob_gap_mean=sum(gap * n for gap, n in measured) / sum(n for _, n in measured) if measured else None,
        logprob_gap_max=max(largest, default=None),
        weights_digest_match=digest_match,
        root_digest=root_digest,
        mixed_segments=sum(line.mixed_segments for line in lines),
        commits=commits,
        reward_first=None if first is None else first.reward,
        reward_last=None if last is None else last.reward,
        success_first=None if first is None else first.success,
        success_last=None if last is None else last.success,
        length_first=None if first is None else first.response_length,
        length_last=None if last is None else last.response_length,
        lengths_generated=_report(generated),
        lengths_trained=_report(trained),
        length_distance=distance(generated, trained),
        lost_siblings=sum(line.lost_siblings for line in lines),
        dropped=dict(dropped),
    )


def trained_lengths(lines: Sequence[StepMetrics]) -> Lengths:
    """Of all that was trained."""
    buckets: Counter[int] = Counter()
    for line in lines:
        buckets.update({int(bucket): count for bucket, count in line.response_lengths.items()})
    return Lengths(buckets, sum(round(line.response_length * line.trajectories) for line in lines))


def _report(lengths: Lengths) -> LengthReport:
    buckets = {str(bucket): count for bucket, count in sorted(lengths.buckets.items())}
    return LengthReport(lengths.count, lengths.mean, buckets)


def write_report(path: Path, report: TrainerReport) -> None:
    """Write it whole or not at all. Raises UsageError on a full disk."""
    making = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        making.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
        making.replace(path)

"""Metrics files of a run: metrics.jsonl, trainer_report.json, curves.png.

The first is appended to at each step: a torn last line is cut off, no step is written twice.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from io import BufferedRandom
from pathlib import Path

import msgspec
import structlog

from services.host.files import writing
from services.policies.length_stats import Lengths, distance
from services.wire.rollout_api import Evaluation
from services.wire.run_metrics import (
    LengthReport,
    StepMetrics,
    TrainerReport,
    decode_step_metrics,
)


class _Numbered(msgspec.Struct):
    """What even a line that lacks a figure says."""

    step: int


_log = structlog.get_logger()
_numbered = msgspec.json.Decoder(_Numbered)
_encoder = msgspec.json.Encoder()


def read_metrics(path: Path) -> list[StepMetrics]:
    """The lines of metrics.jsonl in order; a torn last one is left out, and so are those that cannot be read."""
    lines = [decode_step_metrics(line) for line in _whole_lines(path)]
    readable = [line for line in lines if line is not None]
    if len(readable) < len(lines):
        _log.warning("lines that cannot be read are left out", file=str(path), lines=len(lines) - len(readable))
    return readable


def _whole_lines(path: Path) -> list[bytes]:
    content = path.read_bytes() if path.exists() else b""
    return [line for line in content[: content.rfind(b"\n") + 1].splitlines() if line]


def _step_of(line: bytes) -> int | None:
    try:
        return _numbered.decode(line).step
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


class RunRecords:
    """Appends to metrics.jsonl. `steps`: those that it holds; they are not written again by a restarted trainer."""

    def __init__(self, metrics: Path) -> None:
        self.steps = {step for step in map(_step_of, _whole_lines(metrics)) if step is not None}
        self._path = metrics
        self._metrics = _open_at_last_line(metrics)

    def write(self, metrics: StepMetrics) -> None:
        """One step's line. A step that is there already is left alone. Raises UsageError on a full disk."""
        if metrics.step in self.steps:
            return
        self.steps.add(metrics.step)
        with writing(self._path):
            self._metrics.write(_encoder.encode(metrics) + b"\n")
            self._metrics.flush()

    def flush(self) -> None:
        """Everything written so far is in the file when this returns."""
        self._metrics.flush()

    def close(self) -> None:
        self._metrics.close()


def _open_at_last_line(path: Path) -> BufferedRandom:
    path.touch()
    file = path.open("r+b")
    content = file.read()
    file.truncate(content.rfind(b"\n") + 1)
    file.seek(0, 2)
    return file


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
    """Of a whole run, from the lines of metrics.jsonl, so that restarts lose nothing."""
    tokens = sum(line.tokens for line in lines)
    masked = sum(line.masked_tokens for line in lines)
    gaps = [(line.logprob_gap_mean, line.gap_tokens) for line in lines]
    measured = [(gap, count) for gap, count in gaps if gap is not None and count]
    largest = [line.logprob_gap_max for line in lines if line.logprob_gap_max is not None]
    trained, once = trained_lengths(lines), first_epochs(lines)
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
        trajectories_trained=sum(line.trajectories for line in once),
        max_staleness=max((line.staleness_max for line in lines), default=0),
        mean_staleness=sum(line.staleness_mean * line.tokens for line in lines) / max(1, tokens),
        masked_fraction=masked / max(1, masked + tokens),
        logprob_gap_mean=sum(gap * n for gap, n in measured) / sum(n for _, n in measured) if measured else None,
        logprob_gap_max=max(largest, default=None),
        weights_digest_match=digest_match,
        root_digest=root_digest,
        mixed_segments=sum(line.mixed_segments for line in once),
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
        lost_siblings=sum(line.lost_siblings for line in once),
        dropped=dict(dropped),
        warnings=dict(sorted(Counter(kind for line in lines for kind in line.warnings).items())),
    )


def first_epochs(lines: Sequence[StepMetrics]) -> list[StepMetrics]:
    """The lines that each trajectory is in once."""
    return [line for line in lines if line.epoch == 1]


def trained_lengths(lines: Sequence[StepMetrics]) -> Lengths:
    """Of all that was trained, once each."""
    buckets: Counter[int] = Counter()
    lines = first_epochs(lines)
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


def plot_curves(
    lines: Sequence[StepMetrics], generated: Lengths, path: Path, evaluations: Sequence[Evaluation] = ()
) -> None:
    """Plot a run's steps. `generated`: lengths of all answers, shown beside those that were trained.

    matplotlib is imported here: it takes a second, and nobody should wait for it before a run.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [line.step for line in lines]
    taught = [line for line in lines if line.teacher_kl is not None]
    size = {"ncols": 4, "figsize": (18, 6)} if taught else {"ncols": 3, "figsize": (14, 6)}
    figure, axes = pyplot.subplots(nrows=2, layout="constrained", **size)
    success, length, shares, staleness, times, left_out, *of_teacher = axes.flat
    names = sorted({name for line in lines for name in line.tasks})
    success.plot(steps, [line.success for line in lines], label="all tasks" if len(names) > 1 else None)
    for name in names if len(names) > 1 else []:
        there = [line for line in lines if name in line.tasks]
        success.plot([line.step for line in there], [line.tasks[name].success for line in there], ":", label=name)
    if len(names) > 1:
        success.legend()
    if evaluations:
        below = [max(0.0, each.success - each.low) for each in evaluations]
        above = [max(0.0, each.high - each.success) for each in evaluations]
        found = [each.success for each in evaluations]
        at = [each.due for each in evaluations]
        success.errorbar(at, found, yerr=(below, above), fmt="o", capsize=3, label="held out, 95 %")
        success.legend()
    success.set(title="success of the batch", ylim=(0, 1.02))
    length.plot(steps, [line.response_length for line in lines], label="trained")
    came = [line for line in lines if line.arrived]
    length.plot([line.step for line in came], [line.arrived_length for line in came], label="arrived", linestyle=":")
    length.set(title="response length, tokens", ylim=(0, None))
    length.legend()
    trained = trained_lengths(lines)
    buckets = sorted(generated.buckets.keys() | trained.buckets.keys())
    for name, lengths, style in (("generated", generated, ":"), ("trained", trained, "-")):
        shares.step(buckets, [lengths.up_to(bucket) for bucket in buckets], style, where="post", label=name)
    shares.set(title="share of episodes up to so many tokens", ylim=(0, 1.02))
    shares.legend()
    staleness.plot(steps, [line.staleness_mean for line in lines], label="mean")
    staleness.plot(steps, [line.staleness_max for line in lines], label="max", linestyle=":")
    staleness.set(title="staleness of trained tokens, steps", xlabel="optimizer step")
    staleness.legend()
    bottom = [0.0] * len(lines)
    for part in ("train", "publish", "wait"):
        values = [getattr(line, f"{part}_ms") for line in lines]
        times.bar(steps, values, bottom=bottom, width=1.0, label=part)
        bottom = [below + value for below, value in zip(bottom, values, strict=True)]
    times.set(title="time of a step, ms", xlabel="optimizer step")
    times.legend()
    left_out.plot(steps, [line.masked_fraction for line in lines], label="tokens over K, share")
    fates = [(line.arrived + sum(line.dropped.values()), sum(line.dropped.values())) for line in lines]
    left_out.plot(steps, [dropped / max(1, came) for came, dropped in fates], label="dropped, share", linestyle=":")
    left_out.set(title="what is not trained", xlabel="optimizer step", ylim=(0, None))
    left_out.legend()
    for panel, name, title in zip(
        of_teacher,
        ("teacher_kl", "entropy"),
        ("reverse KL to the teacher, nats a token", "entropy of the policy, nats a token"),
        strict=False,
    ):
        panel.plot([line.step for line in taught], [getattr(line, name) for line in taught])
        panel.set(title=title, xlabel="optimizer step")
    with writing(path):
        figure.savefig(path, dpi=110)
    pyplot.close(figure)

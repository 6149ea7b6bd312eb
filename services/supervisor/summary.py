"""Run summary (`summary.json`), from the reports of trainer, environment, engines and ledger."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import msgspec

from services.config.settings import RunSettings
from services.host.files import LineTail, end_of, write_whole
from services.host.run_folder import RunFolder
from services.observability.terminal import as_text
from services.policies.diagnosis.logs import LOG_BYTES, of_logs
from services.policies.training.evaluation import interval, ks_of, pass_at, point_of, success_of
from services.run_store.ledger import Accounts
from services.wire.errors import UNDECODABLE, WireError
from services.wire.rollout_api import EngineReport, Evaluation
from services.wire.run_metrics import (
    EvaluationBefore,
    EvaluationPoint,
    EvaluationReport,
    TaskReport,
    TrainerReport,
    decode_step_metrics,
)

ReportT = TypeVar("ReportT")
_LOOKED_AT = 10
"""Steps whose mean is told of a figure beside the reward."""
_MOST_SHOWN = 8


class TaskChange(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one task of several, on its held-out problems."""

    success_before: float
    success_after: float
    success_interval_before: tuple[float, float]
    success_interval_after: tuple[float, float]
    response_length_before: float
    response_length_after: float
    problems: int


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`summary.json`. Times in seconds unless named ms; lengths in sampled tokens an episode.

    `tokens_generated`, `commits` and the stalls are what the engines that now run have counted: one that was started
    again in the run counts from zero. All other counts are the whole run's.
    """

    run_id: str
    task: str
    seed: int
    engine: str
    steps: int
    k: int
    success_before: float
    success_after: float
    success_interval_before: tuple[float, float]
    success_interval_after: tuple[float, float]
    pass_at_before: dict[int, float]
    pass_at_after: dict[int, float]
    """k → share of held-out problems that k answers solve."""
    components: dict[str, tuple[float, float]]
    """Of each figure that the task gives beside its reward, the mean over the first ten steps that have it, and over the
    last ten."""
    tasks: dict[str, TaskChange]
    """Of a run of several tasks, each by itself; all other figures are of all of them together."""
    evaluations: list[EvaluationPoint]
    """Those beside training, in order."""
    response_length_before: float
    response_length_after: float
    evaluation_problems: int
    wall_s: float
    """Since `rollmesh up` began, downloads of a model included; what `./dev` installed before is not in it."""
    first_step_s: float
    """The same, until the first optimizer step had been made."""
    tokens_generated: int
    tokens_trained: int
    max_staleness: int
    mean_staleness: float
    masked_fraction: float
    logprob_gap_mean: float | None
    mixed_segments: int
    """Segments whose sampled tokens carry more than one policy version: a commit happened inside them."""
    commits: int
    flip_ms_p50: float | None
    flip_ms_max: float | None
    """How long the slowest engine generated nothing for an update. None where no step has seen one."""
    stall_ms_p50: float | None
    stall_ms_max: float | None
    """Longest gap between tokens around an update, less a usual one: the prefill of groups that it lets in is in it."""
    weights_digest_match: bool
    final_version: int
    trajectories_published: int
    trajectories_trained: int
    trajectories_dropped: int
    dropped_by_cause: dict[str, int]
    restarts: int
    warnings: dict[str, int]
    """Steps with a sign that the run cannot learn, by kind (`services.policies.training.health`)."""
    http_ms_per_step: float
    """CPU of the servers' event loops a step, all servers and both evaluations included."""


def read_report(path: Path, kind: type[ReportT]) -> ReportT:
    """Raises WireError when the file is missing or lacks a figure."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except OSError as error:
        raise WireError(f"{path} cannot be read ({error.strerror})", "see the log of who writes it") from error
    except UNDECODABLE as error:
        raise WireError(f"{path} is not what a summary needs ({error})") from error


def summarise(
    settings: RunSettings,
    run_id: str,
    *,
    trainer: TrainerReport,
    evaluation: EvaluationReport,
    evaluations: Sequence[Evaluation] = (),
    accounts: Accounts,
    engines: Sequence[EngineReport],
    began_at: float,
    ended_at: float,
    restarts: int,
    flips_ms: Sequence[float] = (),
    components: Mapping[str, tuple[float, float]] = MappingProxyType({}),
) -> Summary:
    """Put the figures together; `began_at` and `ended_at` in Unix seconds. With several engines, counts are sums.
    `flips_ms`: of the updates, `flips_of`; `components`: of the steps, `components_of`.

    Raises WireError for a trainer that made no step.
    """
    if trainer.first_step_at is None:
        raise WireError("the trainer's report is of no step", "see the trainer's log")
    samples = evaluation.samples
    stalls = [stall for engine in engines for stall in engine.stalls_ms]
    return Summary(
        run_id=run_id,
        task=settings.task_in_words,
        seed=settings.seed,
        engine=settings.engine,
        steps=trainer.steps,
        k=settings.k,
        success_before=evaluation.success_before,
        success_after=evaluation.success_after,
        success_interval_before=_within(evaluation.solved_before, samples, evaluation.different),
        success_interval_after=_within(evaluation.solved_after, samples, evaluation.different),
        pass_at_before=_pass_at(evaluation.solved_before, samples),
        pass_at_after=_pass_at(evaluation.solved_after, samples),
        components=dict(components),
        tasks={name: _change(each, samples) for name, each in evaluation.tasks.items()},
        evaluations=[point_of(each) for each in evaluations],
        response_length_before=round(evaluation.mean_length_before, 3),
        response_length_after=round(evaluation.mean_length_after, 3),
        evaluation_problems=evaluation.problems,
        wall_s=round(ended_at - began_at, 3),
        first_step_s=round(trainer.first_step_at - began_at, 3),
        tokens_generated=sum(engine.tokens_generated for engine in engines),
        tokens_trained=trainer.tokens_trained,
        max_staleness=trainer.max_staleness,
        mean_staleness=trainer.mean_staleness,
        masked_fraction=trainer.masked_fraction,
        logprob_gap_mean=trainer.logprob_gap_mean,
        mixed_segments=trainer.mixed_segments,
        commits=sum(engine.commits for engine in engines),
        flip_ms_p50=round(statistics.median(flips_ms), 3) if flips_ms else None,
        flip_ms_max=round(max(flips_ms), 3) if flips_ms else None,
        stall_ms_p50=round(statistics.median(stalls), 3) if stalls else None,
        stall_ms_max=round(max(stalls), 3) if stalls else None,
        weights_digest_match=trainer.weights_digest_match,
        final_version=trainer.final_version,
        trajectories_published=accounts.published,
        trajectories_trained=accounts.trained,
        trajectories_dropped=accounts.dropped_total(),
        dropped_by_cause=accounts.dropped,
        restarts=restarts,
        warnings=trainer.warnings,
        http_ms_per_step=round(1e3 * sum(engine.http_cpu_s for engine in engines) / max(1, trainer.steps), 3),
    )


def flips_of(metrics: Path) -> list[float]:
    """`flip_ms` of the steps of metrics.jsonl that saw an update."""
    lines = map(decode_step_metrics, LineTail(metrics).new_lines())
    return [line.flip_ms for line in lines if line is not None and line.flip_ms > 0]


def components_of(metrics: Path) -> dict[str, tuple[float, float]]:
    """`Summary.components`, of the steps of metrics.jsonl. Success has a line of its own in it."""
    seen: dict[str, list[float]] = {}
    for line in map(decode_step_metrics, LineTail(metrics).new_lines()):
        for name, value in line.components.items() if line is not None else ():
            seen.setdefault(name, []).append(value)
    return {
        name: (statistics.fmean(values[:_LOOKED_AT]), statistics.fmean(values[-_LOOKED_AT:]))
        for name, values in sorted(seen.items())
        if name != "success"
    }


def _change(of: TaskReport, samples: int) -> TaskChange:
    return TaskChange(
        success_before=success_of(of.solved_before, samples),
        success_after=success_of(of.solved_after, samples),
        success_interval_before=_within(of.solved_before, samples),
        success_interval_after=_within(of.solved_after, samples),
        response_length_before=round(of.mean_length_before, 3),
        response_length_after=round(of.mean_length_after, 3),
        problems=len(of.solved_after),
    )


def _within(solved: Sequence[int], samples: int, different: int | None = None) -> tuple[float, float]:
    if not solved:
        return 0.0, 1.0
    found = interval(solved, samples, different)
    return found.low, found.high


def _pass_at(solved: Sequence[int], samples: int) -> dict[int, float]:
    return {k: pass_at(solved, samples, k) for k in ks_of(samples)} if solved else {}


def write_summary(folder: RunFolder, summary: Summary) -> None:
    write_whole(folder.summary, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")


def _success(success: float, interval: tuple[float, float]) -> str:
    return f"{success:.0%} ({interval[0]:.0%} to {interval[1]:.0%})"


def success_before(folder: RunFolder) -> str | None:
    """`26% (19% to 34%)`: success on held-out problems before training; None while that is not known."""
    try:
        found = read_report(folder.evaluation_before, EvaluationBefore)
    except WireError:
        return None
    if not found.solved:
        return None
    lost = lost_in_words(found.lost, len(found.solved) * found.samples, found.lost_why)
    return _success(success_of(found.solved, found.samples), _within(found.solved, found.samples, found.different)) + (
        f"; {lost}" if lost else ""
    )


def lost_in_words(lost: int, episodes: int, why: str) -> str:
    """Of an evaluation; nothing where no episode was lost."""
    return f"{lost} of {episodes} episodes lost: {as_text(why)}" if lost else ""


def _learned(summary: Summary) -> bool:
    """Whether held-out success rose by more than chance."""
    return summary.success_interval_after[0] > summary.success_interval_before[1]


def closing_lines(folder: RunFolder, summary: Summary) -> list[str]:
    """The summary for people, a line a fact."""
    gap = "–" if summary.logprob_gap_mean is None else f"{summary.logprob_gap_mean:.1e}"
    dropped = ", ".join(f"{count} {cause}" for cause, count in sorted(summary.dropped_by_cause.items())) or "none"
    flip, stall = (
        "–" if half is None else f"{half:.1f} ms p50, {most:.1f} max"
        for half, most in (
            (summary.flip_ms_p50, summary.flip_ms_max),
            (summary.stall_ms_p50, summary.stall_ms_max),
        )
    )
    rows = {
        "success, held out": f"{_success(summary.success_before, summary.success_interval_before)} → "
        f"{_success(summary.success_after, summary.success_interval_after)}",
        **{
            f"  {name}": f"{_success(each.success_before, each.success_interval_before)} → "
            f"{_success(each.success_after, each.success_interval_after)}"
            for name, each in summary.tasks.items()
        },
        "answer length": f"{summary.response_length_before:.1f} → {summary.response_length_after:.1f} tokens",
        **{
            f"mean {as_text(name)}": f"{first:.3g} → {last:.3g}, in training"
            for name, (first, last) in [*summary.components.items()][:_MOST_SHOWN]
        },
        "optimizer steps": f"{summary.steps}, the first after {summary.first_step_s:.1f} s, all in {summary.wall_s:.1f} s",
        "tokens": f"{summary.tokens_generated:,} generated, {summary.tokens_trained:,} trained",
        "staleness": f"{summary.mean_staleness:.2f} mean, {summary.max_staleness} max (K = {summary.k})",
        "weight commits": f"{summary.commits}, each held up generation for {flip}; "
        f"{summary.mixed_segments} answers hold tokens of two versions",
        "gap at a commit": f"{stall} above a usual one between tokens, the prefill of new groups included",
        "weights at the end": "equal, byte for byte" if summary.weights_digest_match else "NOT EQUAL to the trainer's",
        "logprob gap": f"{gap} mean |engine − trainer|",
        "trajectories": f"{summary.trajectories_published:,} published = {summary.trajectories_trained:,} trained "
        f"+ {summary.trajectories_dropped:,} dropped ({dropped})",
        "curves": str(folder.curves),
        "summary": str(folder.summary),
    }
    if summary.warnings:
        seen = ", ".join(f"{kind} in {steps} steps" for kind, steps in summary.warnings.items())
        rows["warnings" if _learned(summary) else "may not have learned"] = f"{seen}: see {folder.metrics}"
    for finding in of_logs({path.stem: end_of(path, LOG_BYTES) for path in sorted(folder.logs.glob("*.log"))}):
        rows[finding.id] = f"{as_text(finding.cause)}: rollmesh doctor {folder.root}"
    widest = max(map(len, rows))
    return [f"{name:{widest}}  {value}" for name, value in rows.items()]

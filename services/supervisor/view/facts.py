"""Facts of a snapshot in words, which the screen and the plain lines share."""

from __future__ import annotations

from services.observability.run_view.snapshot import Snapshot
from services.policies.progress.phase import Part, Phase
from services.wire.run_metrics import BEFORE


def plain_facts(snapshot: Snapshot) -> list[tuple[str, str]]:
    """All of a plain line but waits and warnings."""
    metrics, phase = snapshot.metrics, snapshot.phase
    step = [("step", f"{snapshot.step}/{snapshot.steps}")]
    if phase.name == BEFORE:
        # The share is the start's, and not the evaluation's.
        return [*step, ("start", f"{phase.share:.0%} · {', '.join([phase.name, *_parts(phase)])}")]
    if metrics is None:
        # With a large model that takes minutes, in which servers wait for the next version.
        computes = phase.name == "training" and "trainer" not in snapshot.waits
        now = [("the trainer computes step", "1")] if computes else []
        return [*step, (phase.name, _progress(phase)), *now]
    left = snapshot.left_s
    return [
        *step,
        *([] if left is None else [("about", f"{duration(left)} left")]),
        ("success", f"{metrics.success:.2f}"),
        *by_task(snapshot),
        *held_out(snapshot),
        ("length", f"{metrics.response_length:.1f}"),
        ("tokens/s", f"{metrics.tokens_per_s:,.0f}"),
        ("staleness", staleness(snapshot)),
        ("commit", commit(snapshot)),
        ("served", served(snapshot)),
        *([] if snapshot.bound is None else [("bound by", str(snapshot.bound))]),
        *([(phase.name, _progress(phase))] if phase.name == "evaluation after training" else []),
    ]


def _progress(phase: Phase) -> str:
    """Without a percentage where answers are counted, which would read as their success."""
    shown = ", ".join(_parts(phase))
    if phase.name.startswith("evaluation") and shown:
        return shown
    return f"{phase.share:.0%}" + (f": {shown}" if shown else "")


def _parts(phase: Phase) -> list[str]:
    return [part_in_words(part) for part in phase.parts if part.total]


def part_in_words(part: Part) -> str:
    """How much of it is done, counted where it counts whole things."""
    done = f"{part.done:g}/{part.total}" if part.done == int(part.done) else f"{part.share:.0%}"
    if part.name.startswith("evaluation"):
        return f"{part.done:g} of {part.total} answered"
    return f"{part.name} {done}" + (f" ({part.now})" if part.now and not part.ended else "")


def duration(seconds: float) -> str:
    """In the largest unit that leaves two digits."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def by_task(snapshot: Snapshot) -> list[tuple[str, str]]:
    """Nothing of a single task: it is the whole."""
    tasks = {} if snapshot.metrics is None else snapshot.metrics.tasks
    shown = ", ".join(f"{name} {one.success:.2f}" for name, one in tasks.items())
    return [("by task", shown)] if len(tasks) > 1 else []


def held_out(snapshot: Snapshot) -> list[tuple[str, str]]:
    found = snapshot.evaluation
    if found is None:
        return []
    return [("held out", f"{found.success:.2f} ({found.low:.2f} to {found.high:.2f}) at v{found.due}")]


def staleness(snapshot: Snapshot) -> str:
    metrics = snapshot.metrics
    return "–" if metrics is None else f"{metrics.staleness_mean:.2f} (max {metrics.staleness_max} of {snapshot.k})"


def commit(snapshot: Snapshot) -> str:
    """What the last update cost, and the gap between tokens around it."""
    if snapshot.metrics is None:
        return "–"
    stall = snapshot.stall_ms
    return f"{snapshot.metrics.flip_ms:.1f} ms" + ("" if stall is None else f", gap {stall:.1f} ms")


def served(snapshot: Snapshot) -> str:
    return " ".join(f"{engine.server_id}:v{engine.policy_version}" for engine in snapshot.engines) or "–"


def waits_of(snapshot: Snapshot) -> list[tuple[str, str]]:
    """Component → what it waits for, since when."""
    evaluates = snapshot.phase.name == BEFORE
    return [
        (component, f"{wait.waiting_for} ({max(0.0, snapshot.at - wait.since):.1f} s)")
        for component, wait in sorted(snapshot.waits.items())
        # Its first batch comes after the evaluation, which is told of itself.
        if not (evaluates and component == "trainer")
    ]


def warnings_of(snapshot: Snapshot) -> list[tuple[str, str]]:
    """Signs that the run may not learn, in words."""
    return [] if snapshot.metrics is None else sorted(snapshot.metrics.warnings.items())

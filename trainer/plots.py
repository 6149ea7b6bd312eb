"""curves.png: success, response length, staleness and step time over the steps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.folders import writing
from trainer.metrics import StepMetrics


def plot_curves(lines: Sequence[StepMetrics], path: Path) -> None:
    """Draw the four curves. matplotlib is imported here: it takes a second, and nobody should wait for it before a run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [line.step for line in lines]
    figure, axes = pyplot.subplots(2, 2, figsize=(10, 6), sharex=True, layout="constrained")
    success, length, staleness, times = axes.flat
    success.plot(steps, [line.success for line in lines])
    success.set(title="success of the batch", ylim=(0, 1.02))
    length.plot(steps, [line.response_length for line in lines])
    length.set(title="response length, tokens", ylim=(0, None))
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
    with writing(path):
        figure.savefig(path, dpi=110)
    pyplot.close(figure)

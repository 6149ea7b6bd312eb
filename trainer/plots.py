"""curves.png: a run's steps in six pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from services.host.files import writing
from services.policies.length_stats import Lengths
from trainer.metrics import StepMetrics
from trainer.report import trained_lengths


def plot_curves(lines: Sequence[StepMetrics], generated: Lengths, path: Path) -> None:
    """Draw them. `generated`: lengths of all that was drawn, beside which those that were trained are shown.

    matplotlib is imported here: it takes a second, and nobody should wait for it before a run.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [line.step for line in lines]
    figure, axes = pyplot.subplots(2, 3, figsize=(14, 6), layout="constrained")
    success, length, shares, staleness, times, left_out = axes.flat
    success.plot(steps, [line.success for line in lines])
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
    with writing(path):
        figure.savefig(path, dpi=110)
    pyplot.close(figure)

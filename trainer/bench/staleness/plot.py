"""staleness.svg: held-out accuracy over K, a line a correction."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from trainer.bench.staleness.report import Finals
from trainer.folders import writing


def plot_finals(table: Finals, path: Path) -> None:
    """Draw means over seeds, with every seed's own value as a dot. matplotlib is imported here: it takes a second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ks = sorted({k for by_k in table.values() for k in by_k})
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for number, (name, by_k) in enumerate(table.items()):
        # A little apart, so that equal values of several corrections are all seen.
        places = {k: ks.index(k) + 0.05 * (number - len(table) / 2) for k in by_k}
        [line] = axes.plot(places.values(), [fmean(values) for values in by_k.values()], label=name)
        dots = [(places[k], value) for k, values in by_k.items() for value in values]
        axes.plot(*zip(*dots, strict=True), ".", color=line.get_color(), markersize=4)
    axes.set(
        xlabel="K: age of the tokens, optimizer steps",
        ylabel="held-out accuracy of the trainer's policy, greedy",
        ylim=(0, 1.02),
        xticks=range(len(ks)),
        xticklabels=[str(k) for k in ks],
    )
    figure.legend(loc="outside right upper")
    with writing(path), matplotlib.rc_context({"svg.fonttype": "none"}):
        figure.savefig(path, dpi=110)
    pyplot.close(figure)

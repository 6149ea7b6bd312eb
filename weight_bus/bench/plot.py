"""weights-stall.png: the gaps between tokens around an update, arm by arm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from weight_bus.bench.gaps import Episode

_REACH_S = 0.7


def plot_gaps(engines: Mapping[str, Mapping[str, Sequence[Episode]]], path: Path) -> None:
    """One panel an engine and arm, all rounds laid over each other; matplotlib is imported here, for it takes a second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    rows = len(engines)
    columns = max(len(arms) for arms in engines.values())
    figure, axes = pyplot.subplots(
        rows,
        columns,
        figsize=(2.2 * columns, 2.6 * rows),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for row, (engine, arms) in zip(axes, engines.items(), strict=True):
        for panel, (arm, episodes) in zip(row, arms.items(), strict=False):
            for episode in episodes:
                for update in episode.updates:
                    gaps = episode.gaps_around(update, _REACH_S)
                    panel.plot(*zip(*gaps, strict=True), ".", markersize=3, alpha=0.4, color="tab:blue")
            panel.axvline(0.0, color="tab:red", linewidth=0.8)
            panel.set_title(f"{engine}: {arm}", fontsize=9)
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter(ticker.ScalarFormatter())
            panel.yaxis.set_minor_formatter(ticker.NullFormatter())
            panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    figure.supxlabel("seconds from the commit, or the middle of the pause")
    figure.supylabel("gap between tokens, ms")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

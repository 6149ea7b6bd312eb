"""Draws docs/images/live-view-80.svg and -160.svg from what a run of running-sums had written and shown at step 20.

python docs/images/live_view.py [FOLDER]
"""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import SVG_EXPORT_THEME

from services.observability.run_view.observer import MetricsTail, bound_of
from services.observability.run_view.snapshot import Snapshot
from services.policies.progress.phase import Phase
from services.run_store.status import Wait
from services.runs.samples import read_sample
from services.supervisor.view.screen import screen
from services.wire.rollout_api import EngineReport

HERE = Path(__file__).parent
RECORDED = HERE / "live-view"
WIDTHS = (80, 160)


def recorded() -> Snapshot:
    """The run as its files and its engines told of it."""
    tail = MetricsTail(RECORDED / "metrics.jsonl")
    metrics = tail.read()
    assert metrics is not None
    seen = json.loads((RECORDED / "looks.json").read_text(encoding="utf-8"))
    return Snapshot(
        steps=seen["steps"],
        k=seen["k"],
        at=seen["at"],
        elapsed_s=seen["elapsed_s"],
        phase=Phase("training", metrics.step / seen["steps"]),
        metrics=metrics,
        history=tail.history,
        engines=[EngineReport.model_validate(engine) for engine in seen["engines"]],
        waits={name: Wait(**wait) for name, wait in seen["waits"].items()},
        sample=read_sample((RECORDED / "samples.jsonl").read_bytes()),
        bound=bound_of(tail.recent, seen["looks"], seen["k"]),
    )


def picture(width: int) -> str:
    """The screen as SVG; fonts are the reader's own, so that nothing is fetched."""
    console = Console(
        file=io.StringIO(), width=width, record=True, force_terminal=True, color_system="256", legacy_windows=False
    )
    console.print(screen(recorded(), width))
    svg = console.export_svg(title="rollmesh up", theme=SVG_EXPORT_THEME, unique_id=f"live-view-{width}")
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)
    return re.sub(r"font-family: Fira Code, monospace", "font-family: monospace", svg) + "\n"


def main(folder: Path) -> None:
    for width in WIDTHS:
        (folder / f"live-view-{width}.svg").write_text(picture(width), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)

"""`rollmesh track`: write a run's figures, samples and settings to logging backends, while it goes on or afterwards."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import structlog
import typer

from services.config.tracking import BackendName, TrackingSettings
from services.wire.errors import RollmeshError, UsageError
from services.wire.extras import install

if TYPE_CHECKING:
    from trainer.tracking.base import TrackedRun, Tracker

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_log = structlog.get_logger()


@app.command(
    help="Write a run's figures, samples and settings to logging backends. What one holds is not written again: call it "
    "while the run goes on, or afterwards. `rollmesh up` does it by itself where tracking.backends names some.\n\n"
    "Example: rollmesh track runs/mine --to tensorboard"
)
def track(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder")],
    to: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="tensorboard, wandb, mlflow or trackio; default: the run's")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Until SIGTERM or Ctrl-C: as the run goes on")] = False,
) -> None:
    from services.config.load import load_settings
    from services.host.run_folder import RunFolder
    from trainer.tracking import follow as following
    from trainer.tracking.base import TrackedRun, settings_of

    folder = RunFolder(run.expanduser().absolute())
    if not folder.config.exists():
        raise UsageError(f"{folder.root} is no run folder", "name one that has a config.toml")
    settings = load_settings(folder.config, [])
    names = _known(to or list(settings.tracking.backends))
    run_id = folder.run_id.read_text().strip() if folder.run_id.exists() else folder.root.name
    chosen = settings.tracking

    def tracked(name: str) -> TrackedRun:
        return TrackedRun(
            run_id=run_id,
            name=chosen.name or run_id,
            project=chosen.project,
            folder=folder.tracking / name,
            settings=settings_of(settings.model_dump(mode="json", exclude_none=True)),
        )

    stop = threading.Event()
    for which in (signal.SIGTERM, signal.SIGINT):
        signal.signal(which, lambda *_: stop.set())
    _log.info("tracking", run=run_id, backends=names)
    backends = {name: _opener(name, tracked(name), chosen) for name in names}
    failed = following.follow(folder, backends, stop, once=not follow)
    if failed:
        raise RollmeshError(
            f"not all is written to {', '.join(failed)}", f"see above, and call `rollmesh track {run}` once more"
        )


def _known(names: list[str]) -> list[str]:
    from difflib import get_close_matches

    known = get_args(BackendName)
    if not names:
        raise UsageError("no logging backend is named", f"give --to; known: {', '.join(known)}")
    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(f"no logging backend {name!r}", f"{hint}known: {', '.join(known)}")
    return list(dict.fromkeys(names))


def _opener(name: str, run: TrackedRun, chosen: TrackingSettings) -> Callable[[], Tracker]:
    """Raises UsageError where its library is not installed."""
    from importlib.util import find_spec

    if find_spec(name) is None:
        raise UsageError(f"{name} is not installed", install("trackers"))

    def open_it() -> Tracker:
        if name == "tensorboard":
            from trainer.tracking.tensorboard import TensorBoard

            return TensorBoard(run)
        if name == "wandb":
            from trainer.tracking.wandb import WeightsAndBiases

            return WeightsAndBiases(run, chosen.wandb_mode)
        if name == "mlflow":
            from trainer.tracking.mlflow import Mlflow

            return Mlflow(run, chosen.mlflow_uri)
        from trainer.tracking.trackio import Trackio

        return Trackio(run)

    return open_it

"""A trainer whose checkpoints take many times as long to write as the disk needs, for what a slow disk does to a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from services.config.fitting import threads_of
from services.config.load import load_settings
from services.host.process import usable_cores
from trainer.assembly import TrainerArguments
from trainer.checkpoint.checkpoint import Snapshot, save
from trainer.run import train

app = typer.Typer(add_completion=False)


@app.command()
def trainer(
    run_id: Annotated[str, typer.Option()],
    config: Annotated[Path, typer.Option()],
    redis_url: Annotated[str, typer.Option()],
    bus_url: Annotated[str, typer.Option()],
    model: Annotated[Path, typer.Option()],
    run_dir: Annotated[Path, typer.Option()],
    slower: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Train a run as `rollmesh train` does."""

    def slowly(folder: Path, taken: Snapshot) -> Path:
        began = time.perf_counter()
        saved = save(folder, taken)
        time.sleep((slower - 1) * (time.perf_counter() - began))
        return saved

    settings = threads_of(load_settings(config, []), model, usable_cores())
    raise typer.Exit(train(TrainerArguments(run_id, settings, redis_url, bus_url, model, run_dir, save=slowly)))


if __name__ == "__main__":
    app()

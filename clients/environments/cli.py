"""`rollmesh demonstrations`: write the demonstrations that a warm start learns from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import structlog
import typer

from services.config.options import Seed

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Example: rollmesh demonstrations --task running-sums --seed 1 --out demos")
def demonstrations(
    task: Annotated[str, typer.Option(help="running-sums or guess-number")],
    out: Annotated[Path, typer.Option(help="Folder to write; it is made")],
    seed: Seed = 1,
    problems: Annotated[int, typer.Option(min=0, help="Also write this many train problems with their answers")] = 0,
    held_out: Annotated[int, typer.Option(min=0, help="Also write this many held-out problems with their answers")] = 0,
) -> None:
    """Write demonstrations of a task, with the recipe of its warm start, for `rollmesh sft`."""
    from clients.environments.tasks.demonstrations import write_demonstrations

    write_demonstrations(task, seed, out, problems=problems, held_out=held_out)
    structlog.get_logger().info("demonstrations written", task=task, seed=seed, out=str(out))

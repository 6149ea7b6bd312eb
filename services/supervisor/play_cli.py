"""`rollmesh play`: the environment of a mesh whose parts are started one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    help="Play a run's task as its settings say until the run has concluded: `rollmesh run-environment`, with flags from "
    "the configuration. ROLLMESH_REWARDS_URL, ROLLMESH_KEYS_DIR and the like hold for it too.\n\n"
    "Example: rollmesh play --run-id demo --config runs/demo/config.toml --rollout-url http://127.0.0.1:8000"
)
def play(
    run_id: Annotated[str, typer.Option(help="The run that is played for")],
    config: Annotated[Path, typer.Option(help="Resolved configuration (TOML), as it lies in the run folder")],
    rollout_url: Annotated[list[str], typer.Option(help="The gateway, or a rollout server; repeat it for each")],
    run_dir: Annotated[
        Path | None, typer.Option(help="evaluation.json is written here; else into the folder of --config")
    ] = None,
) -> None:
    import os

    from services.config_file import load_settings
    from services.supervisor.launch_plan import environment_command
    from services.supervisor.processes import OURS
    from services.trace_settings import as_surroundings

    settings = load_settings(config, [])
    command = (*OURS, *environment_command(settings, run_id, run_dir or config.parent, rollout_url))
    # In this process's place: signals and the exit code are the environment's own.
    os.execve(command[0], command, {**os.environ, **as_surroundings(settings.telemetry)})

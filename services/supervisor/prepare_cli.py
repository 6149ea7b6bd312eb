"""`rollmesh prepare`: the run folder of a mesh whose parts are started one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    help="Make the run folder of a mesh whose parts are started one by one: write the resolved settings, which every part "
    "is given as --config RUN_DIR/config.toml, and warm-start a small policy into RUN_DIR/model.\n\n"
    "With model.path there is no warm start. What is there stays; other settings than the run began with are refused.\n\n"
    "Example: rollmesh prepare --run-dir runs/demo task=guess-number steps=30"
)
def prepare(
    run_dir: Annotated[Path, typer.Option(help="Run folder; made where it is not there")],
    config: Annotated[Path | None, typer.Option(help="Settings as TOML; overrides go before it")] = None,
    settings_only: Annotated[
        bool, typer.Option("--settings-only", help="Leave the warm start to another call; torch is not needed then")
    ] = False,
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]…", help="Settings, such as steps=30")
    ] = None,
) -> None:
    from services.config_file import load_settings
    from services.supervisor import preparing

    preparing.prepare(load_settings(config, overrides or []), run_dir, settings_only=settings_only)

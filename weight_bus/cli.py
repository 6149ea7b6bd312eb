"""`rollmesh weight-bus`: the service that engines register with and the trainer announces new weights to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    help="Coordinate weight updates: every engine stages in the background, all flip between two decode steps.\n\n"
    "Example: rollmesh weight-bus --run-id demo --port 8200"
)
def weight_bus(
    run_id: Annotated[str, typer.Option(help="The run whose engines and updates this bus serves")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on")],
    host: Annotated[str, typer.Option(help="Address to listen on (loopback)")] = "127.0.0.1",
    config: Annotated[Path | None, typer.Option(help="Configuration of the run (TOML)")] = None,
) -> None:
    from services.app import Stop, open_port, serve
    from services.config_file import load_settings

    settings = load_settings(config, [])
    # Bound before anything slow: a port in use is known at once.
    listener = open_port(host, port)

    from weight_bus.app import build_app

    stop = Stop()
    serve(build_app(run_id, settings.weights.stage_timeout_s, stop=stop), host, port, listener=listener, stop=stop)

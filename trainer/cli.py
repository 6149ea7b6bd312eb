"""`rollmesh train`: the trainer of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.security.options import TlsDir

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Example: rollmesh train --run-id r1 --config runs/r1/config.toml --redis-url redis://127.0.0.1:6379/0 "
    "--bus-url http://127.0.0.1:7000 --model runs/r1/model --run-dir runs/r1"
)
def train(
    run_id: Annotated[str, typer.Option(help="Names the run in Redis and on the bus")],
    config: Annotated[Path, typer.Option(help="Resolved configuration (TOML)")],
    redis_url: Annotated[str, typer.Option(help="Where the trajectory stream is")],
    bus_url: Annotated[str, typer.Option(help="Where the weight bus is")],
    model: Annotated[Path, typer.Option(help="Hugging Face folder to start from; it may still be made")],
    run_dir: Annotated[
        Path, typer.Option(help="Run folder: metrics, samples, checkpoints; an interrupted run goes on")
    ],
    weights_key_file: Annotated[
        Path | None, typer.Option(help="Key that weight manifests are signed with; bus and engines check it")
    ] = None,
    bus_key_file: Annotated[Path | None, typer.Option(help="The weight bus's admin key; else the peer key")] = None,
    keys_dir: Annotated[
        Path | None, typer.Option(envvar="ROLLMESH_KEYS_DIR", help="Folder of keys (`rollmesh keys init`)")
    ] = None,
    redis_password_file: Annotated[
        Path | None, typer.Option(envvar="ROLLMESH_REDIS_PASSWORD_FILE", help="File with Redis's password")
    ] = None,
    tls_dir: TlsDir = None,
) -> None:
    """Train on the trajectories of a run and publish every version of the policy."""
    from services.host.process import begin_again_with_tunables

    # Publishing is one copy of all weights, for which training waits.
    begin_again_with_tunables()

    import os

    from services.config.load import load_settings
    from services.config.traces import with_environ
    from services.host.process import heavy_imports
    from services.observability.setup import open_tracing
    from services.run_store.client import reached_by
    from services.security.keys import read_key, read_keys
    from services.security.tls import read_tls
    from trainer.algorithms.describe import describe

    settings = load_settings(config, [])
    tracing = open_tracing(with_environ(settings.telemetry, os.environ), "trainer", run_id, "trainer")
    describe(settings.trainer)

    keys = read_keys("trainer", keys_dir, {"weights": weights_key_file, "redis": redis_password_file})
    bus_key = keys.peer if bus_key_file is None else read_key(bus_key_file)
    tls = read_tls(tls_dir)
    bus_url = tls.trust.address(bus_url)
    redis_url = reached_by(redis_url, keys.redis, tls.trust)

    with heavy_imports():
        from trainer.assembly import TrainerArguments
        from trainer.run import train as run_trainer

    arguments = TrainerArguments(
        *(run_id, settings, redis_url, bus_url, model, run_dir),
        weights_key=keys.weights,
        bus_key=bus_key,
        tls=tls,
        tracing=tracing,
    )
    with tracing:
        code = run_trainer(arguments)
    if code:
        raise typer.Exit(code)

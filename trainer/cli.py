"""`rollmesh train`: the trainer of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.config import options

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Example: rollmesh train --run-id r1 --config runs/r1/config.toml --redis-url redis://127.0.0.1:6379/0 "
    "--bus-url http://127.0.0.1:7000 --model runs/r1/model --run-dir runs/r1"
)
def train(
    run_id: options.RunId,
    config: options.Config,
    redis_url: options.RedisUrl,
    bus_url: Annotated[str, typer.Option(help="Where the weight bus is")],
    model: Annotated[Path, typer.Option(help="Hugging Face folder to start from; it may still be made")],
    run_dir: Annotated[
        Path, typer.Option(help="Run folder: metrics, samples, checkpoints; an interrupted run goes on")
    ],
    weights_key_file: options.WeightsKeyFile = None,
    bus_key_file: options.BusKeyFile = None,
    keys_dir: options.KeysDir = None,
    redis_password_file: options.RedisPasswordFile = None,
    tls_dir: options.TlsDir = None,
) -> None:
    """Train on the trajectories of a run and publish every version of the policy."""
    from services.host.process import begin_again_with_tunables

    # Publishing is one copy of all weights, for which training waits.
    begin_again_with_tunables()

    from services.config.fitting import threads_of
    from services.host.process import heavy_imports, usable_cores
    from services.http.startup import read_context
    from services.security.keys import read_key
    from trainer.algorithms.describe import describe

    context = read_context(
        "trainer",
        run_id,
        "trainer",
        config=config,
        keys_dir=keys_dir,
        key_files={"weights": weights_key_file, "redis": redis_password_file},
        tls_dir=tls_dir,
    )
    describe(context.settings.trainer)

    bus_key = context.keys.peer if bus_key_file is None else read_key(bus_key_file)
    bus_url = context.tls.trust.address(bus_url)
    redis_url = context.redis_url(redis_url)

    with heavy_imports():
        from trainer.assembly import TrainerArguments
        from trainer.run import train as run_trainer

    arguments = TrainerArguments(
        run_id=run_id,
        settings=threads_of(context.settings, model, usable_cores()),
        redis_url=redis_url,
        bus_url=bus_url,
        model=model,
        run_dir=run_dir,
        weights_key=context.keys.weights,
        bus_key=bus_key,
        metrics_key=context.keys.metrics,
        tls=context.tls,
        tracing=context.tracing,
    )
    with context.tracing:
        code = run_trainer(arguments)
    if code:
        raise typer.Exit(code)

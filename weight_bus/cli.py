"""`rollmesh weight-bus`: the service that engines register with and the trainer announces new weights to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.security.options import TlsDir

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    help="Coordinate weight updates: every engine stages in the background, then flips between two decode steps: all "
    "together, or as weights.policy says. `rollmesh weights` operates it.\n\n"
    "Example: rollmesh weight-bus --run-id demo --port 8200"
)
def weight_bus(
    run_id: Annotated[str, typer.Option(help="The run whose engines and updates this bus serves")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that is not loopback needs both keys")
    ] = "127.0.0.1",
    config: Annotated[Path | None, typer.Option(help="Configuration of the run (TOML)")] = None,
    policy: Annotated[str | None, typer.Option(help="barrier, rolling or quorum; else weights.policy")] = None,
    keys_dir: Annotated[
        Path | None, typer.Option(envvar="ROLLMESH_KEYS_DIR", help="Folder of keys (`rollmesh keys init`)")
    ] = None,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="File with the admin key; without a peer key every caller must show it")
    ] = None,
    weights_key_file: Annotated[
        Path | None, typer.Option(help="The run's weight key: manifests that it did not sign are refused")
    ] = None,
    engine_key_file: Annotated[
        Path | None, typer.Option(help="Key that the engines ask of the bus; else the peer key")
    ] = None,
    tls_dir: TlsDir = None,
) -> None:
    import os

    from services.config.load import load_settings
    from services.config.traces import with_environ
    from services.http.app import Stop, open_port, serve
    from services.observability.setup import open_tracing
    from services.policies.fleet_policy import FleetPolicy
    from services.security.keys import read_key, read_keys
    from services.security.permissions import lacking
    from services.security.tls import read_tls

    settings = load_settings(config, [] if policy is None else [f"weights.policy={policy}"])
    weights = settings.weights
    tracing = open_tracing(with_environ(settings.telemetry, os.environ), "weight-bus", run_id, "weight-bus")
    keys = read_keys("weight-bus", keys_dir, {"admin": admin_key_file, "weights": weights_key_file})
    tls = read_tls(tls_dir)
    tls.own_url(host, port)
    # Bound before anything slow: a port in use is known at once.
    listener = open_port(host, port, lacking=lacking(keys, "weight-bus"))

    from weight_bus.coordinator.app import build_app

    stop = Stop()
    bus = build_app(
        run_id,
        weights.stage_timeout_s,
        policy=FleetPolicy(weights.policy, quorum=weights.quorum, at_once=weights.rolling_at_once),
        keys=keys,
        engine_key=None if engine_key_file is None else read_key(engine_key_file),
        stop=stop,
        trust=tls.trust,
        tracing=tracing,
    )
    with tracing:
        serve(bus, host, port, listener=listener, stop=stop, identity=tls.identity)

"""`rollmesh weight-bus`: the service that engines register with and the trainer announces new weights to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.config import options

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    help="Coordinate weight updates: every engine stages in the background, then flips between two decode steps: all "
    "together, or as weights.policy says. `rollmesh weights` operates it.\n\n"
    "Example: rollmesh weight-bus --run-id demo --port 8200"
)
def weight_bus(
    run_id: options.RunId,
    port: options.Port,
    host: options.Host = options.LOOPBACK,
    config: options.OptionalConfig = None,
    policy: Annotated[str | None, typer.Option(help="barrier, rolling or quorum; else weights.policy")] = None,
    keys_dir: options.KeysDir = None,
    admin_key_file: Annotated[
        Path | None, typer.Option(help="File with the admin key; without a peer key every caller must show it")
    ] = None,
    weights_key_file: options.WeightsKeyFile = None,
    engine_key_file: Annotated[
        Path | None, typer.Option(help="Key that the engines ask of the bus; else the peer key")
    ] = None,
    tls_dir: options.TlsDir = None,
    state_file: Annotated[
        Path | None,
        typer.Option(help="Where the newest version's number is kept, so that a restarted bus takes no older one"),
    ] = None,
) -> None:
    from services.http.app import Stop, serve
    from services.http.startup import read_context
    from services.policies.fleet.policy import FleetPolicy
    from services.security.keys import read_key

    context = read_context(
        "weight-bus",
        run_id,
        "weight-bus",
        config=config,
        keys_dir=keys_dir,
        key_files={"admin": admin_key_file, "weights": weights_key_file},
        tls_dir=tls_dir,
        overrides=[] if policy is None else [f"weights.policy={policy}"],
    )
    weights, tls = context.settings.weights, context.tls
    tls.own_url(host, port)
    listener = context.open_port(host, port)

    from weight_bus.coordinator.app import build_app

    stop = Stop()
    bus = build_app(
        run_id,
        weights.stage_timeout_s,
        policy=FleetPolicy(weights.policy, quorum=weights.quorum, at_once=weights.rolling_at_once),
        keys=context.keys,
        engine_key=None if engine_key_file is None else read_key(engine_key_file),
        stop=stop,
        trust=tls.trust,
        tracing=context.tracing,
        state_file=state_file,
    )
    with context.tracing:
        serve(bus, host, port, listener=listener, stop=stop, identity=tls.identity)


transports_app = typer.Typer(add_completion=False, rich_markup_mode=None)


@transports_app.command(
    help="Try a weight transport on this host: another process offers 64 MiB, this one reads them. Exit code 1 where that "
    "fails.\n\nExample: rollmesh transports --transport nixl"
)
def transports(
    transport: Annotated[
        str, typer.Option(metavar="NAME", help="nixl or shm; auto: nixl where it is installed")
    ] = "auto",
    json: options.Json = False,
    offer: Annotated[bool, typer.Option("--offer", hidden=True)] = False,
) -> None:
    import sys

    import msgspec

    from services.host.commands import OURS
    from services.wire.errors import UsageError
    from weight_bus.transports import trial
    from weight_bus.transports.select import resolve

    name = resolve(transport)
    if name not in ("nixl", "shm"):
        raise UsageError(f"{name} is not tried here", "try nixl or shm")
    if offer:
        trial.offer(name)
        return
    found = trial.try_transport(name, (*OURS, "transports", "--offer", "--transport", name))
    shown = found.why or f"{found.bytes_per_s / 1e9:.2f} GB/s over {found.nbytes >> 20} MiB"
    sys.stdout.write(f"{msgspec.json.encode(found).decode() if json else f'{name}: {shown}'}\n")
    if found.why is not None:
        raise typer.Exit(1)

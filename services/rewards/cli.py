"""`rollmesh rewards`: what answers are worth, by functions of yours and by reward models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.security.options import TlsDir

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    help="Judge answers by the components in the configuration's [[rewards.components]]: functions in sandboxed "
    "processes, reward models over HTTP. Environments send them with POST /v1/rewards.\n\n"
    "Example: rollmesh rewards --config run.toml --port 8300"
)
def rewards(
    config: Annotated[Path, typer.Option(help="Configuration of the run (TOML)")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that is not loopback needs the key")
    ] = "127.0.0.1",
    run_id: Annotated[str | None, typer.Option(help="The run that is judged for (named in the log)")] = None,
    keys_dir: Annotated[
        Path | None, typer.Option(envvar="ROLLMESH_KEYS_DIR", help="Folder of keys (`rollmesh keys init`)")
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the agent key; without another key every caller must show it")
    ] = None,
    tls_dir: TlsDir = None,
) -> None:
    import os

    from services.config.load import load_settings
    from services.config.traces import with_environ
    from services.http.app import Stop, open_port, serve
    from services.observability.setup import open_tracing
    from services.security.keys import read_keys
    from services.security.permissions import lacking
    from services.security.tls import read_tls, read_trust
    from services.wire.errors import UsageError

    whole = load_settings(config, [])
    settings = whole.rewards
    if not settings.components:
        raise UsageError(f"{config} has no reward component", "add a section [[rewards.components]]")
    tracing = open_tracing(with_environ(whole.telemetry, os.environ), "rewards", run_id or "", "rewards")
    keys = read_keys("rewards", keys_dir, {"agent": key_file})
    tls = read_tls(tls_dir)
    tls.own_url(host, port)
    # Reward models may be anybody's.
    outside = read_trust(tls_dir, public=True)
    listener = open_port(host, port, lacking=lacking(keys, "rewards"))

    import structlog

    from services.rewards.app import make_rewards_app

    if run_id is not None:
        structlog.contextvars.bind_contextvars(run=run_id)
    stop = Stop()
    judging = make_rewards_app(settings, stop, keys=keys, trust=outside, tracing=tracing)
    with tracing:
        serve(judging, host, port, listener=listener, stop=stop, identity=tls.identity)

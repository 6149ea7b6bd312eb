"""`rollmesh rewards`: what answers are worth, by functions of yours and by reward models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.config import options

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    help="Judge answers by the components in the configuration's [[rewards.components]]: functions in sandboxed "
    "processes, reward models over HTTP. Environments send them with POST /v1/rewards.\n\n"
    "Example: rollmesh rewards --config run.toml --port 8300"
)
def rewards(
    config: options.Config,
    port: options.Port,
    host: options.Host = options.LOOPBACK,
    run_id: Annotated[str | None, typer.Option(help="The run that is judged for (named in the log)")] = None,
    keys_dir: options.KeysDir = None,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the agent key; without another key every caller must show it")
    ] = None,
    tls_dir: options.TlsDir = None,
) -> None:
    from services.http.app import Stop, serve
    from services.http.startup import read_context
    from services.security.tls import read_trust
    from services.wire.errors import UsageError

    context = read_context(
        "rewards",
        run_id or "",
        "rewards",
        config=config,
        keys_dir=keys_dir,
        key_files={"agent": key_file},
        tls_dir=tls_dir,
    )
    settings = context.settings.rewards
    if not settings.components:
        raise UsageError(f"{config} has no reward component", "add a section [[rewards.components]]")
    context.tls.own_url(host, port)
    # Reward models may be anybody's.
    outside = read_trust(tls_dir, public=True)
    listener = context.open_port(host, port)

    import structlog

    from services.rewards.app import make_rewards_app

    if run_id is not None:
        structlog.contextvars.bind_contextvars(run=run_id)
    stop = Stop()
    secrets = [each for each in (keys_dir, key_file, tls_dir) if each is not None]
    judging = make_rewards_app(
        settings, stop, keys=context.keys, trust=outside, tracing=context.tracing, hidden=secrets
    )
    with context.tracing:
        serve(judging, host, port, listener=listener, stop=stop, identity=context.tls.identity)

"""`rollmesh gateway`: one address in front of a run's rollout servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from services.security.options import TlsDir

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    help="Give agents and environments one address: each call goes to the rollout server that holds its session, and to "
    "another one when that server ends.\n\n"
    "Example: rollmesh gateway --run-id demo --port 8000 --redis-url redis://127.0.0.1:6379/0"
)
def gateway(
    run_id: Annotated[str, typer.Option(help="The run whose rollout servers it stands in front of")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on")],
    redis_url: Annotated[str, typer.Option(help="Redis that carries the run, redis://host:port/db")],
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that is not loopback needs --keys-dir")
    ] = "127.0.0.1",
    own_url: Annotated[str | None, typer.Option(help="Where it is reached; else HOST:PORT")] = None,
    name: Annotated[str, typer.Option(help="Name of this gateway, unique in the run")] = "gateway",
    config: Annotated[Path | None, typer.Option(help="Configuration of the run (TOML)")] = None,
    keys_dir: Annotated[
        Path | None, typer.Option(envvar="ROLLMESH_KEYS_DIR", help="Folder of keys (`rollmesh keys init`)")
    ] = None,
    redis_password_file: Annotated[
        Path | None, typer.Option(envvar="ROLLMESH_REDIS_PASSWORD_FILE", help="File with Redis's password")
    ] = None,
    tls_dir: TlsDir = None,
) -> None:
    import asyncio
    import os

    from services.config.load import load_settings
    from services.config.traces import with_environ
    from services.gateway.app import GatewayPlan, make_gateway_app
    from services.http.app import Stop, open_port, serve
    from services.observability.setup import open_tracing
    from services.run_store.client import check_reachable, reached_by
    from services.security.keys import read_keys
    from services.security.permissions import lacking
    from services.security.tls import read_tls

    settings = load_settings(config, [])
    tracing = open_tracing(with_environ(settings.telemetry, os.environ), "gateway", run_id, name)
    keys = read_keys("gateway", keys_dir, {"redis": redis_password_file})
    tls = read_tls(tls_dir)
    own_url = tls.own_url(host, port, own_url)
    redis_url = reached_by(redis_url, keys.redis, tls.trust)
    asyncio.run(check_reachable(redis_url))
    listener = open_port(host, port, lacking=lacking(keys, "gateway"))
    stop = Stop()
    plan = GatewayPlan(
        run_id=run_id,
        redis_url=redis_url,
        settings=settings.gateway,
        name=name,
        url=own_url,
        keys=keys,
        trust=tls.trust,
        tracing=tracing,
    )
    app = make_gateway_app(plan, stop, max_body_mib=settings.rollout.max_body_mib)
    shutdown_s = settings.gateway.shutdown_s
    with tracing:
        serve(app, host, port, listener=listener, stop=stop, shutdown_s=shutdown_s, identity=tls.identity)

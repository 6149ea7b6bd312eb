"""`rollmesh gateway`: one address in front of a run's rollout servers."""

from __future__ import annotations

from typing import Annotated

import typer

from services.config import options

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    help="Give agents and environments one address: each call goes to the rollout server that holds its session, and to "
    "another one when that server ends.\n\n"
    "Example: rollmesh gateway --run-id demo --port 8000 --redis-url redis://127.0.0.1:6379/0"
)
def gateway(
    run_id: options.RunId,
    port: options.Port,
    redis_url: options.RedisUrl,
    host: options.Host = options.LOOPBACK,
    own_url: options.OwnUrl = None,
    name: Annotated[str, typer.Option(help="Name of this gateway, unique in the run")] = "gateway",
    config: options.OptionalConfig = None,
    keys_dir: options.KeysDir = None,
    redis_password_file: options.RedisPasswordFile = None,
    tls_dir: options.TlsDir = None,
) -> None:
    from services.gateway.app import GatewayPlan, make_gateway_app
    from services.http.app import Stop, serve
    from services.http.startup import read_context

    context = read_context(
        "gateway",
        run_id,
        name,
        config=config,
        keys_dir=keys_dir,
        key_files={"redis": redis_password_file},
        tls_dir=tls_dir,
    )
    settings, tls = context.settings, context.tls
    own_url = tls.own_url(host, port, own_url)
    redis_url = context.redis_url(redis_url, check=True)
    listener = context.open_port(host, port)
    stop = Stop()
    plan = GatewayPlan(
        run_id=run_id,
        redis_url=redis_url,
        settings=settings.gateway,
        name=name,
        url=own_url,
        keys=context.keys,
        trust=tls.trust,
        tracing=context.tracing,
    )
    app = make_gateway_app(plan, stop, max_body_mib=settings.rollout.max_body_mib)
    shutdown_s = settings.gateway.shutdown_s
    with context.tracing:
        serve(app, host, port, listener=listener, stop=stop, shutdown_s=shutdown_s, identity=tls.identity)

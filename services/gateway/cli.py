"""`rollmesh gateway`: one address in front of a run's rollout servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    host: Annotated[str, typer.Option(help="Address to listen on (loopback)")] = "127.0.0.1",
    name: Annotated[str, typer.Option(help="Name of this gateway, unique in the run")] = "gateway",
    config: Annotated[Path | None, typer.Option(help="Configuration of the run (TOML)")] = None,
) -> None:
    import asyncio

    from services.app import Stop, open_port, serve
    from services.config_file import load_settings
    from services.gateway.app import make_gateway_app
    from services.gateway.gateway import GatewayPlan
    from services.redis_client import check_reachable

    settings = load_settings(config, [])
    asyncio.run(check_reachable(redis_url))
    listener = open_port(host, port)
    stop = Stop()
    plan = GatewayPlan(
        run_id=run_id, redis_url=redis_url, settings=settings.gateway, name=name, url=f"http://{host}:{port}"
    )
    app = make_gateway_app(plan, stop, max_body_mib=settings.rollout.max_body_mib)
    serve(app, host, port, listener=listener, stop=stop, shutdown_s=settings.gateway.shutdown_s)

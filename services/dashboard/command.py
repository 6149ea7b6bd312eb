"""`rollmesh dashboard`: runs in a browser, live ones and those that have ended."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from services.config import options

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_HELP = """Serve a page that shows runs: what a live one does and why its trainer waits, rollouts token by token, runs
compared, and the fleet. Prints its address; Ctrl-C ends it.

RUN is a run folder or a name in --root; left out: all runs there. A run that runs is followed through its Redis.

\b
Examples:
  rollmesh dashboard
  rollmesh dashboard runs/a runs/b
  rollmesh dashboard --run-id demo --redis-url redis://127.0.0.1:6379/0 --host 0.0.0.0 --keys-dir keys
"""


@app.command(help=_HELP)
def dashboard(
    names: Annotated[list[str] | None, typer.Argument(metavar="[RUN…]", help="Runs: names or paths")] = None,
    root: Annotated[Path, typer.Option("--root", metavar="DIR", help="Folder that run folders lie in")] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="N", help="Port to listen on; 0: any")] = 8500,
    host: options.Host = options.LOOPBACK,
    run_id: Annotated[str | None, typer.Option("--run-id", help="A run that --redis-url carries")] = None,
    redis_url: Annotated[
        str | None, typer.Option("--redis-url", help="Redis that carries the run; left out: what its folder says")
    ] = None,
    keys_dir: options.KeysDir = None,
    redis_password_file: options.RedisPasswordFile = None,
    tls_dir: options.TlsDir = None,
    own_url: options.OwnUrl = None,
    fd: Annotated[int | None, typer.Option("--fd", hidden=True, help="A socket that listens, in place of one")] = None,
) -> None:
    import socket

    from services.dashboard.app import make_dashboard_app
    from services.dashboard.open_runs import open_runs
    from services.dashboard.plan import DashboardPlan
    from services.http.app import Stop, open_port, serve
    from services.security.keys import read_keys
    from services.security.permissions import lacking, require_loopback
    from services.security.tls import read_tls

    tls = read_tls(tls_dir)
    keys = read_keys("dashboard", keys_dir, {"redis": redis_password_file})
    missing = lacking(keys, "dashboard")
    listener = open_port(host, port, lacking=missing) if fd is None else socket.socket(fileno=fd)
    require_loopback(listener.getsockname()[0], missing)
    runs = open_runs(names or [], root, run_id, redis_url)
    plan = DashboardPlan(runs=runs, keys=keys, trust=tls.trust, secure=tls.identity is not None)
    url = tls.own_url(host, listener.getsockname()[1], own_url)
    sys.stdout.write(f"dashboard: {url}/\n")
    sys.stdout.flush()
    stop = Stop()
    serve(make_dashboard_app(plan, stop), host, port, listener=listener, stop=stop, identity=tls.identity)

"""`rollmesh status`: how a run is, and why its trainer waits."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.config import options

if TYPE_CHECKING:
    from services.observability.mesh_status.report import MeshReport
    from services.run_store.discovery import Listed
    from services.security.tls import Trust

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_RUNS = Path("runs")
_UNBROKEN = 400
"""Columns, where nobody's screen is written to."""

_HELP = """Show a run on one screen: its services, the versions they serve, queues, staleness, how busy the trainer is,
and why it waits: on which server, for which groups, since when.

Exit code 0: nothing is wrong; 1: something is, or could not be read; 2: misuse.

\b
Examples:
  rollmesh status
  rollmesh status --redis-url redis://127.0.0.1:6379/0
  rollmesh status --run-id demo --json
  rollmesh status --run-id demo --watch
"""


@app.command(help=_HELP)
def status(
    redis_url: options.FoundRedisUrl = None,
    run_id: options.FoundRunId = None,
    also: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=URL", help="Ask this service too (the rewards service); repeat it for each"),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between refreshes of --watch")] = 1.0,
    json: options.Json = False,
    keys_dir: options.KeysDir = None,
    redis_password_file: Annotated[Path | None, typer.Option(help="File with Redis's password")] = None,
    tls_dir: options.TlsDir = None,
) -> None:
    import asyncio

    from services.host.run_folder import USUAL_REDIS, running_redis
    from services.run_store.client import check_reachable, reached_by
    from services.security.keys import read_keys
    from services.security.tls import read_trust
    from services.wire.errors import UsageError

    trust = read_trust(tls_dir)
    found = redis_url or running_redis(_RUNS)
    guessed, found = found is None, found or USUAL_REDIS
    redis_url = reached_by(found, read_keys("reader", keys_dir, {"redis": redis_password_file}).redis, trust)
    further = [_further(each) for each in also or []]
    try:
        asyncio.run(check_reachable(redis_url))
    except UsageError as error:
        if not guessed:
            raise
        raise UsageError(
            f"no run is running in ./{_RUNS}, and no Redis answers at {found}",
            "`rollmesh runs` lists those that have ended; for a run elsewhere give --redis-url",
        ) from error
    with _shown(watch=watch, as_json=json) as show:
        well = asyncio.run(_collect(redis_url, run_id, trust, further, every if watch else None, show))
    if not well:
        raise typer.Exit(1)


async def _collect(
    redis_url: str,
    run_id: str | None,
    trust: Trust,
    also: Sequence[Listed],
    every_s: float | None,
    show: Callable[[MeshReport], None],
) -> bool:
    """Collect once, or every so often until cancelled, or until the run and its Redis have ended.

    Returns whether the last report found nothing wrong.
    """
    import asyncio

    import httpx

    from services.observability.mesh_status.collector import NoRunYetError, StatusCollector, find_run
    from services.run_store.client import connect

    redis = connect(redis_url)
    try:
        while True:
            try:
                run = await find_run(redis, run_id)
                break
            except NoRunYetError as error:
                sys.stderr.write(f"rollmesh: {error}\n")
                if every_s is None:
                    return True
                await asyncio.sleep(every_s)
        async with httpx.AsyncClient(trust_env=False, verify=trust.verify) as http:
            collector = StatusCollector(redis, run, http, also, trust=trust)
            concluded = False
            while True:
                report = await collector.collect(again=every_s is None)
                if concluded and report.lost:
                    # Its Redis ended with it.
                    return True
                concluded = concluded or (report.queue is not None and report.queue.concluded)
                show(report)
                if every_s is None:
                    return report.well
                await asyncio.sleep(every_s)
    finally:
        await redis.aclose()


@contextmanager
def _shown(*, watch: bool, as_json: bool) -> Iterator[Callable[[MeshReport], None]]:
    """Gives the function that shows a report."""
    import msgspec
    from rich.console import Console
    from rich.live import Live

    from services.status.render import screen

    def as_line(report: MeshReport) -> None:
        sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
        sys.stdout.flush()

    # Into a pipe or a file no line is too long, and names are left whole.
    narrow = sys.stdout.isatty() or "COLUMNS" in os.environ
    console = Console(width=None if narrow else _UNBROKEN)
    if as_json:
        yield as_line
    elif watch and console.is_terminal:
        with Live(console=console, auto_refresh=False, screen=True) as live:
            yield lambda report: live.update(screen(report), refresh=True)
    else:
        yield lambda report: console.print(screen(report))


def _further(text: str) -> Listed:
    """Raises UsageError unless it is NAME=URL."""
    from services.run_store.discovery import Listed, ServiceRecord
    from services.wire.errors import UsageError

    name, _, url = text.partition("=")
    if not name or not url.startswith(("http://", "https://")):
        raise UsageError(f"{text!r} is no service", "write NAME=URL, such as rewards=http://127.0.0.1:8300")
    # Nobody vouches for it but who asks: no lease is expected of it.
    record = ServiceRecord(name=name, kind="rewards", url=url.rstrip("/"), told_by="--also")
    return Listed(record, alive=True, last_heard=time.time())

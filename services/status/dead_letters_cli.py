"""`rollmesh dead-letters`: what a run took from its stream and did not train on, and why."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.config import options

if TYPE_CHECKING:
    from services.run_store.ledger import Accounts
    from services.run_store.stream import DeadLetter
    from services.wire.errors import UsageError

_RUNS = Path("runs")
"""Where `options.FoundRedisUrl` looks."""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(epilog="Example: rollmesh dead-letters --run-id demo --newest 5")
def dead_letters(
    run_id: options.FoundRunId = None,
    redis_url: options.FoundRedisUrl = None,
    keys_dir: options.KeysDir = None,
    redis_password_file: options.RedisPasswordFile = None,
    newest: Annotated[int, typer.Option(min=1, help="How many to show, the newest first")] = 20,
    tls_dir: options.TlsDir = None,
    as_json: options.Json = False,
) -> None:
    """Show the newest trajectories that were dropped with a reason, and all drops by cause."""
    import asyncio

    import msgspec

    from services.host.run_folder import USUAL_REDIS, running_redis
    from services.run_store.client import check_reachable, reached_by
    from services.security.keys import read_keys
    from services.security.tls import read_trust
    from services.wire.errors import UsageError

    given, redis_url = redis_url, redis_url or running_redis(_RUNS) or USUAL_REDIS
    password = read_keys("reader", keys_dir, {"redis": redis_password_file}).redis
    redis_url = reached_by(redis_url, password, read_trust(tls_dir))
    try:
        asyncio.run(check_reachable(redis_url))
    except UsageError as error:
        ended = _ended() if given is None else None
        if ended is None:
            raise
        raise ended from error
    letters, accounts = asyncio.run(_read(run_id, redis_url, newest))
    if as_json:
        sys.stdout.writelines(msgspec.json.encode(letter).decode() + "\n" for letter in letters)
    else:
        _show(letters, accounts)


def _ended() -> UsageError | None:
    """What is to be said where the newest run has ended, with the Redis that `rollmesh up` had started for it."""
    from services.config.load import load_settings
    from services.host.run_folder import run_folders
    from services.wire.errors import UsageError

    newest = next(iter(run_folders(_RUNS)), None)
    if newest is None or not newest.summary.exists():
        return None
    try:
        if load_settings(newest.config, []).redis_url is not None:
            return None
    except UsageError:  # of another version: what its Redis was is not known
        return None
    kept = f"dead letters are kept while it runs; {newest.summary} has what was dropped, by cause"
    return UsageError("the run's Redis has ended", kept)


async def _read(run_id: str | None, redis_url: str, newest: int) -> tuple[list[DeadLetter], Accounts]:
    from services.observability.mesh_status.collector import find_run
    from services.run_store.client import connect
    from services.run_store.ledger import Ledger
    from services.run_store.stream import DeadLetters

    redis = connect(redis_url)
    try:
        run_id = await find_run(redis, run_id)
        return await DeadLetters(redis, run_id).newest(newest), await Ledger(redis, run_id).accounts()
    finally:
        await redis.aclose()


def _show(letters: list[DeadLetter], accounts: Accounts) -> None:
    from datetime import UTC, datetime

    from rich.console import Console
    from rich.table import Table

    table = Table("settled at", "entry", "cause", "why", "bytes", box=None, pad_edge=False)
    for letter in letters:
        at = datetime.fromtimestamp(letter.settled_at, UTC).strftime("%F %T")
        table.add_row(at, letter.entry, letter.cause, letter.why, str(letter.size))
    console = Console(highlight=False, markup=False)
    console.print(table)
    causes = ", ".join(f"{count} {cause}" for cause, count in sorted(accounts.dropped.items())) or "none"
    console.print(f"dropped of {accounts.published} published: {causes}")

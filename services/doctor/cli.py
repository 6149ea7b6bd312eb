"""`rollmesh doctor`: what is wrong, with cause, evidence and remedy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.config import options

if TYPE_CHECKING:
    from rich.console import RenderableType

    from services.doctor.planned import Planned
    from services.host.run_folder import RunFolder
    from services.policies.diagnosis.finding import Finding
    from services.security.keys import KeyPlaces

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_HELP = """Say what is wrong, with cause, evidence and remedy: of this machine and a run that is planned, or of a run.

Given settings, as for `rollmesh up`: whether such a run can work here, its task tried without a model, and how fast weights
travel. Given a run, or the folder of one or of a plane of `rollmesh serve`: what its files, and its services while it runs,
say. Given nothing: the newest run or plane that runs in ./runs, else a run with default settings.

Exit code 0: nothing is wrong, or warnings alone; 1: an error was found; 2: misuse.

\b
Examples:
  rollmesh doctor
  rollmesh doctor --task python:./letters.py:Letters model.path=models/mine
  rollmesh doctor --recipe smollm2 servers=2 --json
  rollmesh doctor runs/mine
  rollmesh doctor --redis-url redis://127.0.0.1:6379/0 --run-id demo
"""


@app.command(help=_HELP)
def doctor(
    what: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN | SECTION.KEY=VALUE…]", help="A run folder, or settings")
    ] = None,
    task: Annotated[str | None, typer.Option(metavar="NAME", help="Of a planned run, as task=NAME")] = None,
    config: options.OptionalConfig = None,
    recipe: Annotated[str | None, typer.Option(metavar="NAME", help="Settings of a recipe, such as smollm2")] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="Redis of a run that runs, or with settings, of the planned one")
    ] = None,
    run_id: options.FoundRunId = None,
    root: Annotated[Path, typer.Option(help="Where run folders are")] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="Print a JSON array of findings")] = False,
    keys_dir: options.KeysDir = None,
    redis_password_file: options.RedisPasswordFile = None,
    tls_dir: options.TlsDir = None,
) -> None:
    import asyncio

    from services.config.recipes import find_recipe
    from services.doctor.planned import Planned
    from services.host.run_folder import USUAL_REDIS, found_run, running_folder, running_redis
    from services.security.keys import KeyPlaces
    from services.wire.errors import UsageError

    keys = KeyPlaces(keys_dir, redis_password_file, tls_dir)
    named, settings = _apart(what or [])
    if task is not None:
        settings.append(f'task="{task}"')
    if recipe is not None:
        if config is not None:
            raise UsageError("--recipe and --config both say the settings", "give one of them")
        config = find_recipe(recipe)
    planned = bool(settings) or config is not None
    if planned and (named is not None or run_id is not None):
        raise UsageError(f"{named or run_id} is a run, and settings are given", "give one of them")
    if planned and redis_url is not None:
        settings.append(f'redis_url="{redis_url}"')
    if planned:
        looked_at, examining = f"this machine and the planned run{_UNTRIED}", _of_plan(Planned(config, settings, keys))
    elif redis_url is not None or run_id is not None:
        from services.run_store.client import without_password

        url = redis_url or running_redis(root) or USUAL_REDIS
        looked_at = f"{'the one run' if run_id is None else run_id} at {without_password(url)}"
        examining = _of_mesh(url, run_id, keys)
    elif (folder := running_folder(root) if named is None else found_run(named, root, planes=True)) is not None:
        looked_at, examining = _in_words(folder), _of_folder(folder, keys)
    else:
        looked_at = f"this machine and a run with default settings, for nothing runs in {root}{_UNTRIED}"
        examining = _of_plan(Planned(None, [], keys))
    found = asyncio.run(examining)
    _show(found, looked_at, as_json=json)
    if any(each.severity == "error" for each in found):
        raise typer.Exit(1)


def _apart(what: Sequence[str]) -> tuple[str | None, list[str]]:
    """The run and the settings among the arguments. Raises UsageError for two runs."""
    from services.wire.errors import UsageError

    runs = [each for each in what if "=" not in each]
    if len(runs) > 1:
        raise UsageError(f"{' and '.join(runs)} are {len(runs)} runs", "name one; settings are written key=value")
    return (runs[0] if runs else None), [each for each in what if "=" in each]


def _in_words(folder: RunFolder) -> str:
    from services.host.run_folder import is_held

    what = "run" if folder.run_id.is_file() else "rollout plane"
    return f"the {what} in {folder.root}, which {'runs' if is_held(folder) else 'has ended: its files alone'}"


async def _of_plan(planned: Planned) -> list[Finding]:
    from services.doctor.planned import examine_plan

    return await examine_plan(planned)


async def _of_folder(folder: RunFolder, keys: KeyPlaces) -> list[Finding]:
    """Of a run, or of a rollout plane, whose Redis carries one run."""
    from services.doctor.installation import in_thread_installation
    from services.doctor.running import examine_folder
    from services.host.run_folder import is_held
    from services.wire.errors import RollmeshError

    found = [*await in_thread_installation(), *examine_folder(folder)]
    if not is_held(folder) or not folder.redis_url.is_file():
        return found
    url = folder.redis_url.read_text(encoding="utf-8").strip()
    run_id = folder.run_id.read_text(encoding="utf-8").strip() if folder.run_id.is_file() else None
    try:
        of_mesh = await _of_mesh(url, run_id, keys)
    except RollmeshError:
        if is_held(folder):
            raise
        of_mesh = []
    # It may have ended meanwhile, and its services with it.
    return [*found, *of_mesh] if is_held(folder) else [*await in_thread_installation(), *examine_folder(folder)]


async def _of_mesh(url: str, run_id: str | None, keys: KeyPlaces) -> list[Finding]:
    from services.doctor.running import examine_mesh
    from services.observability.mesh_status.collector import find_run
    from services.run_store.client import check_reachable, connect, reached_by
    from services.security.keys import read_keys
    from services.security.tls import read_trust

    trust = read_trust(keys.tls)
    url = reached_by(url, read_keys("reader", keys.folder, {"redis": keys.redis_password}).redis, trust)
    await check_reachable(url)
    redis = connect(url)
    try:
        run = await find_run(redis, run_id)
    finally:
        await redis.aclose()
    return await examine_mesh(url, run, keys, trust)


_UNTRIED = "; no policy was tried: `rollmesh eval` plays the task with one"


def _show(found: Sequence[Finding], looked_at: str, *, as_json: bool) -> None:
    import msgspec
    from rich.console import Console

    if as_json:
        sys.stdout.write(msgspec.json.encode(found).decode() + "\n")
    else:
        Console().print(_table(found, looked_at))


def _table(found: Sequence[Finding], looked_at: str) -> RenderableType:
    """A block of four lines for each: what, what was seen, what to do, where more is said. Errors first."""
    from rich.table import Table
    from rich.text import Text

    from services.observability.terminal import BAD, GOOD, NOTE, as_text

    if not found:
        return Text(as_text(f"nothing is wrong, as far as can be seen, with {looked_at}"), style=GOOD)
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for number, each in enumerate(sorted(found, key=lambda one: one.severity)):
        if number:
            table.add_row("", "")
        style = BAD if each.severity == "error" else NOTE
        table.add_row(Text(each.severity, style=style), Text(as_text(f"{each.id}: {each.cause}"), style=style))
        for name, said in (("evidence", each.evidence), ("remedy", each.remedy), ("runbook", each.runbook)):
            table.add_row(name, Text(as_text(said, lines=True)))
    return table

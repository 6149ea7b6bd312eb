"""`rollmesh weights …`: operate a weight bus. Exit codes: 0 as asked, 1 it failed, 2 misuse, 130 after Ctrl-C."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from services.config import options

if TYPE_CHECKING:
    from pydantic import BaseModel

    from clients.weights.client import WeightsClient
    from services.wire.weights_api import EnginesView, UpdateView, VerifyView, VersionsView, WeightEvent

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="See and steer which weights the engines of a mesh serve.\n\n"
    "Example: rollmesh weights push /models/step-120 --bus-url http://127.0.0.1:8200",
)
BusUrl = Annotated[str, typer.Option(envvar="ROLLMESH_BUS_URL", help="The weight bus")]
WaitS = Annotated[float, typer.Option(min=0.0, help="Seconds to wait until the update has settled; 0: not at all")]
Version = Annotated[int, typer.Argument(min=0, help="A policy version")]
URL = "http://127.0.0.1:8200"
_BAD = ("failed", "cancelled", "superseded", "rolled_back")


@app.command(epilog="Example: rollmesh weights status --json")
def status(
    bus_url: BusUrl = URL,
    admin_key_file: options.AdminKeyFile = None,
    keys_dir: options.KeysDir = None,
    tls_dir: options.TlsDir = None,
    json: options.Json = False,
) -> None:
    """Which engine serves what, and the versions that the bus remembers."""
    with _client(bus_url, admin_key_file, keys_dir, tls_dir) as weights:
        engines, versions = weights.engines(), weights.versions()
    if json:
        show_json(engines)
        show_json(versions)
    else:
        show_status(engines, versions)


@app.command(epilog="Example: rollmesh weights push /models/step-120 --hold")
def push(
    folder: Annotated[Path, typer.Argument(help="Folder of safetensors that bus and engines see under this name")],
    version: Annotated[int | None, typer.Option(min=0, help="Its version; else one more than the newest")] = None,
    hold: Annotated[bool, typer.Option("--hold", help="Stage only; `rollmesh weights commit` flips")] = False,
    wait_s: WaitS = 120.0,
    bus_url: BusUrl = URL,
    admin_key_file: options.AdminKeyFile = None,
    keys_dir: options.KeysDir = None,
    tls_dir: options.TlsDir = None,
    json: options.Json = False,
) -> None:
    """Publish a folder of safetensors: every engine stages it in the background, then flips.

    A version that failed stays failed until it is asked for again.
    """
    path = str(folder.absolute())
    bus = _client(bus_url, admin_key_file, keys_dir, tls_dir)
    again = "mend what is wrong, then `rollmesh weights commit {version}` asks for it again; until then it stays failed"
    _update(bus, wait_s, json, lambda weights: weights.push(path, version=version, hold=hold), after_failure=again)


@app.command(epilog="Example: rollmesh weights commit 7")
def commit(
    version: Version,
    wait_s: WaitS = 120.0,
    bus_url: BusUrl = URL,
    admin_key_file: options.AdminKeyFile = None,
    keys_dir: options.KeysDir = None,
    tls_dir: options.TlsDir = None,
    json: options.Json = False,
) -> None:
    """Flip a held version, let a stopped roll go on, or offer a withdrawn version again."""
    bus = _client(bus_url, admin_key_file, keys_dir, tls_dir)
    _update(bus, wait_s, json, lambda weights: weights.commit(version))


@app.command(epilog="Example: rollmesh weights cancel 7")
def cancel(
    version: Version,
    bus_url: BusUrl = URL,
    admin_key_file: options.AdminKeyFile = None,
    keys_dir: options.KeysDir = None,
    tls_dir: options.TlsDir = None,
    json: options.Json = False,
) -> None:
    """Withdraw a version before its flips are decided."""
    with _client(bus_url, admin_key_file, keys_dir, tls_dir) as weights:
        view = weights.cancel(version)
    (show_json if json else show_update)(view)


@app.command(epilog="Example: rollmesh weights rollback")
def rollback(
    to: Annotated[int | None, typer.Option(min=0, help="The version before, where the bus does not know it")] = None,
    wait_s: WaitS = 120.0,
    bus_url: BusUrl = URL,
    admin_key_file: options.AdminKeyFile = None,
    keys_dir: options.KeysDir = None,
    tls_dir: options.TlsDir = None,
    json: options.Json = False,
) -> None:
    """Bring every engine back to the version before, between two decode steps. One step is kept."""
    bus = _client(bus_url, admin_key_file, keys_dir, tls_dir)
    _update(bus, wait_s, json, lambda weights: weights.rollback(to).update)


@app.command(epilog="Example: rollmesh weights verify --no-canary")
def verify(
    canary: Annotated[bool, typer.Option(help="Also generate tokens greedily at every engine and compare them")] = True,
    bus_url: BusUrl = URL,
    admin_key_file: options.AdminKeyFile = None,
    keys_dir: options.KeysDir = None,
    tls_dir: options.TlsDir = None,
    json: options.Json = False,
) -> None:
    """Have every engine hash what it really serves; exit code 1 unless all of them serve the published bytes."""
    with _client(bus_url, admin_key_file, keys_dir, tls_dir) as weights:
        view = weights.verify(canary=canary)
    (show_json if json else show_verified)(view)
    if not view.match or (view.canary is not None and not view.canary.agree):
        raise typer.Exit(1)


@app.command(epilog="Example: rollmesh weights watch --json")
def watch(
    since: Annotated[str | None, typer.Option(help="Id of the last event seen; else all that are remembered")] = None,
    bus_url: BusUrl = URL,
    admin_key_file: options.AdminKeyFile = None,
    keys_dir: options.KeysDir = None,
    tls_dir: options.TlsDir = None,
    json: options.Json = False,
) -> None:
    """Print what happens on the bus as it happens, until Ctrl-C."""
    with _client(bus_url, admin_key_file, keys_dir, tls_dir) as weights:
        for event in weights.watch(since):
            (show_json if json else show_event)(event)


def _update(
    client: AbstractContextManager[WeightsClient],
    wait_s: float,
    json: bool,
    begin: Callable[[WeightsClient], UpdateView],
    after_failure: str = "",
) -> None:
    """Begin an update, wait for it, show it; exit code 1 when it failed, or an engine did.

    `after_failure`: what to do then, with `{version}` in it.
    """
    with client as weights:
        view = begin(weights)
        if wait_s:
            view = weights.wait(view.version, wait_s)
    (show_json if json else show_update)(view)
    if view.state == "failed" and after_failure and not json:
        _say(after_failure.format(version=view.version))
    if view.state in _BAD or any(engine.state == "failed" for engine in view.engines):
        raise typer.Exit(1)


@contextmanager
def _client(
    bus_url: str, key_file: Path | None, keys_dir: Path | None, tls_dir: Path | None
) -> Iterator[WeightsClient]:
    from clients.weights.client import WeightsClient
    from services.security.keys import read_keys
    from services.security.tls import read_trust

    key, trust = read_keys("operator", keys_dir, {"admin": key_file}).admin, read_trust(tls_dir)
    with WeightsClient(bus_url, key=key, trust=trust) as weights:
        try:
            yield weights
        except KeyboardInterrupt:
            raise typer.Exit(128 + signal.SIGINT) from None


def show_json(view: BaseModel) -> None:
    sys.stdout.write(view.model_dump_json() + "\n")
    sys.stdout.flush()


def show_status(engines: EnginesView, versions: VersionsView) -> None:
    _table(
        ["engine", "version", "staged", "ranks", "url"],
        [
            [each.engine_id, each.policy_version, _or_dash(each.staged_version), each.ranks, each.url]
            for each in engines.engines
        ],
        "no engine is registered",
    )
    _table(
        ["version", "state", "served by", "MiB", "digest"],
        [
            [
                f"{each.version}{' (withdrawn)' if each.withdrawn else ''}",
                each.state,
                ", ".join(each.served_by) or "-",
                f"{each.nbytes / (1 << 20):.1f}",
                each.root_digest[:16] or "-",
            ]
            for each in versions.versions
        ],
        "no version was announced",
    )


def show_update(view: UpdateView) -> None:
    took = "" if view.publish_to_commit_ms is None else f" after {view.publish_to_commit_ms:.0f} ms"
    why = "" if view.why is None else f": {view.why}"
    _say(f"version {view.version} is {view.state}{took}{why}")
    _table(
        ["engine", "state", "MiB", "stage ms", "flip ms", "why"],
        [
            [
                each.engine_id,
                each.state,
                f"{each.bytes_read / (1 << 20):.1f}",
                f"{each.stage_ms:.1f}",
                f"{each.flip_ms:.2f}",
                each.why or "",
            ]
            for each in view.engines
        ],
        "no engine is registered",
    )


def show_verified(view: VerifyView) -> None:
    expected = "no version" if view.version is None else f"version {view.version}"
    _say(f"{expected}: {'every engine serves its bytes' if view.match else 'NOT every engine serves its bytes'}")
    sampled = {} if view.canary is None else {each.engine_id: each for each in view.canary.engines}
    rows: list[Sequence[object]] = []
    for each in view.engines:
        canary = sampled.get(each.engine_id)
        tokens = "" if canary is None else canary.why or " | ".join(" ".join(map(str, row)) for row in canary.tokens)
        rows.append([each.engine_id, each.version, each.why or each.root_digest[:16], tokens])
    _table(["engine", "version", "digest", "greedy tokens"], rows, "no engine is registered")
    if view.canary is not None:
        _say("the canaries agree" if view.canary.agree else "the canaries do NOT agree")


def show_event(event: WeightEvent) -> None:
    at = datetime.fromtimestamp(event.at, UTC).strftime("%H:%M:%S.%f")[:-3]
    version = "" if event.version is None else f" v{event.version}"
    who = "" if event.engine_id is None else f" {event.engine_id}"
    why = "" if event.why is None else f": {event.why}"
    _say(f"{at} {event.kind}{version}{who}{why}")


def _table(heads: Sequence[str], rows: Sequence[Sequence[object]], empty: str) -> None:
    if not rows:
        _say(empty)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for head in heads:
        table.add_column(head, overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    Console().print(table, markup=False)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)

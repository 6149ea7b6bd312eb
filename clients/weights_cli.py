"""`rollmesh weights …`: operate a weight bus. Exit codes: 0 as asked, 1 it failed, 2 misuse, 130 after Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.tls_option import TlsDir

if TYPE_CHECKING:
    from clients.weights import WeightsClient
    from services.wire.weights_api import UpdateView

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="See and steer which weights the engines of a mesh serve.\n\n"
    "Example: rollmesh weights push /models/step-120 --bus-url http://127.0.0.1:8200",
)
BusUrl = Annotated[str, typer.Option(envvar="ROLLMESH_BUS_URL", help="The weight bus")]
KeyFile = Annotated[Path | None, typer.Option(help="File with the bus's admin key, where it asks for one")]
KeysDir = Annotated[Path | None, typer.Option(envvar="ROLLMESH_KEYS_DIR", help="Folder of keys that holds it")]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of tables")]
WaitS = Annotated[float, typer.Option(min=0.0, help="Seconds to wait until the update has settled; 0: not at all")]
Version = Annotated[int, typer.Argument(min=0, help="A policy version")]
URL = "http://127.0.0.1:8200"
_BAD = ("failed", "cancelled", "superseded", "rolled_back")


@app.command(epilog="Example: rollmesh weights status --json")
def status(
    bus_url: BusUrl = URL,
    admin_key_file: KeyFile = None,
    keys_dir: KeysDir = None,
    tls_dir: TlsDir = None,
    json: Json = False,
) -> None:
    """Which engine serves what, and the versions that the bus remembers."""
    from clients.weights_views import show_json, show_status

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
    admin_key_file: KeyFile = None,
    keys_dir: KeysDir = None,
    tls_dir: TlsDir = None,
    json: Json = False,
) -> None:
    """Publish a folder of safetensors: every engine stages it in the background, then flips."""
    path = str(folder.absolute())
    _update(
        *(bus_url, admin_key_file, keys_dir, tls_dir, wait_s, json),
        lambda weights: weights.push(path, version=version, hold=hold),
    )


@app.command(epilog="Example: rollmesh weights commit 7")
def commit(
    version: Version,
    wait_s: WaitS = 120.0,
    bus_url: BusUrl = URL,
    admin_key_file: KeyFile = None,
    keys_dir: KeysDir = None,
    tls_dir: TlsDir = None,
    json: Json = False,
) -> None:
    """Flip a held version, let a stopped roll go on, or offer a withdrawn version again."""
    _update(bus_url, admin_key_file, keys_dir, tls_dir, wait_s, json, lambda weights: weights.commit(version))


@app.command(epilog="Example: rollmesh weights cancel 7")
def cancel(
    version: Version,
    bus_url: BusUrl = URL,
    admin_key_file: KeyFile = None,
    keys_dir: KeysDir = None,
    tls_dir: TlsDir = None,
    json: Json = False,
) -> None:
    """Withdraw a version before its flips are decided."""
    from clients.weights_views import show_json, show_update

    with _client(bus_url, admin_key_file, keys_dir, tls_dir) as weights:
        view = weights.cancel(version)
    (show_json if json else show_update)(view)


@app.command(epilog="Example: rollmesh weights rollback")
def rollback(
    to: Annotated[int | None, typer.Option(min=0, help="The version before, where the bus does not know it")] = None,
    wait_s: WaitS = 120.0,
    bus_url: BusUrl = URL,
    admin_key_file: KeyFile = None,
    keys_dir: KeysDir = None,
    tls_dir: TlsDir = None,
    json: Json = False,
) -> None:
    """Bring every engine back to the version before, between two decode steps. One step is kept."""
    _update(bus_url, admin_key_file, keys_dir, tls_dir, wait_s, json, lambda weights: weights.rollback(to).update)


@app.command(epilog="Example: rollmesh weights verify --no-canary")
def verify(
    canary: Annotated[bool, typer.Option(help="Also draw tokens greedily at every engine and compare them")] = True,
    bus_url: BusUrl = URL,
    admin_key_file: KeyFile = None,
    keys_dir: KeysDir = None,
    tls_dir: TlsDir = None,
    json: Json = False,
) -> None:
    """Have every engine hash what it really serves; exit code 1 unless all of them serve the published bytes."""
    from clients.weights_views import show_json, show_verified

    with _client(bus_url, admin_key_file, keys_dir, tls_dir) as weights:
        view = weights.verify(canary=canary)
    (show_json if json else show_verified)(view)
    if not view.match or (view.canary is not None and not view.canary.agree):
        raise typer.Exit(1)


@app.command(epilog="Example: rollmesh weights watch --json")
def watch(
    since: Annotated[str | None, typer.Option(help="Id of the last event seen; else all that are remembered")] = None,
    bus_url: BusUrl = URL,
    admin_key_file: KeyFile = None,
    keys_dir: KeysDir = None,
    tls_dir: TlsDir = None,
    json: Json = False,
) -> None:
    """Print what happens on the bus as it happens, until Ctrl-C."""
    from clients.weights_views import show_event, show_json

    with _client(bus_url, admin_key_file, keys_dir, tls_dir) as weights:
        for event in weights.watch(since):
            (show_json if json else show_event)(event)


def _update(
    bus_url: str,
    key_file: Path | None,
    keys_dir: Path | None,
    tls_dir: Path | None,
    wait_s: float,
    json: bool,
    begin: Callable[[WeightsClient], UpdateView],
) -> None:
    """Begin an update, wait for it, show it; exit code 1 when it failed, or an engine did."""
    from clients.weights_views import show_json, show_update

    with _client(bus_url, key_file, keys_dir, tls_dir) as weights:
        view = begin(weights)
        if wait_s:
            view = weights.wait(view.version, wait_s)
    (show_json if json else show_update)(view)
    if view.state in _BAD or any(engine.state == "failed" for engine in view.engines):
        raise typer.Exit(1)


@contextmanager
def _client(
    bus_url: str, key_file: Path | None, keys_dir: Path | None, tls_dir: Path | None
) -> Iterator[WeightsClient]:
    from clients.weights import WeightsClient
    from services.key_files import read_keys
    from services.tls import read_trust

    key, trust = read_keys("operator", keys_dir, {"admin": key_file}).admin, read_trust(tls_dir)
    with WeightsClient(bus_url, key=key, trust=trust) as weights:
        try:
            yield weights
        except KeyboardInterrupt:
            raise typer.Exit(128 + signal.SIGINT) from None

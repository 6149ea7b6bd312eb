"""`rollmesh keys …`: the secrets and certificates of a mesh, one file each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make the keys and certificates of a mesh.\n\nExample: rollmesh keys init keys",
)


@app.callback()
def keys() -> None:
    """Make the keys and certificates of a mesh."""


@app.command(epilog="Example: rollmesh keys init keys && rollmesh up --keys-dir keys")
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the key files; made where it is not there")],
) -> None:
    """Write a random agent, admin, peer, metrics, weights, session and redis key to DIR, a file each, for its owner alone.

    A key that is there stays as it is. Every service takes the folder as --keys-dir; docs/keys.md says who shows which key.
    """
    from rich.console import Console

    from services.security.keys import make_keys

    made, kept = make_keys(folder)
    console = Console(soft_wrap=True, highlight=False)
    for path in made:
        console.print(f"made {path}", markup=False)
    for path in kept:
        console.print(f"kept {path}: it was there", markup=False)


@app.command(epilog="Example: rollmesh keys tls tls && rollmesh up --tls-dir tls/localhost")
def tls(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the authority; made where it is not there")],
    hosts: Annotated[
        list[str] | None,
        typer.Argument(metavar="HOST", help="Names and addresses of one host, with commas: gateway,10.0.0.5"),
    ] = None,
    days: Annotated[int, typer.Option(min=1, help="How long a host's certificate holds")] = 825,
) -> None:
    """Make an authority of the mesh's own, and a certificate for each HOST in a folder named after it; else for loopback.

    A host's services take its folder as --tls-dir. DIR/authority.key signs: keep it away from services. A host's folder
    stays if it is there: remove it to make its certificate anew.
    """
    from rich.console import Console

    from services.security.certificates import LOOPBACK_NAMES, make_host, open_authority

    console = Console(soft_wrap=True, highlight=False)
    authority = open_authority(folder)
    for names in [host.split(",") for host in hosts or [",".join(LOOPBACK_NAMES)]]:
        path, made = make_host(folder, names, authority, days=days)
        console.print(f"made {path}" if made else f"kept {path}: it was there", markup=False)

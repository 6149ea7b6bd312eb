"""`rollmesh memory`: what a trainer would take of memory, found without its weights and without a GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from services.config.options import OptionalConfig, overrides_of
from services.wire.errors import UsageError

app = typer.Typer(add_completion=False, rich_markup_mode=None)

_HELP = """Print the memory that a trainer's step takes: its peak by part, and the tightest moment (docs/memory.md).

The trainer's own step is run on tensors without memory. Of the folder config.json is enough. Settings may follow.

\b
Examples:
  rollmesh memory --model models/mine
  rollmesh memory --model models/mine --gpus 8x80 trainer.activation_checkpointing=full
  rollmesh memory --model models/mine --gpus 8x80 --fit
"""


@app.command(help=_HELP, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def memory(
    context: typer.Context,
    model: Annotated[Path, typer.Option(metavar="FOLDER|NAME", help="A model folder; its config.json is read")],
    config: OptionalConfig = None,
    gpus: Annotated[
        str | None, typer.Option(metavar="NxGIB", help="GPUs and GiB of each, 8x80; left out: one rank on a CPU")
    ] = None,
    row: Annotated[
        int | None, typer.Option(min=2, metavar="TOKENS", help="Tokens of a row (default: a pass is one row)")
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Choose checkpointing, offload and tokens of a pass for these GPUs")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="The formula alone: milliseconds in place of minutes")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text")] = False,
) -> None:
    count, device_bytes = (1, None) if gpus is None else read_gpus(gpus)
    if fit and device_bytes is None:
        raise UsageError("--fit needs the memory that there is", "give --gpus, such as 8x80")

    import msgspec
    from rich.console import Console

    from services.config.load import load_settings

    settings = load_settings(config, overrides_of(context.args))

    from trainer.memory.options import Machine
    from trainer.planning.plan import find_folder, make_report

    folder = find_folder(model)
    report = make_report(folder, settings, Machine(count, device_bytes), row=row, fit=fit, quick=quick)
    if as_json:
        typer.echo(msgspec.json.encode(report).decode())
        return
    from trainer.planning.report import as_lines

    console = Console(soft_wrap=True, highlight=False)
    for line in as_lines(report):
        console.print(line, markup=False) if isinstance(line, str) else console.print(line)


def read_gpus(text: str) -> tuple[int, int]:
    """`8x80` as how many there are and the bytes of each. Raises UsageError."""
    found = re.fullmatch(r"(\d+)x(\d+(?:\.\d+)?)", text)
    if found is None or not int(found[1]) or not float(found[2]):
        raise UsageError(f"--gpus {text!r} is no number of GPUs with their GiB", "write 8x80")
    return int(found[1]), int(float(found[2]) * (1 << 30))

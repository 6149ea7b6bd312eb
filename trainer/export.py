"""`rollmesh export`: a run's policy as a Hugging Face folder, in the dtype that engines serve."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from services.config.load import load_settings
from services.host.files import writing
from services.host.run_folder import RunFolder
from services.wire.errors import UsageError

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command(
    help="Write the policy of a run as a Hugging Face folder: safetensors in the serving dtype, configuration, tokenizer, "
    "chat template. Adapters are merged. Prints the folder.\n\n"
    "Example: rollmesh export runs/mine --at 40"
)
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder")],
    at: Annotated[
        int | None, typer.Option(min=0, metavar="VERSION", help="Of a checkpoint (default: the newest there is)")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: RUN/export-VERSION")] = None,
    dtype: Annotated[Literal["float32", "bfloat16"] | None, typer.Option(help="Default: the run's model.dtype")] = None,
    shard_mib: Annotated[int, typer.Option(min=1, help="Largest file of weights")] = 4096,
) -> None:
    from services.host.process import heavy_imports

    folder = RunFolder(run.expanduser().absolute())
    if not folder.config.exists():
        raise UsageError(f"{folder.root} is no run folder", "name one that has a config.toml")
    settings = load_settings(folder.config, [])
    with heavy_imports():
        import torch
        from transformers.utils import logging as transformers_logging

        from trainer.assembly import load_policy
        from trainer.checkpoint import checkpoint
        from trainer.model.adapters import Adapters

    transformers_logging.disable_progress_bar()
    there = checkpoint.good_versions(folder.checkpoints)
    version = at if at is not None else max(there, default=None)
    if version is None:
        raise UsageError(
            f"{folder.checkpoints} has no checkpoint yet", "wait for one, or interrupt the run: it writes one"
        )
    target = (out or folder.root / f"export-{version}").expanduser().absolute()
    if target.exists():
        raise UsageError(f"{target} is there already", "name another --out, or remove it")
    base = settings.model.path or folder.model
    model = load_policy(base)
    lora = settings.trainer.lora
    adapters = Adapters(model, lora, settings.seed) if lora.rank else None
    checkpoint.load_weights(folder.checkpoints, version, model)
    wanted = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype or settings.model.dtype]
    with writing(target):
        checkpoint.save_model(target, model, base, adapters, wanted, shard_mib << 20)
    typer.echo(str(target))

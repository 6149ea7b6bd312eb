"""`rollmesh sft`: train a model folder on examples; or warm-start a tiny policy from demonstrations."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import structlog
import typer

from services.config.options import overrides_of
from services.host.files import write_whole
from services.wire.errors import UsageError
from services.wire.run_metrics import WARM_START, WorkProgress
from trainer.sft.display import Display

if TYPE_CHECKING:
    from services.wire.tasks.demonstrations import Recipe
    from trainer.sft.train import Progress

app = typer.Typer(add_completion=False, rich_markup_mode=None)
_log = structlog.get_logger()

_SEED, _THREADS = 1, 2

_HELP = """Train a Hugging Face folder on examples: chats, prompts with answers, or token ids (docs/sft.md).

Settings may follow as overrides, by the names that a run has for them. With --demonstrations, a tiny policy is warm-started
by a short run instead; the same inputs are trained on once.

\b
Examples:
  rollmesh sft --model smollm2-135m --data chats.jsonl --out models/mine
  rollmesh sft --model models/base --data qa.parquet --out models/mine data.prompt=question epochs=2
  rollmesh sft --model models/base --data chats.jsonl --out models/mine trainer.lora.rank=16
  rollmesh sft --demonstrations demos --seed 1 --out model
"""


@app.command(help=_HELP, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def sft(
    context: typer.Context,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Hugging Face folder to make; it appears whole or not at all")
    ],
    model: Annotated[
        Path | None, typer.Option(metavar="FOLDER|NAME", help="The model to train (`rollmesh models` has names)")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Examples: .jsonl, .jsonl.gz, .parquet, or a folder of the datasets library"),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Settings as TOML; overrides go before it")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, metavar="N", help="Order of examples; the fresh policy (default 1)")
    ] = None,
    demonstrations: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder written by `rollmesh demonstrations`")
    ] = None,
    cache_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Of demonstrations: where warm starts are kept by content")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of demonstrations: torch threads (default 2)")
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0.0, metavar="S", help="Seconds to wait for demonstrations that are being written")
    ] = 0,
    progress_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Of demonstrations: write how far it is here")
    ] = None,
) -> None:
    if (demonstrations is None) == (data is None):
        raise UsageError("sft learns from --data or from --demonstrations", "give one of them")
    # Threads that sleep while they wait for each other: beside a busy neighbour, spinning ones take several times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if demonstrations is not None:
        if model is not None or config is not None or context.args:
            given = [name for name, value in (("--model", model), ("--config", config)) if value is not None]
            raise UsageError(
                f"{' '.join([*given, *context.args])} goes with --data, not with --demonstrations", "leave it out"
            )
        _from_demonstrations(
            demonstrations,
            out,
            _SEED if seed is None else seed,
            cache_dir,
            _THREADS if threads is None else threads,
            wait,
            progress_file,
        )
        return
    of_warm_starts = {
        "--cache-dir": cache_dir,
        "--threads": threads,
        "--wait": wait or None,
        "--progress-file": progress_file,
    }
    for name, value in of_warm_starts.items():
        if value is not None:
            remedy = "set trainer.threads" if name == "--threads" else "leave it out"
            raise UsageError(f"{name} goes with --demonstrations, not with --data", remedy)
    if model is None or data is None:
        raise UsageError("--data needs a model to train", "give --model FOLDER or NAME")
    overrides = [] if seed is None else [f"seed={seed}"]
    _from_data(model, data, out, config, [*overrides, *overrides_of(context.args)])


def _from_data(model: Path, data: Path, out: Path, config: Path | None, overrides: list[str]) -> None:
    out, data = out.expanduser().absolute(), data.expanduser()
    if out.exists():
        raise UsageError(f"{out} is there already", "name another --out, or remove it")

    from services.config.fitting import read_facts
    from services.host.process import heavy_imports, usable_cores
    from services.wire.tasks.tables import read_table
    from trainer.fetch.local import find_model
    from trainer.sft.columns import read_examples
    from trainer.sft.sft_settings import fit_sft, load_sft_settings

    settings, origins = load_sft_settings(config, overrides)
    folder = find_model(model, trust_remote_code=settings.model.trust_remote_code)
    facts = read_facts(folder)
    examples = read_examples(data, read_table(data), settings.data)
    with heavy_imports():
        import torch
        import transformers

        from trainer.io_loop import Interrupt
        from trainer.sft.finetune import Reached, SftArguments, finetune
        from trainer.sft.report import as_lines

    transformers.utils.logging.disable_progress_bar()
    settings, changed = fit_sft(settings, facts, cores=usable_cores(), gpu=torch.cuda.is_available())
    arguments = SftArguments(folder, data, examples, out, settings, origins | changed)
    reached = Reached()
    Interrupt().install()
    try:
        with Display() as display:
            summary = finetune(arguments, display, reached)
    except SystemExit:
        far = f"after step {reached.step} of {reached.steps}" if reached.steps else "before the first step"
        _log.info("stopped", when=far, written="nothing")
        raise
    for line in as_lines(summary, out):
        typer.echo(line)


def _from_demonstrations(
    demonstrations: Path,
    out: Path,
    seed: int,
    cache_dir: Path | None,
    threads: int,
    wait: float,
    progress_file: Path | None,
) -> None:
    from trainer.sft.cache import default_cache_dir, deliver, is_delivered, is_empty, keep, take_cached, warm_start_key
    from trainer.sft.data import folder_digest, is_written, read_recipe, wait_until_written

    cache = cache_dir or default_cache_dir()
    if wait and not is_written(demonstrations):
        if is_empty(cache) and not out.exists():
            # Whatever they say, it has not been trained on yet: what that takes is imported meanwhile.
            _import_libraries()
        wait_until_written(demonstrations, wait)
    recipe = read_recipe(demonstrations)
    key = warm_start_key(folder_digest(demonstrations, recipe), seed)
    if is_delivered(out, key) or take_cached(cache, key, out):
        _log.info("warm start taken from the cache", out=str(out), cache=str(cache))
        return

    _import_libraries()
    import torch
    import transformers

    from trainer.sft.tiny_model import save_policy
    from trainer.sft.train import warm_start

    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(threads)
    with Display() as display, tempfile.TemporaryDirectory() as scratch:

        def told(progress: Progress) -> None:
            _show(display, progress)
            if progress_file is not None:
                write_whole(progress_file, msgspec.json.encode(_in_all(recipe, progress)))

        model = warm_start(demonstrations, recipe, seed, told)
        made = Path(scratch) / "model"
        save_policy(model, made)
        deliver(made, key, out)
        keep(cache, key, made)
    _log.info("warm start done", out=str(out), cache=str(cache))


def _import_libraries() -> None:
    from services.host.process import heavy_imports

    with heavy_imports():
        import trainer.sft.train  # noqa: F401


def _in_all(recipe: Recipe, progress: Progress) -> WorkProgress:
    """Steps of all phases; one that reached its bar early counts whole."""
    names = [phase.name for phase in recipe.phases]
    before = sum(phase.steps for phase in recipe.phases[: names.index(progress.phase)])
    total = sum(phase.steps for phase in recipe.phases)
    return WorkProgress(what=WARM_START, done=before + progress.step, total=total)


def _show(display: Display, progress: Progress) -> None:
    if display.has_bar:
        accuracy = "" if progress.accuracy is None else f" · accuracy {progress.accuracy:.2f}"
        described = f"{progress.phase} · loss {progress.loss:.2f}{accuracy}"
        display.advance(progress.phase, described, progress.step, progress.steps)
        return
    measured = {} if progress.accuracy is None else {"accuracy": round(progress.accuracy, 3)}
    display.say(
        "warm start",
        phase=progress.phase,
        step=progress.step,
        loss=round(progress.loss, 3),
        **measured,
        seconds=round(progress.seconds, 1),
    )

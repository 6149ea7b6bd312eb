"""`rollmesh sft`: warm-start a tiny policy from demonstrations, or take the result of an earlier, equal run."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import structlog
import typer

if TYPE_CHECKING:
    from trainer.sft.train import Progress

app = typer.Typer(add_completion=False)
_log = structlog.get_logger()


@app.command(epilog="Example: rollmesh sft --demonstrations demos --seed 1 --out model")
def sft(
    demonstrations: Annotated[Path, typer.Option(help="Folder written by `rollmesh demonstrations`")],
    out: Annotated[Path, typer.Option(help="Hugging Face folder to make; it appears whole or not at all")],
    seed: Annotated[int, typer.Option(min=0, help="Seeds the fresh policy")] = 1,
    cache_dir: Annotated[Path | None, typer.Option(help="Where warm starts are kept by content")] = None,
    threads: Annotated[int, typer.Option(min=1, help="Torch threads")] = 2,
    wait: Annotated[float, typer.Option(min=0.0, help="Seconds to wait for demonstrations that are being written")] = 0,
) -> None:
    """Warm-start a tiny policy by a short supervised run. Cached by content: the same inputs are trained on once."""
    from trainer.sft.cache import default_cache_dir, deliver, is_delivered, is_empty, keep, take_cached, warm_start_key
    from trainer.sft.data import folder_digest, is_written, read_recipe, wait_until_written

    # Threads that sleep while they wait for each other: beside a busy neighbour, spinning ones take several times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
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
    with _Display() as display, tempfile.TemporaryDirectory() as scratch:
        model = warm_start(demonstrations, recipe, seed, display.show)
        made = Path(scratch) / "model"
        save_policy(model, made)
        deliver(made, key, out)
        keep(cache, key, made)
    _log.info("warm start done", out=str(out), cache=str(cache))


def _import_libraries() -> None:
    from services.host.process import heavy_imports

    with heavy_imports():
        import trainer.sft.train  # noqa: F401


class _Display:
    """A bar on a terminal, a log line a check elsewhere."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bars

        self._bars = Bars(console=Console(stderr=True), transient=True) if sys.stderr.isatty() else None
        self._rows: dict[str, int] = {}

    def __enter__(self) -> _Display:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def show(self, progress: Progress) -> None:
        if self._bars is None:
            measured = {} if progress.accuracy is None else {"accuracy": round(progress.accuracy, 3)}
            _log.info(
                "warm start",
                phase=progress.phase,
                step=progress.step,
                loss=round(progress.loss, 3),
                **measured,
                seconds=round(progress.seconds, 1),
            )
            return
        accuracy = "" if progress.accuracy is None else f" · accuracy {progress.accuracy:.2f}"
        described = f"{progress.phase} · loss {progress.loss:.2f}{accuracy}"
        if progress.phase not in self._rows:
            self._rows[progress.phase] = int(self._bars.add_task(described, total=progress.steps))
        row = self._rows[progress.phase]
        self._bars.update(row, completed=progress.step, description=described)  # type: ignore[arg-type]

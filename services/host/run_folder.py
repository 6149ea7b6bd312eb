"""The run folder: the files of a run, and how a folder is created without damaging another run's.

runs/running-sums-…/
  config.toml      resolved configuration            metrics.jsonl        one line per optimizer step
  rollouts/        rollouts that are kept, to read   checkpoints/         and the trainer's step log
  anomalies/       batches that could not be trained
  curves.png       success, length, staleness        logs/                one file per service
  summary.json     the run in one object             evaluation.json, trainer_report.json   what it was made from
                                                     evaluations.json     those made beside training
  model/           the policy the run started from   demonstrations/, redis/
  format           the number of this layout          run-id               its name in Redis and on the wire
                                                      redis-url            the Redis that carries it while it runs
  tracking/        logging backends' own files        progress.json        how far the start is
  placement.json   the GPUs of each process, where there are GPUs
  lock             held by the `rollmesh up` that works in it
"""

from __future__ import annotations

import asyncio
import fcntl
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import structlog

from services.host.aio import TELL_EVERY_S
from services.host.files import write_whole, writing
from services.wire.errors import DeadlineError, UsageError

MIN_FREE_BYTES = 256 << 20
"""A run of the tiny policy writes about 20 MB; with less than this left a run is not begun."""
_LOOKED_AT_S = 0.05


class RunFolder:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.config = root / "config.toml"
        self.metrics = root / "metrics.jsonl"
        self.rollouts = root / "rollouts"
        self.samples = root / "samples.jsonl"
        """Of runs that an older rollmesh made, two rollouts a step; nobody writes it."""
        self.logs = root / "logs"
        self.checkpoints = root / "checkpoints"
        self.anomalies = root / "anomalies"
        self.curves = root / "curves.png"
        self.summary = root / "summary.json"
        self.evaluation = root / "evaluation.json"
        self.evaluation_before = root / "evaluation_before.json"
        """There from the end of the evaluation before training until the end of the one after it."""
        self.evaluations = root / "evaluations.json"
        self.tracking = root / "tracking"
        self.trainer_report = root / "trainer_report.json"
        self.model = root / "model"
        self.demonstrations = root / "demonstrations"
        self.redis = root / "redis"
        self.bus_state = root / "weight-bus.json"
        self.progress = root / "progress.json"
        """Of the warm start and of evaluations before and after training, while they are made."""
        self.placement = root / "placement.json"
        self.format = root / "format"
        self.run_id = root / "run-id"
        self.redis_url = root / "redis-url"
        self.lock = root / "lock"


FORMAT = 2
"""Of what the trainer finds in the folder of an interrupted run. 1, which has no file `format`: a version is the number of
optimizer steps. 2: versions may be skipped, so that a line of metrics.jsonl may have a version above its step."""


def take_format(folder: RunFolder) -> None:
    """Note that the folder is of FORMAT from here on; older ones are read.

    Raises UsageError for one of a newer format, or that cannot be written.
    """
    try:
        found = folder.format.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        found = None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{folder.format} cannot be read ({error})", "choose another --run-dir") from error
    if found == str(FORMAT):
        return
    if found is not None and found != "1":
        raise UsageError(
            f"{folder.root} is a run folder of format {found[:20]}, this rollmesh reads up to {FORMAT}",
            "end the run with the rollmesh that began it, or choose another --run-dir",
        )
    with writing(folder.format):
        write_whole(folder.format, f"{FORMAT}\n".encode())


def make_run_folder(root: Path, *, min_free_bytes: int = MIN_FREE_BYTES) -> RunFolder:
    """Make `root` (and what lies above it) ready for a new run.

    Raises UsageError, and leaves nothing behind, when it cannot be written, its disk is nearly full, or it holds a run.
    """
    folder = RunFolder(root)
    refuse_taken(folder)
    made = _missing(root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        check_space(root, min_free_bytes)
        folder.logs.mkdir(exist_ok=True)
        probe = folder.logs / ".probe"
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()
    except (OSError, UsageError) as error:
        if made is not None:
            shutil.rmtree(made, ignore_errors=True)
        if isinstance(error, UsageError):
            raise
        raise UsageError(
            f"cannot write the run folder {root} ({error.strerror})", "choose another --run-dir"
        ) from error
    return folder


def refuse_taken(folder: RunFolder) -> None:
    """Raises UsageError for a folder that holds a run."""
    if folder.config.exists():
        raise UsageError(
            f"{folder.root} holds a run already",
            f"`rollmesh up --resume {folder.root}` goes on with it; else choose another --run-dir",
        )


@contextmanager
def held(folder: RunFolder) -> Iterator[None]:
    """Hold the folder, alone, until the block is left or the process has ended.

    Raises UsageError where another process does.
    """
    with writing(folder.lock):
        file = folder.lock.open("a")
    with file:
        if not (_locks(file, fcntl.LOCK_EX) or _locks(file, fcntl.LOCK_EX, after_s=_LOOKED_AT_S)):
            raise UsageError(
                f"another `rollmesh up` works in {folder.root}", "wait for its end, or choose another --run-dir"
            )
        yield


def is_held(folder: RunFolder) -> bool:
    """Whether a process holds the folder (`held`). A folder that cannot be read is nobody's."""
    try:
        file = folder.lock.open("r")
    except OSError:
        return False
    with file:
        # Shared, and for a moment: `held` tries again after such a look.
        return not _locks(file, fcntl.LOCK_SH)


def _locks(file: IO[str], how: int, after_s: float = 0.0) -> bool:
    time.sleep(after_s)
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def run_folders(root: Path) -> list[RunFolder]:
    """The run folders in `root`, the one that was begun last first; none where `root` is not there."""
    return [folder for folder in _folders(root) if folder.run_id.is_file()]


def _folders(root: Path) -> list[RunFolder]:
    """Those of runs, and of standing rollout planes (`rollmesh serve`), the newest first."""
    if not root.is_dir():
        return []
    found = [RunFolder(each) for each in root.iterdir() if (each / "config.toml").is_file()]
    return sorted(found, key=lambda folder: folder.config.stat().st_mtime, reverse=True)


def found_run(name: str | None, root: Path, *, planes: bool = False) -> RunFolder:
    """The run folder of this path, or of this name in `root`; left out: the newest there. `planes`: or a standing plane's.

    Raises UsageError for none.
    """
    known = _folders(root) if planes else run_folders(root)
    if name is None:
        if not known:
            raise UsageError(f"there is no run in {root}", "name a run folder, or say --root")
        return known[0]
    for place in (Path(name), root / name):
        folder = RunFolder(place.expanduser().absolute())
        if folder.config.is_file() and (planes or folder.run_id.is_file()):
            return folder
    shown = ", ".join(folder.root.name for folder in known[:5]) or "none"
    raise UsageError(f"{name} is no run folder", f"`rollmesh runs` lists them; the newest in {root}: {shown}")


USUAL_REDIS = "redis://127.0.0.1:6379/0"


def note_redis(folder: RunFolder, url: str) -> None:
    """Write down where the Redis of a run or plane is, for `running_redis`; a password in `url` would be written too.

    Raises UsageError where it cannot be written.
    """
    with writing(folder.redis_url):
        write_whole(folder.redis_url, f"{url}\n".encode())


def running_folder(root: Path) -> RunFolder | None:
    """Of the newest run, or rollout plane, that runs in `root`; None where none does."""
    return next(_running(root), None)


def _running(root: Path) -> Iterator[RunFolder]:
    return (folder for folder in _folders(root) if is_held(folder))


def running_redis(root: Path) -> str | None:
    """The address of the Redis of the newest run or plane that runs in `root` and has one; None where none does."""
    newest = next((folder for folder in _running(root) if folder.redis_url.is_file()), None)
    return None if newest is None else newest.redis_url.read_text(encoding="utf-8").strip()


def free_bytes(path: Path) -> int:
    """Bytes that may still be written to the disk of `path`."""
    return shutil.disk_usage(path).free


def check_space(root: Path, min_free_bytes: int = MIN_FREE_BYTES) -> None:
    """Raises UsageError where the disk of `root`, which may still be made, has less left."""
    free = free_bytes(next(each for each in (root, *root.parents) if each.exists()))
    if free < min_free_bytes:
        raise UsageError(
            f"the disk of {root} has {free >> 20} MiB left, a run wants {min_free_bytes >> 20} MiB",
            "make room, or choose a --run-dir on another disk",
        )


def _missing(path: Path) -> Path | None:
    """The topmost folder that does not exist yet and is created with `path`."""
    topmost = None
    for folder in (path, *path.parents):
        if folder.exists():
            break
        topmost = folder
    return topmost


_log = structlog.get_logger()
_POLL_S = 0.02


async def wait_for_model(path: Path, deadline_s: float) -> None:
    """Wait for a model folder that another process is making. Raises DeadlineError after `deadline_s` seconds."""
    for pause_s in _pauses_until_complete(path, deadline_s):
        await asyncio.sleep(pause_s)


def wait_for_model_blocking(path: Path, deadline_s: float) -> None:
    """As `wait_for_model`, for code that has no event loop."""
    for pause_s in _pauses_until_complete(path, deadline_s):
        time.sleep(pause_s)


def _pauses_until_complete(path: Path, deadline_s: float) -> Iterator[float]:
    if is_complete(path):
        return
    began = told = time.monotonic()
    _log.info("waiting", waiting_for=f"the model folder {path}", at_most_s=deadline_s)
    while not is_complete(path):
        now = time.monotonic()
        if now - told >= TELL_EVERY_S:
            told = now
            _log.info("waiting", waiting_for=f"the model folder {path}", after_s=round(now - began))
        if now - began > deadline_s:
            raise DeadlineError(
                f"no model appeared in {path} within {deadline_s:g} s",
                "give --model a Hugging Face folder, or see what became of the warm start; model.wait_timeout_s gives it "
                "longer",
            )
        yield _POLL_S


def is_complete(path: Path) -> bool:
    """Whether the model folder is complete: it appears by an atomic rename, so one file stands for all."""
    return (path / "config.json").exists()

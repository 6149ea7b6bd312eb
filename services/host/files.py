"""Atomic creation of folders and files (written under a temporary name, then renamed), tailing files, shared-memory files.

    .making-<host>-<pid>-<random>/ ──write──► fsync ──rename──► name/

A process that dies in between leaves only a `.making-…` folder, which the next one removes.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.wire.errors import UsageError

_MAKING = ".making-"


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Yield an empty folder; on leaving the block it becomes `target`, which must not exist or be empty.

    Raises FileExistsError (or OSError with ENOTEMPTY) when another process was first. After any error nothing is left.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_unfinished(target.parent)
    making = target.parent / f"{_MAKING}{_host()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    making.mkdir()
    try:
        yield making
        for path in [*making.rglob("*"), making]:
            sync(path)
        making.rename(target)
        sync(target.parent)
    finally:
        shutil.rmtree(making, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError, such as of a full disk, into a UsageError that names `path`."""
    try:
        yield
    except OSError as error:
        raise UsageError(
            f"cannot write {path} ({error.strerror or error})", "free disk space, or correct its permissions"
        ) from error


def write_whole(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Write a file atomically: a reader never sees a part of it. `durable`: nor after a power cut."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    if durable:
        sync(partial)
    partial.replace(path)
    if durable:
        sync(path.parent)


def end_of(path: Path, most_bytes: int) -> str:
    """The end of a file of text, such as a log; empty where it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - most_bytes))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def remove_unfinished(parent: Path) -> None:
    """Remove unfinished folders in `parent` of processes of this host that have died."""
    for leftover in parent.glob(f"{_MAKING}{_host()}-*"):
        pid = leftover.name.removeprefix(f"{_MAKING}{_host()}-").partition("-")[0]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(leftover, ignore_errors=True)


def _host() -> str:
    return platform.node().replace("-", "_") or "host"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def sync(path: Path) -> None:
    """Make a file's bytes, or a folder's names, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LineTail:
    """Follows a file of lines that another process appends to: each read goes on where the last one stopped.

    An unfinished line is read next time, or never, where its writer truncates it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read = 0

    def new_lines(self) -> list[bytes]:
        """The whole lines that were added, without their ends; none where there is no file."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._read)
                added = file.read()
        except FileNotFoundError:
            return []
        whole = added[: added.rfind(b"\n") + 1]
        self._read += len(whole)
        return whole.splitlines()


_DEV_SHM = Path("/dev/shm")
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def shm_directory() -> Path:
    """Where arenas live: `/dev/shm`, or the temporary folder where there is none (macOS)."""
    return _DEV_SHM if _DEV_SHM.is_dir() else Path(tempfile.gettempdir())


def shm_prefix(run_id: str) -> str:
    """Prefix of the names of a run's shared-memory files, by which they are cleaned up after a kill -9.

    Raises UsageError for a run id that is not safe in a file name.
    """
    if not _SAFE.fullmatch(run_id):
        raise UsageError(f"the run id {run_id!r} cannot be part of a file name", "use letters, digits, dots and dashes")
    return f"rollmesh-{run_id}-"


def remove_shm_files(run_id: str) -> list[Path]:
    """Unlink what a killed process of the run left behind; returns the paths. Call when no process of it lives."""
    removed = []
    for path in shm_directory().glob(f"{shm_prefix(run_id)}*"):
        path.unlink(missing_ok=True)
        removed.append(path)
    return removed

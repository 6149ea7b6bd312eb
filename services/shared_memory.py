"""Names of the shared-memory files of a run, so that whoever starts a run can clean up after a kill -9."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

from services.wire.errors import UsageError

_DEV_SHM = Path("/dev/shm")
_SAFE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def shm_directory() -> Path:
    """Where arenas live: `/dev/shm`, or the temporary folder where there is none (macOS)."""
    return _DEV_SHM if _DEV_SHM.is_dir() else Path(tempfile.gettempdir())


def shm_prefix(run_id: str) -> str:
    """What the name of every shared-memory file of the run starts with. Raises UsageError for an unsafe run id."""
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

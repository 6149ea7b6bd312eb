"""Cache of warm starts, keyed by content: the same demonstrations, seed and recipe code are not trained twice.

    key = blake2b(demonstrations, seed, model shape, RECIPE_VERSION)      <cache>/<key>/ = a Hugging Face folder

No torch here: the cache is asked before it would be imported.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import structlog

from services.host.files import appearing
from services.host.models import cache_folder
from services.wire.errors import UsageError

RECIPE_VERSION = 1
"""Raise it whenever the code of the warm start changes what comes out."""
MODEL_SHAPE = "qwen3-64x2"
_KEY_FILE = "warm_start.key"

_log = structlog.get_logger()


def warm_start_key(demonstrations_digest: str, seed: int) -> str:
    """Names the result of a warm start by all that goes into it."""
    parts = f"{RECIPE_VERSION}/{MODEL_SHAPE}/{seed}/{demonstrations_digest}"
    return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


def default_cache_dir() -> Path:
    """`warm-start` in our cache folder."""
    return cache_folder() / "warm-start"


def is_empty(cache_dir: Path) -> bool:
    """Whether nothing is kept there yet, of whatever key."""
    try:
        return next(cache_dir.iterdir(), None) is None
    except OSError:
        return True


def take_cached(cache_dir: Path, key: str, out: Path) -> bool:
    """Copy the cached warm start to `out`; False when there is none."""
    entry = cache_dir / key
    if not _is_complete(entry, key):
        return False
    deliver(entry, key, out)
    return True


def keep(cache_dir: Path, key: str, made: Path) -> None:
    """Put the folder `made` into the cache. A cache that cannot be written costs time later, not the result now."""
    try:
        with appearing(cache_dir / key) as folder:
            _fill(folder, made, key)
    except OSError as error:
        if not _is_complete(cache_dir / key, key):
            _log.warning("warm start not cached", cache=str(cache_dir), why=error.strerror)


def is_delivered(out: Path, key: str) -> bool:
    """Whether `out` holds this very warm start already."""
    return _is_complete(out, key)


def deliver(made: Path, key: str, out: Path) -> None:
    """Make `out` appear whole, as a copy of `made`. Raises UsageError when it cannot be written or holds something else."""
    try:
        with appearing(out) as folder:
            _fill(folder, made, key)
    except OSError as error:
        if is_delivered(out, key):
            return
        raise UsageError(f"cannot write the model folder {out} ({error.strerror})", "choose another --out") from error


def _fill(folder: Path, source: Path, key: str) -> None:
    shutil.copytree(source, folder, dirs_exist_ok=True)
    (folder / _KEY_FILE).write_text(key + "\n")


def _is_complete(folder: Path, key: str) -> bool:
    try:
        return (folder / "config.json").exists() and (folder / _KEY_FILE).read_text().strip() == key
    except OSError:
        return False

"""Waiting for a model folder that another process is still making.

A model folder appears by an atomic rename, so `config.json` in place means that all of it is.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import structlog

from services.wire.errors import DeadlineError

_log = structlog.get_logger()
_POLL_S = 0.02


async def wait_for_model(path: Path, deadline_s: float) -> None:
    """Return when the folder is complete. Raises DeadlineError after `deadline_s` seconds."""
    if is_complete(path):
        return
    _log.info("waiting", waiting_for=f"the model folder {path}")
    ends = time.monotonic() + deadline_s
    while not is_complete(path):
        if time.monotonic() > ends:
            raise _late(path, deadline_s)
        await asyncio.sleep(_POLL_S)


def wait_for_model_blocking(path: Path, deadline_s: float) -> None:
    """As `wait_for_model`, for code that has no event loop."""
    if is_complete(path):
        return
    _log.info("waiting", waiting_for=f"the model folder {path}")
    ends = time.monotonic() + deadline_s
    while not is_complete(path):
        if time.monotonic() > ends:
            raise _late(path, deadline_s)
        time.sleep(_POLL_S)


def is_complete(path: Path) -> bool:
    """Whether the model folder is there, whole."""
    return (path / "config.json").exists()


def _late(path: Path, deadline_s: float) -> DeadlineError:
    return DeadlineError(
        f"no model appeared in {path} within {deadline_s:g} s",
        "give --model a Hugging Face folder, or see what became of the warm start",
    )

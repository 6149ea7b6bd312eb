"""Importing torch and its like: a fifth faster, and out of the way of every later garbage collection.

The collector walks all objects again and again while modules make hundreds of thousands of them, and finds nothing. After
the block they are frozen: a later full collection, which would stop a decode loop for tenths of a second, skips them.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager

_LOUD = ("transformers",)
"""Libraries whose loggers come with a handler of their own, which writes lines as nobody else does."""


@contextmanager
def heavy_imports() -> Iterator[None]:
    """No garbage collection inside the block; what is alive at its end is never looked at again.

    What the libraries log goes where all logs go (`services.telemetry`).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        take_over_logs()


def take_over_logs() -> None:
    """Once the libraries are imported; for whoever uses them before the block above has ended."""
    for name in _LOUD:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def leave_quickly() -> None:
    """Call it last: the interpreter's end would search all modules' objects for cycles, a second with torch loaded."""
    gc.freeze()
    gc.disable()

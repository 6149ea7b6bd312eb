"""Importing torch and its like: a fifth faster, and out of the way of every later garbage collection.

The collector walks all objects again and again while modules make hundreds of thousands of them, and finds nothing. After
the block they are frozen: a later full collection, which would stop a decode loop for tenths of a second, skips them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def heavy_imports() -> Iterator[None]:
    """No garbage collection inside the block; what is alive at its end is never looked at again."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def leave_quickly() -> None:
    """Call it last: the interpreter's end would search all modules' objects for cycles, a second with torch loaded."""
    gc.freeze()
    gc.disable()

"""Copying bytes of weights: by memcpy, past the caches where they are many (`services.host.process`).

A copy past the caches takes half the time of another, unless it writes a little further within a page than it reads: then
the processor takes what is read for what was just written, and it takes twice the time (measured on Zen 3; 16 to 512 bytes
further, less and less up to 1024). Such copies are made in parts that are small enough for the caches.
"""

from __future__ import annotations

import ctypes

import numpy as np

from services.host.process import STREAMED_BYTES

PAGE = 4096
_ALIASED = 1024


def streams_well(nbytes: int, source: int, target: int) -> bool:
    """Whether a copy of `nbytes` between these addresses goes past the caches, and is the faster for it."""
    return nbytes >= STREAMED_BYTES and not 0 < (target - source) % PAGE < _ALIASED


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """`target[:] = source`, without the interpreter lock that a memoryview would keep.

    Raises ValueError for other sizes, or for a target that cannot be written.
    """
    read, written = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    if len(read) != len(written) or not written.flags.writeable:
        raise ValueError(f"{len(read)} bytes into {len(written)}, writable: {written.flags.writeable}")
    copy_memory(read.ctypes.data, written.ctypes.data, len(read))


def copy_memory(source: int, target: int, nbytes: int) -> None:
    """Copy `nbytes` between addresses of memory of this process, which must not overlap; without the interpreter lock."""
    if nbytes < STREAMED_BYTES or streams_well(nbytes, source, target):
        ctypes.memmove(target, source, nbytes)
        return
    at_once = STREAMED_BYTES - PAGE
    for start in range(0, nbytes, at_once):
        ctypes.memmove(target + start, source + start, min(at_once, nbytes - start))

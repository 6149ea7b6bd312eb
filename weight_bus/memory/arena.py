"""An arena: one contiguous, writable, zeroed range of bytes that holds a whole policy version.

    private_arena   anonymous memory of this process (nixl reads it from outside)
    shared_arena    a file in shared memory, mode 0600, unlinked on close
    a device's      `weight_bus.memory.device`

A process killed with -9 leaves its files behind; `services.host.files.remove_shm_files` takes them away by prefix.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import uuid
from contextlib import suppress
from pathlib import Path

import numpy as np

from services.host.files import remove_shm_files, shm_directory, shm_prefix
from services.host.process import STREAMED_BYTES
from services.wire.errors import UsageError
from weight_bus.errors import TransportError

__all__ = ["Arena", "populate", "private_arena", "remove_shm_files", "shared_arena", "shm_directory", "shm_prefix"]


class Arena:
    """`view`: the bytes. `path`: its file, for a shared arena. Close it when no tensor refers to it any more.

    `part`: the bytes of `memory` that it is made of, all where left out.
    """

    on_device = False

    def __init__(self, memory: mmap.mmap, path: Path | None = None, part: slice | None = None) -> None:
        self._memory = memory
        self.path = path
        self.view = memoryview(memory)[part or slice(None)]
        self.nbytes = self.view.nbytes

    @property
    def address(self) -> int:
        return address_of(self.view)

    def host(self, start: int, stop: int, into: memoryview | None = None) -> memoryview:  # noqa: ARG002
        """Bytes `start` to `stop`, in the host's memory: the arena's own; of a device's a copy, in `into` where given."""
        return self.view[start:stop]

    def host_buffer(self, nbytes: int) -> memoryview | None:  # noqa: ARG002
        """For `host` to copy into, again and again; None where it copies nothing."""
        return None

    def settle(self) -> None:
        """Wait until what torch was asked to write here is written."""

    def close(self) -> None:
        """Unlink the file and give the memory back; bytes with a live view are freed with the last one."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
        self.view.release()
        try:
            self._memory.close()
        except BufferError:
            # A tensor still refers to the arena: unmapping it now would crash the process on its next access.
            return


def address_of(view: memoryview) -> int:
    """Where writable bytes begin in this process's memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def populate(arena: Arena) -> None:
    """Touch every page of a zeroed arena, so that no page fault slows the first version down."""
    pages = np.frombuffer(arena.view, np.uint8)[:: mmap.PAGESIZE]
    pages[:] = 0


def private_arena(nbytes: int) -> Arena:
    """`nbytes` of anonymous memory, on huge pages where the system has them for the asking.

    Raises TransportError when the machine has not that much.
    """
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError) as error:
        raise TransportError(f"no arena of {nbytes} bytes could be mapped ({error})") from error
    _prefer_huge_pages(memory)
    return Arena(memory)


def shared_arena(nbytes: int, run_id: str) -> Arena:
    """`nbytes` in a file of shared memory that belongs to this user alone.

    Raises UsageError when shared memory is full or cannot be written: the user can fix both.
    """
    path = shm_directory() / f"{shm_prefix(run_id)}{uuid.uuid4().hex[:12]}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise UsageError(f"cannot make {path} ({error.strerror})", "check that shared memory can be written") from error
    try:
        _reserve(descriptor, nbytes)
        return Arena(mmap.mmap(descriptor, nbytes), path)
    except OSError as error:
        path.unlink(missing_ok=True)
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG, errno.EDQUOT):
            raise UsageError(
                f"{path.parent} has no {nbytes} bytes left for a weight arena",
                "free some, enlarge it (docker: --shm-size) or set weights.transport=nixl",
            ) from error
        raise TransportError(f"no arena of {nbytes} bytes could be mapped at {path} ({error})") from error
    finally:
        os.close(descriptor)


def _prefer_huge_pages(memory: mmap.mmap) -> None:
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        # A kernel without huge pages refuses the advice; small pages work too.
        with suppress(OSError):
            memory.madvise(advice)


def _reserve(descriptor: int, nbytes: int) -> None:
    # A sparse file would be killed by SIGBUS on the first write that finds shared memory full.
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
    else:
        os.ftruncate(descriptor, nbytes)


# memcpy of many bytes uses non-temporal stores (`services.host.process`), which take half the time of cached ones. But
# where the target lies 16 to 1024 bytes further within a page than the source, loads alias with the stores before them
# and the copy takes twice the time (4K aliasing, measured on Zen 3). Such copies are made in parts that fit the caches.

PAGE = 4096
_ALIASED = 1024
_HELD_BYTES = 64 << 10


def streams_well(nbytes: int, source: int, target: int) -> bool:
    """Whether a copy of `nbytes` between these addresses uses non-temporal stores and is faster by it."""
    return nbytes >= STREAMED_BYTES and not 0 < (target - source) % PAGE < _ALIASED


def copy_bytes(source: memoryview, target: memoryview) -> None:
    """`target[:] = source`; of many bytes without the interpreter lock that a memoryview keeps.

    Beside threads that compute, getting the lock back takes as long as copying some hundred kilobytes.
    Raises ValueError for other sizes, or for a target that cannot be written.
    """
    if source.nbytes != target.nbytes or target.readonly:
        raise ValueError(f"{source.nbytes} bytes into {target.nbytes}, writable: {not target.readonly}")
    if source.nbytes <= _HELD_BYTES:
        if source.nbytes:  # an empty view cannot be cast
            target.cast("B")[:] = source.cast("B")
        return
    read, written = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    copy_memory(read.ctypes.data, written.ctypes.data, len(read))


def copy_memory(source: int, target: int, nbytes: int) -> None:
    """Copy `nbytes` between addresses of memory of this process, which must not overlap; without the interpreter lock."""
    if nbytes < STREAMED_BYTES or streams_well(nbytes, source, target):
        ctypes.memmove(target, source, nbytes)
        return
    at_once = STREAMED_BYTES - PAGE
    for start in range(0, nbytes, at_once):
        ctypes.memmove(target + start, source + start, min(at_once, nbytes - start))

"""The shared-memory transport: processes of the same user and host read the publisher's arena with one copy.

On Linux the arena is sealed memory and a read is a memcpy out of a mapping. Elsewhere it is a file of shared memory that
is read, not mapped: one that shrinks under a reader is then an error and not a SIGBUS.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import platform
import re
import stat
import uuid
from collections.abc import Iterable, Iterator
from functools import cache
from io import FileIO
from pathlib import Path

import numpy as np
import psutil

from services.host.files import shm_prefix
from services.wire.errors import UsageError
from weight_bus.errors import TransportError
from weight_bus.manifest.manifest import Manifest, ShmSource, Source
from weight_bus.memory.arena import Arena, copy_bytes, shared_arena, shm_directory
from weight_bus.transports.base import check_range, read_in_order

_OPEN_FILES = 64
"""Two arenas and two of deltas for each publishing rank; those of publishers that are gone go first."""


class ShmExporter:
    """`sealed` None: sealed memory where the system has it, else files."""

    name = "shm"

    def __init__(self, run_id: str, *, sealed: bool | None = None) -> None:
        self._run_id = run_id
        self._sealed = memfd_available() if sealed is None else sealed
        self._arenas: list[Arena] = []

    def allocate(self, nbytes: int) -> Arena:
        """Raises UsageError when memory is full."""
        arena: Arena = sealed_arena(nbytes, self._run_id) if self._sealed else shared_arena(nbytes, self._run_id)
        self._arenas.append(arena)
        return arena

    def export(self, arena: Arena, draft: Manifest | None = None) -> Source:  # noqa: ARG002
        path = arena.link if isinstance(arena, SealedArena) else arena.path
        if path is None:
            raise TransportError("a private arena cannot be exported through shared memory")
        return ShmSource(path=str(path), length=arena.nbytes, host=host_identity())

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()


class ShmReader:
    """Reads both kinds of arena. Mappings stay open: pages that were read once cause no page fault again."""

    name = "shm"

    def __init__(self) -> None:
        self._open: dict[str, SealedMapping | _File] = {}

    def can_read(self, source: Source) -> bool:
        return isinstance(source, ShmSource) and source.host == host_identity() and Path(source.path).exists()

    def read(self, source: Source, offset: int, out: memoryview) -> None:
        if not isinstance(source, ShmSource):
            raise TransportError(f"the shm reader cannot read a {type(source).__name__}")
        check_range(source.length, offset, len(out))
        self._opened(source).read(offset, out)

    def read_many(self, source: Source, pieces: Iterable[tuple[int, memoryview]]) -> Iterator[int]:
        return read_in_order(self, source, pieces)

    def read_at_once(self, source: Source, offset: int, out: memoryview) -> bool:
        """`QuickReader`: from memory that is mapped already."""
        if not isinstance(source, ShmSource) or not isinstance(self._open.get(source.path), SealedMapping):
            return False
        self.read(source, offset, out)
        return True

    def close(self) -> None:
        for opened in self._open.values():
            opened.close()
        self._open.clear()

    def _opened(self, source: ShmSource) -> SealedMapping | _File:
        opened = self._open.get(source.path)
        if opened is not None and (not isinstance(opened, SealedMapping) or _inode(source.path) == opened.inode):
            return opened
        if opened is not None:
            # Process and descriptor numbers are reused: this is another publisher's arena, or none any more.
            self._open.pop(source.path).close()
        fresh = SealedMapping(source.path, source.length) if is_sealed_path(source.path) else _File(source)
        while len(self._open) >= _OPEN_FILES:
            # Arenas of publishers that are gone: an open one would keep their memory.
            self._open.pop(next(iter(self._open))).close()
        self._open[source.path] = fresh
        return fresh


class _File:
    """An arena that is a file in the shared memory's folder, read with plain reads."""

    def __init__(self, source: ShmSource) -> None:
        path = Path(source.path)
        # The path came over the wire: only a regular file of the arenas' own folder and name is read.
        if path.parent != shm_directory() or not path.name.startswith("rollmesh-"):
            raise TransportError(f"{source.path} is not the path of a weight arena")
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise TransportError(f"cannot open {source.path} ({error.strerror})", "is the publisher gone?") from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != source.length:
            os.close(descriptor)
            raise TransportError(f"{source.path} is no arena of {source.length} bytes")
        self._file = FileIO(descriptor, "r")
        self._path = source.path

    def read(self, offset: int, out: memoryview) -> None:
        read_file(self._file, self._path, offset, out)

    def close(self) -> None:
        self._file.close()


def read_file(file: FileIO, path: str, offset: int, out: memoryview) -> None:
    """Fill `out` from `offset` of a file. Raises TransportError when it ends before."""
    done = 0
    try:
        file.seek(offset)
        while done < len(out):
            got = file.readinto(out[done:])
            if not got:
                raise TransportError(f"{path} ended after {offset + done} bytes, {len(out) - done} more were asked for")
            done += got
    except OSError as error:
        raise TransportError(f"cannot read {path} ({error.strerror})") from error


def _inode(path: str) -> tuple[int, int] | None:
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


@cache
def host_identity() -> str:
    """Names this host until it reboots; containers of one host differ by host name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()}/{boot.read_text().strip()}" if boot.exists() else platform.node()


# Missing in Python's fcntl: existing writable mappings stay, nobody else can write or punch holes.
_SEAL_FUTURE_WRITE = 0x0010
# Missing in Python's mmap (Linux 6.1): collapse these pages into huge ones, also where files get none by default.
_MADV_COLLAPSE = 25
# Missing in Python's mmap: put a mapping at this very address, over what is there.
_MAP_FIXED = 0x10
_HUGE_PAGE = 2 << 20
_TRIES = 8
_NAME = "rollmesh-"
_PATH = re.compile(r"/proc/[0-9]+/fd/[0-9]+")


def memfd_available() -> bool:
    """Whether this system has sealed memory (Linux)."""
    return hasattr(os, "memfd_create") and Path("/proc/self/fd").is_dir()


def is_sealed_path(path: str) -> bool:
    return _PATH.fullmatch(path) is not None


class SealedArena(Arena):
    """An arena in a sealed memfd, which other processes of the same user and host can map safely.

        publisher   memfd_create ─► reserve ─► map for writing ─► seal: no shrinking, no growing, no further writer
        receiver    /proc/PID/fd/N ─► check name, seals and size ─► map for reading

    A plain file that shrinks under a mapping kills its reader (SIGBUS); a sealed one cannot shrink. It needs no space in
    /dev/shm, which containers keep small, and is freed with its owner, also by kill -9. `link`: its path for other
    processes; `huge`: whether the kernel put it into huge pages.
    """

    def __init__(self, memory: mmap.mmap, part: slice, descriptor: int, *, huge: bool) -> None:
        super().__init__(memory, part=part)
        self._descriptor = descriptor
        self.huge = huge
        self.link = f"/proc/{os.getpid()}/fd/{descriptor}"

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        super().close()


def sealed_arena(nbytes: int, run_id: str) -> SealedArena:
    """`nbytes` of sealed memory. Raises UsageError when the machine has not that much left."""
    free = psutil.virtual_memory().available
    if nbytes > free:
        # Reserving it would start the out-of-memory killer instead of failing.
        raise _full(nbytes, f"{free} are free")
    descriptor = os.memfd_create(f"{shm_prefix(run_id)}{uuid.uuid4().hex[:12]}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        memory, part = _map(descriptor, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        huge = _make_huge(memory, part.start, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _SEAL_FUTURE_WRITE)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise _full(nbytes, str(error.strerror)) from error
        raise TransportError(f"no sealed arena of {nbytes} bytes could be made ({error})") from error
    return SealedArena(memory, part, descriptor, huge=huge)


def _full(nbytes: int, why: str) -> UsageError:
    return UsageError(
        f"memory has no {nbytes} bytes left for a weight arena ({why})",
        "free some, serve a smaller dtype or use a larger machine",
    )


class SealedMapping:
    """Another process's sealed arena, mapped here for reading."""

    def __init__(self, path: str, length: int) -> None:
        """Raises TransportError unless `path` is now a sealed arena of `length` bytes."""
        # O_NONBLOCK: the path came over the wire, and opening a pipe would wait.
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise TransportError(f"cannot open {path} ({error.strerror})", "is the publisher gone?") from error
        try:
            status = os.fstat(descriptor)
            self.inode = (status.st_dev, status.st_ino)
            if not _is_sealed_arena(descriptor, status) or status.st_size != length:
                raise TransportError(f"{path} is no sealed weight arena of {length} bytes", "is the publisher gone?")
            self._memory, part = _map(descriptor, length, mmap.PROT_READ)
            _make_huge(self._memory, part.start, length)
        except (OSError, ValueError) as error:
            raise TransportError(f"cannot map {path} ({error})") from error
        finally:
            os.close(descriptor)
        self._bytes = np.frombuffer(self._memory, dtype=np.uint8)[part]

    def read(self, offset: int, out: memoryview) -> None:
        """One copy; the interpreter lock is released meanwhile. The range must lie inside."""
        copy_bytes(self._bytes[offset : offset + len(out)].data, out)

    def close(self) -> None:
        del self._bytes
        self._memory.close()


def _map(descriptor: int, nbytes: int, protection: int) -> tuple[mmap.mmap, slice]:
    """A shared mapping, and the part of it that is the descriptor's: huge pages need one that begins on their boundary.

    So the addresses of one huge page more are taken, and the mapping put over them where it belongs. The caller owns
    the whole. Raises OSError.
    """
    whole = mmap.mmap(-1, nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=protection)
    address = _address(whole)
    start = -address % _HUGE_PAGE
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    wanted, length = ctypes.c_void_p(address + start), ctypes.c_size_t(nbytes)
    placed = libc.mmap(wanted, length, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor, ctypes.c_long(0))
    if placed != wanted.value:
        whole.close()
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return whole, slice(start, start + nbytes)


def _make_huge(memory: mmap.mmap, start: int, nbytes: int) -> bool:
    """Put these bytes of a mapping into huge pages: a tenth to a third faster to copy from (measured).

    Returns whether the kernel did. A page that is in use for a moment makes the kernel stop: it is asked again.
    """
    for _ in range(_TRIES):
        try:
            memory.madvise(_MADV_COLLAPSE, start, nbytes)
        except OSError as error:
            if error.errno != errno.EAGAIN:
                return False
        else:
            return True
    return False


def _address(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)


def _is_sealed_arena(descriptor: int, status: os.stat_result) -> bool:
    # Named arena, sealed against shrinking, and every page is there: a hole could still fail when memory is full.
    if not stat.S_ISREG(status.st_mode) or status.st_blocks * 512 < status.st_size:
        return False
    if not Path(f"/proc/self/fd/{descriptor}").readlink().as_posix().startswith(f"/memfd:{_NAME}"):
        return False
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False

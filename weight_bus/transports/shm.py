"""The shared-memory transport: processes of the same user and host read the publisher's arena, one copy and no more.

On Linux the arena is sealed memory and a read is a memcpy out of a mapping. Elsewhere it is a file of shared memory that
is read, not mapped: one that shrinks under a reader is then an error and not a SIGBUS.
"""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Iterable, Iterator
from functools import cache
from io import FileIO
from pathlib import Path

from weight_bus.arena import Arena, shared_arena, shm_directory
from weight_bus.errors import TransportError
from weight_bus.manifest import Manifest, ShmSource, Source
from weight_bus.transports.base import check_range, read_in_order
from weight_bus.transports.memfd import SealedArena, SealedMapping, is_sealed_path, memfd_available, sealed_arena

_OPEN_FILES = 4


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
    """Reads both kinds of arena. What it opened stays open: pages that were read once cost no page fault again."""

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

    def close(self) -> None:
        for opened in self._open.values():
            opened.close()
        self._open.clear()

    def _opened(self, source: ShmSource) -> SealedMapping | _File:
        opened = self._open.get(source.path)
        if opened is not None and (not isinstance(opened, SealedMapping) or _inode(source.path) == opened.inode):
            return opened
        if opened is not None:
            # Process and descriptor numbers come again: this is another publisher's arena, or none any more.
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

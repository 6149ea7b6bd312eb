"""The shared-memory transport: an arena is a file that processes of the same user and host read."""

from __future__ import annotations

import os
import platform
import stat
from functools import cache
from io import FileIO
from pathlib import Path

from weight_bus.arena import Arena, shared_arena, shm_directory
from weight_bus.errors import TransportError
from weight_bus.manifest import ShmSource, Source
from weight_bus.transports.base import check_range

_OPEN_FILES = 4


class ShmExporter:
    name = "shm"

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._arenas: list[Arena] = []

    def allocate(self, nbytes: int) -> Arena:
        """Raises UsageError when shared memory is full."""
        arena = shared_arena(nbytes, self._run_id)
        self._arenas.append(arena)
        return arena

    def export(self, arena: Arena) -> Source:
        if arena.path is None:
            raise TransportError("a private arena cannot be exported through shared memory")
        return ShmSource(path=str(arena.path), length=arena.nbytes, host=host_identity())

    def close(self) -> None:
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()


class ShmReader:
    """Reads with plain file reads, not a mapping: a file that shrinks under it is an error and not a SIGBUS."""

    name = "shm"

    def __init__(self) -> None:
        self._files: dict[str, FileIO] = {}

    def can_read(self, source: Source) -> bool:
        return isinstance(source, ShmSource) and source.host == host_identity() and Path(source.path).exists()

    def read(self, source: Source, offset: int, out: memoryview) -> None:
        if not isinstance(source, ShmSource):
            raise TransportError(f"the shm reader cannot read a {type(source).__name__}")
        check_range(source.length, offset, len(out))
        file = self._open(source)
        done = 0
        try:
            file.seek(offset)
            while done < len(out):
                got = file.readinto(out[done:])
                if not got:
                    raise TransportError(f"{source.path} ended after {offset + done} of {source.length} bytes")
                done += got
        except OSError as error:
            raise TransportError(f"cannot read {source.path} ({error.strerror})") from error

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, source: ShmSource) -> FileIO:
        file = self._files.get(source.path)
        if file is not None:
            return file
        path = Path(source.path)
        # The path came over the wire: only a regular file of the arenas' own folder and name is read.
        if path.parent != shm_directory() or not path.name.startswith("rollmesh-"):
            raise TransportError(f"{source.path} is not the path of a weight arena")
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise TransportError(f"cannot open {source.path} ({error.strerror}): is the publisher gone?") from error
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size != source.length:
            os.close(descriptor)
            raise TransportError(f"{source.path} is no arena of {source.length} bytes")
        file = FileIO(descriptor, "r")
        while len(self._files) >= _OPEN_FILES:
            # Arenas of publishers that are gone: an open file would keep their memory.
            self._files.pop(next(iter(self._files))).close()
        self._files[source.path] = file
        return file


@cache
def host_identity() -> str:
    """Names this host until it reboots; containers of one host differ by host name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()}/{boot.read_text().strip()}" if boot.exists() else platform.node()

"""Reads from the owners' arenas: from another source of the same owner where one cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from pathlib import Path

import structlog

from weight_bus.errors import StageError, TransportError
from weight_bus.manifest.manifest import FileSource, Source
from weight_bus.receiver.arriving import BucketRead
from weight_bus.receiver.job import StageJob
from weight_bus.transports.base import Reader, read_at_once
from weight_bus.transports.file import FileReader

_log = structlog.get_logger()
Tagged = tuple[int, BucketRead]
"""A read and the number of the bucket that it is for."""


class SourceReads:
    """Raises StageError, before anything is read, where an owner has no readable source."""

    def __init__(self, job: StageJob) -> None:
        self._job = job
        what = f"version {job.manifest.version}"
        self._candidates = [
            sources_in_reach(job.readers, owner.sources, what) if owner.total_bytes else []
            for owner in job.manifest.owners
        ]

    def pull(self, reads: list[list[Tagged]], arrived: Callable[[int], None]) -> None:
        """Make the reads, one list for each owner; `arrived` is called for each, with its bucket, when it is in place.

        Raises StageError for an owner none of whose sources can be read.
        """
        for owner, wanted in enumerate(reads):
            while wanted:
                try:
                    self._read(owner, wanted, arrived)
                except _UnreadableError as error:
                    if len(self._candidates[owner]) == 1:
                        raise
                    _log.warning("source cannot be read", version=self._job.manifest.version, why=error.what)
                    self._candidates[owner].pop(0)

    def _read(self, owner: int, wanted: list[Tagged], arrived: Callable[[int], None]) -> None:
        """Make the reads; those that are done are taken off `wanted`."""
        reader, source = self._candidates[owner][0]
        asked, done = list(wanted), set[int]()
        try:
            with closing(self._arrivals(reader, source, asked)) as arrivals:
                for number in arrivals:
                    self._job.check()
                    bucket, read = asked[number]
                    done.add(number)
                    read.arrived()
                    self._job.progress.bytes_read += len(read.into)
                    arrived(bucket)
        finally:
            wanted[:] = [each for number, each in enumerate(asked) if number not in done]

    def _arrivals(self, reader: Reader, source: Source, asked: list[Tagged]) -> Generator[int, None, None]:
        reads = [(read.offset, read.into) for _, read in asked]
        try:
            yield from (read_at_once(reader, source, reads) if self._job.at_once else reader.read_many(source, reads))
        except TransportError as error:
            first, last = asked[0][0], asked[-1][0]
            which = f"bucket {first}" if first == last else f"buckets {first} to {last}"
            raise _UnreadableError(
                f"version {self._job.manifest.version}, {which} could not be read ({error})"
            ) from error


class _UnreadableError(StageError):
    """A source could not be read: another one may be readable."""


def sources_in_reach(readers: Sequence[Reader], sources: Sequence[Source], what: str) -> list[tuple[Reader, Source]]:
    """Readers with the sources they can read, in order of preference. Raises StageError where there is none."""
    found = [(reader, source) for reader in readers for source in sources if reader.can_read(source)]
    if not found:
        offered = ", ".join(type(source).__name__ for source in sources) or "none"
        known = ", ".join(reader.name for reader in readers)
        raise StageError(
            f"{what}: no source can be read (offered: {offered}; readers: {known})", _remedy(readers, sources)
        )
    return found


def _remedy(readers: Sequence[Reader], sources: Sequence[Source]) -> str:
    """What is missing, where files are offered: a transport does not help an engine that may read none."""
    files = [source.path for source in sources if isinstance(source, FileSource)]
    if not files:
        return "use the same weights.transport on both sides"
    roots = [reader.root for reader in readers if isinstance(reader, FileReader)]
    if not roots:
        return f"set this engine's weights.file_root (vllm serve: ROLLMESH_FILE_ROOT) to a folder that holds {files[0]}"
    if not Path(files[0]).resolve().is_relative_to(roots[0]):
        return f"{files[0]} lies outside this engine's weights.file_root, {roots[0]}: put it there, or set another"
    return f"{files[0]} is no file on this engine's machine: it must be seen under the same name as by the bus"

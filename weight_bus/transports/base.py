"""The weight transport interface: an exporter offers an arena, a reader pulls ranges of it.

    publisher                               manifest.owners[i].sources                receiver
    Exporter.allocate(n) ─► arena
    Exporter.export(arena) ───────► NixlSource | ShmSource | … ─────► Reader.read(source, offset, out)

The receiver verifies what it reads: a transport guarantees nothing about the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from weight_bus.errors import TransportError
from weight_bus.manifest.manifest import Manifest, Source
from weight_bus.memory.arena import Arena

if TYPE_CHECKING:
    from weight_bus.memory.device import DeviceArena, DeviceMemory


class Exporter(Protocol):
    """The publisher's side: makes arenas that other processes can read."""

    name: str

    def allocate(self, nbytes: int) -> Arena:
        """A zeroed arena of the kind this transport can export; it lives until `close`."""
        ...

    def export(self, arena: Arena, draft: Manifest | None = None) -> Source:
        """The source of an arena that `allocate` made, for the manifest. Allocate all arenas first: a source may name all.

        Call it once for each version that is put into the arena: an earlier source of it may end with that. `draft`
        is the version's manifest but for this arena's sources and the signature; `file` writes it beside the bytes, and
        may block for as long as that takes. The others return at once.
        """
        ...

    def close(self) -> None:
        """Withdraw and free every arena."""
        ...


@runtime_checkable
class DeviceExporter(Protocol):
    """What an exporter offers besides that registers memory of a GPU."""

    device: DeviceMemory | None

    def allocate_on_device(self, nbytes: int) -> DeviceArena:
        """As `Exporter.allocate`, in the memory of `device`, which is not None."""
        ...


class Reader(Protocol):
    """The receiver's side. One reader belongs to one staging thread."""

    name: str

    def can_read(self, source: Source) -> bool:
        """Whether this reader understands the source and can reach it from this host."""
        ...

    def read(self, source: Source, offset: int, out: memoryview) -> None:
        """Copy `len(out)` bytes from `offset` of the source's arena into `out`.

        Raises TransportError for a range outside the source, a publisher that is gone, or a deadline passed. Read into
        slices of one long-lived buffer: a transport may register the buffer under `out` once and remember it.
        """
        ...

    def read_many(self, source: Source, pieces: Iterable[tuple[int, memoryview]]) -> Iterator[int]:
        """Read `(offset, out)` pieces; yields the index of each as soon as its bytes are in place, in any order.

        Where the network can, a bounded number of reads is in flight, so that the caller's work on one piece overlaps the
        transfer of the next; `pieces` is consumed lazily, when there is room. A piece's `out` must stay untouched until
        it was yielded. Errors and deadlines as with `read`; closing the iterator early cancels the reads in flight.
        """
        ...

    def close(self) -> None: ...


@runtime_checkable
class QuickReader(Protocol):
    """What a reader offers besides whose reads within a host are copies on the calling thread."""

    def read_at_once(self, source: Source, offset: int, out: memoryview) -> bool:
        """`read`, if that neither waits nor has anything to set up first; whether it did. Raises as `read` does."""
        ...


class NotAtOnceError(Exception):
    """These bytes cannot be had without waiting: `Reader.read_many` may be used, on a thread that may wait."""


def read_at_once(reader: Reader, source: Source, pieces: Iterable[tuple[int, memoryview]]) -> Iterator[int]:
    """`read_many` for a thread that must not wait. Raises NotAtOnceError where it would have to."""
    for index, (offset, out) in enumerate(pieces):
        if not isinstance(reader, QuickReader) or not reader.read_at_once(source, offset, out):
            raise NotAtOnceError
        yield index


def check_range(length: int, offset: int, wanted: int) -> None:
    """Raise TransportError unless `wanted` bytes from `offset` lie in a source of `length` bytes."""
    if offset < 0 or wanted < 0 or offset + wanted > length:
        raise TransportError(f"{wanted} bytes from {offset} lie outside a source of {length} bytes")


def read_in_order(reader: Reader, source: Source, pieces: Iterable[tuple[int, memoryview]]) -> Iterator[int]:
    """`read_many` for a transport whose reads are copies on the calling thread: nothing could overlap."""
    for index, (offset, out) in enumerate(pieces):
        reader.read(source, offset, out)
        yield index

"""The transport interface: an exporter offers an arena, a reader pulls ranges of it.

    publisher                               manifest.sources                        receiver
    Exporter.allocate(n) ─► arena
    Exporter.export(arena) ───────► NixlSource | ShmSource ───────► Reader.read(source, offset, out)

Whoever reads verifies: a transport moves bytes and promises nothing about them.
"""

from __future__ import annotations

from typing import Protocol

from weight_bus.arena import Arena
from weight_bus.errors import TransportError
from weight_bus.manifest import Source


class Exporter(Protocol):
    """The publisher's side: makes arenas that other processes can read."""

    name: str

    def allocate(self, nbytes: int) -> Arena:
        """A zeroed arena of the kind this transport can export; it lives until `close`."""
        ...

    def export(self, arena: Arena) -> Source:
        """Say where an arena that `allocate` made can be had. Allocate all arenas first: a source may name them all."""
        ...

    def close(self) -> None:
        """Withdraw and free every arena."""
        ...


class Reader(Protocol):
    """The receiver's side. One reader belongs to one staging thread."""

    name: str

    def can_read(self, source: Source) -> bool:
        """Whether this reader understands the source and can reach it from this host."""
        ...

    def read(self, source: Source, offset: int, out: memoryview) -> None:
        """Copy `len(out)` bytes from `offset` of the source's arena into `out`.

        Raises TransportError for a range outside the source, a peer that is gone, or a deadline passed. Read into slices
        of one long-lived buffer: a transport may register the buffer under `out` once and remember it.
        """
        ...

    def close(self) -> None: ...


def check_range(length: int, offset: int, wanted: int) -> None:
    """Raise TransportError unless `wanted` bytes from `offset` lie in a source of `length` bytes."""
    if offset < 0 or wanted < 0 or offset + wanted > length:
        raise TransportError(f"{wanted} bytes from {offset} lie outside a source of {length} bytes")

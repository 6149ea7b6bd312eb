"""The transport interface: an exporter offers an arena, a reader pulls ranges of it.

    publisher                         manifest.sources                        receiver
    Exporter.export(arena) ──► NixlSource | ShmSource ──► Reader.read(source, offset, out)

Whoever reads verifies: a transport moves bytes and promises nothing about them.
"""

from __future__ import annotations

from typing import Protocol

from weight_bus.manifest import Source


class Exporter(Protocol):
    """The publisher's side: makes an arena readable by other processes."""

    name: str

    def export(self, arena: memoryview) -> Source:
        """Register `arena` (writable, contiguous bytes, alive until `close`) and say where it can be had."""
        ...

    def close(self) -> None: ...


class Reader(Protocol):
    """The receiver's side. One reader belongs to one staging thread."""

    name: str

    def can_read(self, source: Source) -> bool:
        """Whether this reader understands the source and can reach it from this host."""
        ...

    def read(self, source: Source, offset: int, out: memoryview) -> None:
        """Copy `len(out)` bytes from `offset` of the source's arena into `out`.

        Raises TransportError for a range outside the source, a peer that is gone, or a deadline passed.
        """
        ...

    def close(self) -> None: ...

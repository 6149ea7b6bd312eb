"""The publisher's side of the wire measurement: a process that offers the same bytes over NIXL and over shared memory."""

from __future__ import annotations

import asyncio
import os

import msgspec

from services.bench.piped import answer_lines, replies_only
from weight_bus.manifest import Source


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """Make `arenas` pairs of arenas, each of the same `nbytes` pseudo-random bytes that follow from `seed`."""

    nbytes: int
    seed: int
    arenas: int


class OfferedArena(msgspec.Struct, frozen=True):
    """Where the bytes lie. `address`: those of `nixl` in the publisher's memory, to be read without a transport.

    `huge`: the kernel gave the shared memory huge pages.
    """

    address: int
    nixl: Source
    shm: Source
    huge: bool


class Offered(msgspec.Struct, frozen=True):
    """`pid`: whose memory it is."""

    pid: int
    arenas: list[OfferedArena]
    digest: str


def main() -> None:
    replies = replies_only()
    import numpy as np

    from weight_bus.layout import hash_bytes
    from weight_bus.transports.memfd import SealedArena
    from weight_bus.transports.nixl import NixlExporter
    from weight_bus.transports.shm import ShmExporter

    nixl, shm = NixlExporter(), ShmExporter(f"wire-{os.getpid()}")

    async def offer(command: Offer) -> Offered:
        content = np.random.default_rng(command.seed).bytes(command.nbytes)
        # All are there before the first is offered, as a publisher's are: whoever reads meets this process once.
        made = [(nixl.allocate(command.nbytes), shm.allocate(command.nbytes)) for _ in range(command.arenas)]
        arenas = []
        for registered, shared in made:
            registered.view[:] = shared.view[:] = content
            huge = isinstance(shared, SealedArena) and shared.huge
            arenas.append(OfferedArena(registered.address, nixl.export(registered), shm.export(shared), huge))
        return Offered(os.getpid(), arenas, hash_bytes(memoryview(content)))

    try:
        asyncio.run(answer_lines(replies, Offer, offer))
    finally:
        nixl.close()
        shm.close()


if __name__ == "__main__":
    main()

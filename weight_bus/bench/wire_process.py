"""The publisher's side of the wire measurement: a process that offers the same bytes over NIXL and over shared memory."""

from __future__ import annotations

import asyncio
import os

import msgspec

from services.bench.piped import answer_lines, replies_only
from weight_bus.manifest import Source


class Offer(msgspec.Struct, frozen=True, tag="offer"):
    """Make arenas of `nbytes` pseudo-random bytes that follow from `seed`."""

    nbytes: int
    seed: int


class Offered(msgspec.Struct, frozen=True):
    """Where the bytes lie. `address`: in the memory of process `pid`, for whoever reads it without a transport."""

    pid: int
    address: int
    nixl: Source
    shm: Source
    digest: str


def main() -> None:
    replies = replies_only()
    import numpy as np

    from weight_bus.layout import hash_bytes
    from weight_bus.transports.nixl import NixlExporter
    from weight_bus.transports.shm import ShmExporter

    nixl, shm = NixlExporter(), ShmExporter(f"wire-{os.getpid()}")

    async def offer(command: Offer) -> Offered:
        registered, shared = nixl.allocate(command.nbytes), shm.allocate(command.nbytes)
        np.frombuffer(registered.view, dtype=np.uint8)[:] = np.frombuffer(
            np.random.default_rng(command.seed).bytes(command.nbytes), dtype=np.uint8
        )
        shared.view[:] = registered.view
        return Offered(
            pid=os.getpid(),
            address=registered.address,
            nixl=nixl.export(registered),
            shm=shm.export(shared),
            digest=hash_bytes(shared.view),
        )

    try:
        asyncio.run(answer_lines(replies, Offer, offer))
    finally:
        nixl.close()
        shm.close()


if __name__ == "__main__":
    main()

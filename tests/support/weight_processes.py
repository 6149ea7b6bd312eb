"""The processes of a small weight mesh, for tests that kill them: a publisher, engines with real receivers, a bus.

They are forked from a server that has torch in memory, so that one is started in a moment. Most versions change few of
the numbers, so that deltas are offered; reads are slowed down, so that a stage lasts long enough to be hit.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

import torch

from services.http.app import Stop, make_server, open_port
from services.policies.fleet.policy import FleetPolicy
from services.wire.weights_api import CommitAnswer, RollbackCall
from tests.weight_parts import PlainTarget, SmallEngine, make_weights
from weight_bus.client.bus_client import BusClient
from weight_bus.client.membership import Membership
from weight_bus.coordinator.app import build_app
from weight_bus.manifest.manifest import Manifest, Source, encode_manifest
from weight_bus.memory.arena import Arena
from weight_bus.publisher.publisher import Publisher
from weight_bus.receiver.receiver import Receiver
from weight_bus.transports.base import Exporter, Reader
from weight_bus.transports.select import make_exporter, make_readers

BUCKET_BYTES = 64 << 10
SCALE = 3000
READ_DEADLINE_S = 2.0
STAGE_TIMEOUT_S = 4.0
LEASE_S = 1.0
SLOWER_BY_S = 0.01
"""A piece takes that much longer: a stage of all bytes half a second, one of a delta a tenth."""


def fork_server() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.weight_processes"])
    return context


def weights_of(version: int) -> dict[str, torch.Tensor]:
    """Two per cent of the numbers are this version's own; every third version, all are new."""
    weights = make_weights(version // 3, scale=SCALE)
    generator = torch.Generator().manual_seed(version)
    for tensor in weights.values():
        flat = tensor.view(-1)
        place = torch.randint(len(flat), (1 + len(flat) // 50,), generator=generator)
        flat[place] = torch.randn(len(place), generator=generator)
    return weights


class SlowReader:
    """Another reader, a little later."""

    def __init__(self, reader: Reader, by_s: float = SLOWER_BY_S) -> None:
        self.name = reader.name
        self._reader, self._by_s = reader, by_s

    def can_read(self, source: Source) -> bool:
        return self._reader.can_read(source)

    def read(self, source: Source, offset: int, out: memoryview) -> None:
        time.sleep(self._by_s)
        self._reader.read(source, offset, out)

    def read_many(self, source: Source, pieces: Iterable[tuple[int, memoryview]]) -> Iterator[int]:
        for index in self._reader.read_many(source, pieces):
            time.sleep(self._by_s)
            yield index

    def close(self) -> None:
        self._reader.close()


class KnownArenas:
    """Another exporter whose arenas' bytes can be spoilt."""

    def __init__(self, exporter: Exporter) -> None:
        self.name = exporter.name
        self._exporter = exporter
        self._arenas: list[Arena] = []

    def allocate(self, nbytes: int) -> Arena:
        self._arenas.append(self._exporter.allocate(nbytes))
        return self._arenas[-1]

    def export(self, arena: Arena, draft: Manifest | None = None) -> Source:
        return self._exporter.export(arena, draft)

    def close(self) -> None:
        self._exporter.close()

    def flip_a_bit(self, place: int) -> None:
        """In every arena, one bit of the byte at `place`; a second call mends it."""
        for arena in self._arenas:
            arena.view[place] ^= 0x10


def run_publisher(
    run_id: str, transport: str, orders: Connection, host: str = "127.0.0.1", key: str | None = None
) -> None:
    """Answers `publish VERSION` with the encoded manifest, `flip PLACE` (a bit of it) with nothing."""
    torch.set_num_threads(1)
    exporter = KnownArenas(make_exporter(transport, run_id, host=host, key=key))
    publisher = Publisher(run_id, weights_of(0), "float32", exporter, BUCKET_BYTES, delta_max_ratio=0.25, key=key)
    while True:
        order, _, number = orders.recv_bytes().decode().partition(" ")
        if order == "publish":
            publication = publisher.publish(int(number), weights_of(int(number)))
            orders.send_bytes(encode_manifest(publication.manifest(20.0)))
        else:
            exporter.flip_a_bit(int(number))
            orders.send_bytes(b"")


def run_engine(
    run_id: str,
    name: str,
    port: int,
    bus_url: str,
    transport: str,
    host: str = "127.0.0.1",
    key: str | None = None,
    slower_by_s: float = SLOWER_BY_S,
) -> None:
    """An engine that serves `weights_of(0)` to begin with, registered with the bus. `/readyz` says what the bus lacks."""
    torch.set_num_threads(1)
    asyncio.run(_engine(run_id, name, port, bus_url, transport, host, key, slower_by_s))


async def _engine(
    run_id: str,
    name: str,
    port: int,
    bus_url: str,
    transport: str,
    host: str,
    key: str | None,
    slower_by_s: float,
) -> None:
    readers = [SlowReader(reader, slower_by_s) for reader in make_readers(transport, READ_DEADLINE_S)]
    receiver = Receiver(PlainTarget(weights_of(0)), run_id, readers, key=key)
    bus = BusClient(bus_url, run_id, deadline_s=1.0)
    url = f"http://{host}:{port}"
    membership = Membership(bus, name, url, lambda: receiver.version, lambda: receiver.staged_version)
    app = SmallEngine(name, receiver, not_ready=membership.not_ready).app()

    @app.post("/weights/rollback")
    async def rollback(call: RollbackCall) -> CommitAnswer:
        receiver.rollback(call.version)
        return CommitAnswer(version=call.version, flip_ms=0.0, requests_in_flight=0)

    server = make_server(app, Stop())
    beating = asyncio.create_task(membership.run())
    try:
        await server.serve([open_port(host, port, lacking=())])
    finally:
        beating.cancel()


def run_bus(
    run_id: str, port: int, policy: FleetPolicy, host: str = "127.0.0.1", stage_timeout_s: float = STAGE_TIMEOUT_S
) -> None:
    stop = Stop()
    app = build_app(run_id, stage_timeout_s, lease_s=LEASE_S, policy=policy, stop=stop)
    make_server(app, stop).run([open_port(host, port, lacking=())])


def end(process: ForkServerProcess) -> None:
    """At once, in whatever state it is."""
    process.kill()
    process.join(10)

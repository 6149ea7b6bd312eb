"""Exporting and reading processes for the transport tests."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import torch

from tests.support.host_as_device import HostAsDevice
from weight_bus.errors import TransportError
from weight_bus.manifest.layout import hash_bytes, plan_layout, root_digest
from weight_bus.manifest.manifest import Bucket, Manifest, Owner, Source
from weight_bus.memory.arena import Arena, private_arena
from weight_bus.memory.device import DeviceArena
from weight_bus.transports.base import DeviceExporter, Exporter, Reader
from weight_bus.transports.file import FileExporter, FileReader
from weight_bus.transports.select import make_exporter, make_readers

NBYTES = 300_032
"""A multiple of the alignment, so that it is also the layout of one tensor; no multiple of a chunk or page."""
CHUNK = 64 << 10
_PROCESSES = multiprocessing.get_context("forkserver")
"""Torch takes seconds to import: one clean process does it, and those of the tests are its children."""
_PROCESSES.set_forkserver_preload(
    [
        "weight_bus.transports.nccl.reader",
        "weight_bus.transports.nccl.exporter",
        "tests.contract.weight_bus.transport_peers",
    ]
)
STALL_S = 1.5
WINDOW_S = 0.05


def pattern(seed: int) -> bytes:
    return bytes((index * 7 + seed) % 251 for index in range(NBYTES))


def exporter_of(name: str, run_id: str, folder: str) -> Exporter:
    """`nixl-device`: its arenas lie in what it takes for a device's memory."""
    if name == "nixl-device":
        from weight_bus.transports.nixl import NixlExporter

        return NixlExporter(HostAsDevice())
    if name == "nccl":
        from weight_bus.transports.nccl.exporter import CollectiveExporter

        return CollectiveExporter(window_s=WINDOW_S, stall_s=STALL_S, chunk_bytes=CHUNK)
    return FileExporter(Path(folder)) if name == "file" else make_exporter(name, run_id)


def reader_of(name: str, folder: Path, deadline_s: float) -> Reader:
    if name == "nixl-device":
        from weight_bus.transports.nixl import NixlReader

        return NixlReader(deadline_s, HostAsDevice())
    return FileReader(folder) if name == "file" else make_readers(name, deadline_s)[0]


def draft_of(run_id: str, version: int, content: bytes) -> Manifest:
    """A version of one tensor that has these bytes, without a source."""
    layout = plan_layout({"weight": (len(content) // 4,)}, "float32")
    hashed = hash_bytes(content)
    return Manifest(
        run_id=run_id,
        version=version,
        layout=layout,
        owners=[Owner(total_bytes=len(content), sources=[])],
        buckets=[Bucket(offset=0, length=len(content), hash=hashed)],
        root_digest=root_digest([hashed]),
    )


def _allocate(exporter: Exporter) -> Arena:
    if isinstance(exporter, DeviceExporter) and exporter.device is not None:
        return exporter.allocate_on_device(NBYTES)
    return exporter.allocate(NBYTES)


def _serve(name: str, run_id: str, folder: str, pipe: Connection) -> None:
    """Exports two arenas, says where, and waits for the end."""
    exporter = exporter_of(name, run_id, folder)
    arenas = [_allocate(exporter) for _ in range(2)]
    sources = []
    for seed, arena in enumerate(arenas):
        if isinstance(arena, DeviceArena):
            arena.flat.copy_(torch.frombuffer(bytearray(pattern(seed)), dtype=torch.uint8))
        else:
            arena.view[:] = pattern(seed)
        sources.append(exporter.export(arena, draft_of(run_id, seed + 1, pattern(seed))))
    pipe.send_bytes(msgspec.msgpack.encode(sources))
    pipe.recv_bytes()
    exporter.close()


class Peer:
    """Another process that exports arenas by the transport `name`."""

    def __init__(self, name: str, run_id: str, folder: Path = Path()) -> None:
        self._pipe, theirs = _PROCESSES.Pipe()
        self.process = _PROCESSES.Process(target=_serve, args=(name, run_id, str(folder), theirs))
        self.process.start()
        theirs.close()
        assert self._pipe.poll(30), "the exporting process did not start"
        self.sources = msgspec.msgpack.decode(self._pipe.recv_bytes(), type=list[Source])

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def end(self) -> None:
        if self.process.is_alive():
            self._pipe.send_bytes(b"end")
            self.process.join(10)
        self.kill()


def _receive(source: bytes, deadline_s: float, pipe: Connection) -> None:
    """Reads a broadcast chunk by chunk, one at each word from the test; says the offset reached or what went wrong."""
    from weight_bus.transports.nccl.reader import CollectiveReader

    reader, buffer = CollectiveReader(deadline_s), private_arena(NBYTES)
    wanted = msgspec.msgpack.decode(source, type=Source)  # type: ignore[arg-type]
    pipe.send("ready")
    try:
        for offset in range(0, NBYTES, CHUNK):
            pipe.recv()
            reader.read(wanted, offset, buffer.view[offset : offset + CHUNK])
            pipe.send(offset)
        pipe.send(hash_bytes(buffer.view))
    except TransportError as error:
        pipe.send(error.what)


class Receiving:
    """Another process that reads one broadcast."""

    def __init__(self, source: Source, deadline_s: float = 10.0) -> None:
        self._pipe, theirs = _PROCESSES.Pipe()
        self.process = _PROCESSES.Process(target=_receive, args=(msgspec.msgpack.encode(source), deadline_s, theirs))
        self.process.start()
        theirs.close()
        assert self.answer() == "ready"

    def go(self, chunks: int = 1) -> None:
        for _ in range(chunks):
            self._pipe.send("go")

    def answer(self) -> object:
        assert self._pipe.poll(20), "the receiving process said nothing"
        return self._pipe.recv()

    def rest(self) -> object:
        """The last thing it says."""
        while isinstance(said := self.answer(), int):
            pass
        return said

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

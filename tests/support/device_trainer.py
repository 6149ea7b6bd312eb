"""A trainer's publisher in a process of its own, whose arenas lie in a device's memory."""

from __future__ import annotations

from multiprocessing import get_context
from multiprocessing.connection import Connection

import torch

from tests.support.host_as_device import HostAsDevice
from tests.weight_parts import make_weights
from weight_bus.manifest.manifest import Manifest, decode_manifest, encode_manifest
from weight_bus.memory.device import CudaMemory
from weight_bus.publisher.publisher import Publisher
from weight_bus.transports.nixl import NixlExporter

RUN = "device"
_BUCKET, _SCALE = 64 << 10, 3000
_SPOIL = -1
# A clean process imports torch once; it has no CUDA context that its children could not use.
_PROCESSES = get_context("forkserver")
_PROCESSES.set_forkserver_preload(["tests.support.device_trainer"])


def weights_of(version: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Of versions above 2 few numbers are their own: a delta is offered."""
    weights = make_weights(min(version, 2), scale=_SCALE)
    for tensor in weights.values():
        tensor.view(-1)[: max(0, version - 2)] += 1.0
    return {name: tensor.to(device) for name, tensor in weights.items()}


class KnownCuda(CudaMemory):
    """What was allocated can be spoilt."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.allocated: list[torch.Tensor] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        self.allocated.append(super().allocate(nbytes))
        return self.allocated[-1]


def memory_of(device: str) -> HostAsDevice | KnownCuda:
    found = torch.device(device)
    return HostAsDevice() if found.type == "cpu" else KnownCuda(found.index)


def _publish(orders: Connection, device: str) -> None:
    torch.set_num_threads(1)
    memory = memory_of(device)
    exporter = NixlExporter(memory)
    publisher = Publisher(RUN, weights_of(0, device), "float32", exporter, _BUCKET, delta_max_ratio=0.25)
    while True:
        version = int.from_bytes(orders.recv_bytes(), "big", signed=True)
        if version != _SPOIL:
            publication = publisher.publish(version, weights_of(version, device))
            orders.send_bytes(encode_manifest(publication.manifest(20.0)))
            continue
        for arena in memory.allocated:
            if arena.nbytes > _BUCKET:
                arena[_BUCKET + 7] ^= 0x10
        memory.settle()
        orders.send_bytes(b"")


class Trainer:
    """Its weights are on `device`; on `cpu`, the host's memory stands in a device's place."""

    def __init__(self, device: str = "cpu") -> None:
        self._pipe, theirs = _PROCESSES.Pipe()
        self._process = _PROCESSES.Process(target=_publish, args=(theirs, device))
        self._process.start()
        theirs.close()

    def publish(self, version: int) -> Manifest:
        return decode_manifest(self._ask(version))

    def spoil(self) -> None:
        """One bit of what it has published; a second call mends it."""
        self._ask(_SPOIL)

    def end(self) -> None:
        self._process.kill()
        self._process.join(10)

    def _ask(self, order: int) -> bytes:
        self._pipe.send_bytes(order.to_bytes(2, "big", signed=True))
        assert self._pipe.poll(60), "the trainer does not answer"
        return self._pipe.recv_bytes()

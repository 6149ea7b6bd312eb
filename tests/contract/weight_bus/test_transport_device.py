"""Weights over a device's memory at both ends: from a trainer's process to an engine's, and what NIXL is told of it.

The host's memory stands in a GPU's place; everything else is the product's, over real NIXL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tests.support.device_trainer import RUN, Trainer, weights_of
from tests.support.host_as_device import HostAsDevice
from tests.weight_parts import PlainTarget
from weight_bus.errors import StageError, TransportError
from weight_bus.manifest.manifest import NixlSource
from weight_bus.memory.arena import private_arena
from weight_bus.memory.device import DeviceArena
from weight_bus.publisher.publisher import Publisher
from weight_bus.receiver.receiver import Receiver
from weight_bus.transports.environment import NIXL_MEMORY
from weight_bus.transports.nixl import NixlExporter, NixlReader
from weight_bus.transports.select import nixl_installed

needs_nixl = pytest.mark.skipif(not nixl_installed(), reason="nixl is not installed")


@pytest.fixture
def trainer() -> Iterator[Trainer]:
    trainer = Trainer()
    yield trainer
    trainer.end()


def serves(target: PlainTarget, version: int) -> bool:
    return all(torch.equal(target.live()[name], tensor) for name, tensor in weights_of(version).items())


@needs_nixl
def test_versions_come_whole_from_device_to_device_and_no_other_byte_is_served(trainer: Trainer) -> None:
    device, target = HostAsDevice(), PlainTarget(weights_of(0))
    receiver = Receiver(target, RUN, [NixlReader(10.0, device)])
    for version in (1, 2):
        manifest = trainer.publish(version)
        device.copied = 0
        assert receiver.stage(manifest).bytes_read == manifest.total_bytes == device.copied
        receiver.commit(version)
        assert serves(target, version) and receiver.digest().root_digest == manifest.root_digest
    manifest = trainer.publish(3)
    assert manifest.delta is not None and receiver.stage(manifest).bytes_read < manifest.total_bytes / 4
    receiver.commit(3)
    assert serves(target, 3)
    # As it is read, not as it was hashed.
    manifest = msgspec.structs.replace(trainer.publish(4), delta=None, kind="dense", base_version=None)
    trainer.spoil()
    with pytest.raises(StageError, match=r"bucket 1 has the hash"):
        receiver.stage(manifest)
    assert receiver.version == 3 and serves(target, 3)
    trainer.spoil()
    receiver.stage(manifest)
    receiver.commit(4)
    assert serves(target, 4)
    receiver.close()


class Agent:
    """What NIXL is told; reads are done here, from memory of this process."""

    def __init__(self, known: dict[str, list[tuple[str, int, int, int]]], name: str, refuses: str = "") -> None:
        self.name, self._known, self._refuses = name, known, refuses
        known[name] = []
        self.reads: list[tuple[str, int, str, int, int]] = []

    def register_memory(self, places: list[tuple[int, int, int, str]], kind: str) -> Any:
        if kind == self._refuses:
            raise RuntimeError("no such memory")
        self._known[self.name] += [(kind, device, address, nbytes) for address, nbytes, device, _ in places]
        return self._known[self.name][-1]

    def deregister_memory(self, registration: Any) -> None:
        self._known[self.name].remove(registration)

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> bytes:
        return metadata

    def remove_remote_agent(self, name: str) -> None: ...

    def get_new_notifs(self) -> None: ...

    def get_xfer_descs(self, places: list[tuple[int, int, int]], kind: str) -> Any:
        return kind, *places[0]

    def initialize_xfer(self, operation: str, local: Any, remote: Any, owner: str) -> Any:
        assert operation == "READ"
        for agent, (kind, address, nbytes, device) in ((self.name, local), (owner, remote)):
            assert any(
                known[:2] == (kind, device) and known[2] <= address and address + nbytes <= known[2] + known[3]
                for known in self._known[agent]
            ), f"{agent} does not know {nbytes} bytes of {kind} {device}"
        self.reads.append((local[0], local[3], remote[0], remote[3], local[2]))
        return SimpleNamespace(copy=(local[1], remote[1], local[2]), release=lambda: None)

    def transfer(self, handle: Any) -> str:
        ctypes.memmove(*handle.copy)
        return "DONE"


def agents(refuses: str = "") -> tuple[Any, list[Agent]]:
    known: dict[str, list[tuple[str, int, int, int]]] = {}
    made: list[Agent] = []

    def make(role: str, *, on_device: bool) -> Agent:
        made.append(Agent(known, f"{role}-{len(made)}", refuses))
        return made[-1]

    return make, made


def test_nixl_is_told_the_kind_of_memory_and_the_device_of_both_ends() -> None:
    make, made = agents()
    exporter = NixlExporter(HostAsDevice("VRAM", 3), make)
    arena, codes = exporter.allocate_on_device(40 << 20), exporter.allocate(4096)
    assert isinstance(arena, DeviceArena)
    arena.flat.copy_(torch.arange(arena.nbytes, dtype=torch.int32) % 251)
    source, beside = exporter.export(arena), exporter.export(codes)
    assert isinstance(source, NixlSource) and (source.memory, source.device) == ("VRAM", 3)
    assert isinstance(beside, NixlSource) and (beside.memory, beside.device) == ("DRAM", 0)
    here = HostAsDevice("VRAM", 1)
    reader, out = NixlReader(5.0, here, make), private_arena(arena.nbytes)
    pieces = [(0, out.view[: 33 << 20]), (33 << 20, out.view[33 << 20 : 33 << 20]), (33 << 20, out.view[33 << 20 :])]
    assert list(reader.read_many(source, pieces)) == [0, 1, 2]
    assert torch.equal(torch.frombuffer(out.view, dtype=torch.uint8), arena.flat)
    assert {read[:4] for read in made[1].reads} == {("VRAM", 1, "VRAM", 3)}
    assert max(read[4] for read in made[1].reads) == 16 << 20
    # Of the host's memory, without the way over the device; and without a device of its own, from another's to the host's.
    reader.read(beside, 0, out.view[:4096])
    assert made[1].reads[-1][:4] == ("DRAM", 0, "DRAM", 0)
    alone = NixlReader(5.0, None, make)
    alone.read(source, 0, out.view[:4096])
    assert made[2].reads[-1][:4] == ("DRAM", 0, "VRAM", 3)
    assert not alone.read_at_once(source, 0, out.view[:4096])
    direct = torch.zeros(2, 1 << 20, dtype=torch.uint8)
    assert list(reader.read_to_device(source, [(0, direct[0]), (1 << 20, direct[1])])) == [0, 1]
    assert torch.equal(direct.view(-1), arena.flat[: 2 << 20])
    reader.close()
    exporter.close()
    assert not any(known for agent in made[:2] for known in agent._known[agent.name])


def test_a_build_of_nixl_that_takes_no_gpu_memory_is_told_of_and_the_hosts_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    make, _ = agents(refuses="VRAM")
    exporter, reader = NixlExporter(HostAsDevice("VRAM"), make), NixlReader(5.0, HostAsDevice("VRAM"), make)
    assert exporter.device is None
    publisher = Publisher(RUN, weights_of(0), "float32", exporter, 1 << 20)
    target = PlainTarget(weights_of(0))
    receiver = Receiver(target, RUN, [reader])
    manifest = publisher.publish(1, weights_of(1)).manifest()
    assert all(isinstance(each, NixlSource) and each.memory == "DRAM" for each in manifest.owners[0].sources)
    receiver.stage(manifest)
    receiver.commit(1)
    assert serves(target, 1)
    publisher.close()
    monkeypatch.setenv(NIXL_MEMORY, "device")
    for make_end in (
        lambda: NixlExporter(HostAsDevice("VRAM"), make),
        lambda: NixlReader(5.0, HostAsDevice("VRAM"), make),
    ):
        with pytest.raises(TransportError, match=r"GPU 0 .*no such memory.*weights\.nixl\.memory=host"):
            make_end()


def test_reads_under_way_never_share_memory_of_the_device() -> None:
    """Each is copied to the host before its place is read into again."""
    make, made = agents()
    exporter = NixlExporter(HostAsDevice("VRAM"), make)
    arena = exporter.allocate_on_device(1 << 20)
    assert isinstance(arena, DeviceArena)
    arena.flat.copy_(torch.randint(256, (1 << 20,), dtype=torch.uint8))
    source, out = exporter.export(arena), private_arena(1 << 20)
    reader, step = NixlReader(5.0, HostAsDevice("VRAM"), make), 4096
    arrived = reader.read_many(source, [(at, out.view[at : at + step]) for at in range(0, 1 << 20, step)])
    for index in arrived:
        at = index * step
        assert out.view[at : at + step] == arena.flat[at : at + step].numpy().data
    assert [read[4] for read in made[1].reads] == [step] * 256
    places = [known for known in made[1]._known[made[1].name] if known[0] == "VRAM"]
    assert len(places) == 1, "one piece of memory for all reads"
    exporter.close()

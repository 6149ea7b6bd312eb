"""The product's NIXL transport from the memory of one device to that of another, beside a copy between the two by the
driver (a peer copy).

    owner, device 0   ── NIXL READ ──►  reader, device 1         two processes, as a trainer and an engine are
    reader, device 0  ── copy ───────►  reader, device 1

The wire alone: nothing is hashed, and nothing copied to the host for it. On a CPU both ends are in the host's memory and
the copy is memcpy, which shows that the agents, their descriptions and the bytes are right, and nothing about devices.

python -m benchmarks.weights.device_wire
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch

from benchmarks.harness.processes import PYTHON, answer_lines, replies_only, running_piped
from services.wire.errors import RollmeshError
from weight_bus.manifest.layout import DEFAULT_BUCKET_BYTES
from weight_bus.manifest.manifest import NixlSource
from weight_bus.manifest.tensors import flat_bytes
from weight_bus.memory.arena import private_arena
from weight_bus.memory.device import CudaMemory
from weight_bus.transports.nixl import NixlExporter, NixlReader

_START_S, _READ_S = 120.0, 300.0
_DEADLINE_S = 60.0


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """Fill so many bytes on this device (`cpu`, `cuda:0`) and register them. Answer: Held."""

    nbytes: int
    device: str


class Held(msgspec.Struct, frozen=True):
    source: NixlSource
    device: str


class Read(msgspec.Struct, frozen=True, tag="read"):
    """Read what is held into memory on `device`, so many times, and copy as many bytes beside. Answer: Times."""

    held: Held
    device: str
    rounds: int


class Times(msgspec.Struct, frozen=True):
    """Seconds, round by round. `equal`: the bytes that came were those that are held."""

    nixl_s: list[float]
    copy_s: list[float]
    equal: bool

    def nixl_vs_copy(self) -> list[float]:
        """How fast NIXL was, of the copy's speed."""
        return [copy / nixl for nixl, copy in zip(self.nixl_s, self.copy_s, strict=True)]


async def measure_device_wire(nbytes: int, rounds: int, folder: Path, source: str, target: str) -> Times:
    """From device `source` to `target`. Raises RollmeshError where NIXL does not read that memory."""
    command = [*PYTHON, __name__]
    async with (
        running_piped("owner", command, folder, start_within_s=_START_S) as owner,
        running_piped("reader", command, folder, start_within_s=_START_S) as reader,
    ):
        held = await owner.ask(Hold(nbytes, source), Held)
        return await reader.ask(Read(held, target, rounds), Times, _READ_S)


class _End:
    """One process: what it was asked to hold stays until it ends."""

    def __init__(self) -> None:
        self._exporter: NixlExporter | None = None

    async def handle(self, command: Hold | Read) -> msgspec.Struct:
        if isinstance(command, Read):
            return await asyncio.to_thread(_read, command)
        self._exporter = exporter = NixlExporter(_memory(command.device))
        if exporter.device is None:
            arena = exporter.allocate(command.nbytes)
            flat = flat_bytes(arena.view)
        else:
            arena = on_device = exporter.allocate_on_device(command.nbytes)
            flat = on_device.flat
        flat.copy_(_pattern(command.nbytes, command.device))
        arena.settle()
        source = exporter.export(arena)
        assert isinstance(source, NixlSource)
        return Held(source, command.device)


def _read(command: Read) -> Times:
    """In buckets of the default size, as versions are."""
    source, memory = command.held.source, _memory(command.device)
    reader = NixlReader(_DEADLINE_S, memory)
    if memory is not None and source.memory != memory.kind:
        raise RollmeshError(f"NIXL does not take the memory of {command.held.device}")
    starts = range(0, source.length, DEFAULT_BUCKET_BYTES)
    if memory is None:
        view = private_arena(source.length).view
        own = flat_bytes(view)

        def read() -> None:
            deque(reader.read_many(source, [(at, view[at : at + DEFAULT_BUCKET_BYTES]) for at in starts]), 0)
    else:
        own = memory.allocate(source.length)

        def read() -> None:
            deque(reader.read_to_device(source, [(at, own[at : at + DEFAULT_BUCKET_BYTES]) for at in starts]), 0)

    nixl = [_timed(read) for _ in range(command.rounds + 1)]
    expected = _pattern(source.length, command.held.device)
    equal = torch.equal(own, expected.to(own.device))
    copy = [_timed(lambda: own.copy_(expected)) for _ in range(command.rounds + 1)]
    # The first of each connects and warms up.
    return Times(nixl[1:], copy[1:], equal)


def _memory(device: str) -> CudaMemory | None:
    found = torch.device(device)
    return None if found.type == "cpu" else CudaMemory(found.index)


def _pattern(nbytes: int, device: str) -> torch.Tensor:
    """The same bytes in every process, other ones in every place nearby."""
    return (torch.arange(nbytes, device=device, dtype=torch.int32) % 251).to(torch.uint8)


def _timed(work: Callable[[], object]) -> float:
    _settle()
    begin = time.perf_counter()
    work()
    _settle()
    return time.perf_counter() - begin


def _settle() -> None:
    for index in range(torch.cuda.device_count()):
        torch.cuda.synchronize(index)


def _main() -> None:
    replies = replies_only()
    asyncio.run(answer_lines(replies, Hold | Read, _End().handle))
    os._exit(0)


if __name__ == "__main__":
    _main()

"""NIXL from the memory of one device to that of another, beside a copy between the two by the driver (a peer copy).

    owner, device 0   ── NIXL READ ──►  reader, device 1         two processes, as a trainer and an engine are
    reader, device 0  ── copy ───────►  reader, device 1

The wire alone: nothing is hashed. On a CPU both ends are in the host's memory and the copy is memcpy, which shows that the
agents, their descriptions and the bytes are right, and nothing about devices.

python -m benchmarks.weights.device_wire
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.harness.processes import PYTHON, answer_lines, replies_only, running_piped
from services.wire.errors import RollmeshError
from weight_bus.transports.nixl import UCX_TRANSPORTS, make_agent

ON_DEVICES: Mapping[str, str] = {"UCX_TLS": f"{UCX_TRANSPORTS},cuda_copy,cuda_ipc"}
"""What UCX must be allowed besides what it is by default."""
_START_S, _READ_S = 120.0, 300.0
_DEADLINE_S = 60.0
_SERVE_EVERY_S = 0.001


class Hold(msgspec.Struct, frozen=True, tag="hold"):
    """Fill so many bytes on this device (`cpu`, `cuda:0`) and register them. Answer: Held."""

    nbytes: int
    device: str


class Held(msgspec.Struct, frozen=True):
    """`agent`: NIXL's metadata of the owner."""

    agent: bytes
    address: int
    nbytes: int
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
    environment = ON_DEVICES if "cuda" in source + target else {}
    command = [*PYTHON, __name__]
    async with (
        running_piped("owner", command, folder, start_within_s=_START_S, environment=environment) as owner,
        running_piped("reader", command, folder, start_within_s=_START_S, environment=environment) as reader,
    ):
        held = await owner.ask(Hold(nbytes, source), Held)
        return await reader.ask(Read(held, target, rounds), Times, _READ_S)


class _End:
    """One process: what it was asked to hold stays until it ends."""

    def __init__(self) -> None:
        self._agent: Any = None
        self._kept: list[Any] = []
        self._serving: asyncio.Task[None] | None = None

    async def handle(self, command: Hold | Read) -> msgspec.Struct:
        if self._agent is None:
            self._agent = make_agent("device-wire")
        if isinstance(command, Hold):
            memory = _pattern(command.nbytes, command.device)
            self._register(memory)
            self._serving = asyncio.create_task(self._serve())
            return Held(self._agent.get_agent_metadata(), memory.data_ptr(), command.nbytes, command.device)
        return await asyncio.to_thread(self._read, command)

    async def _serve(self) -> None:
        """As the trainer's exporter does: asking for notifications makes UCX answer."""
        while True:
            self._agent.get_new_notifs()
            await asyncio.sleep(_SERVE_EVERY_S)

    def _register(self, memory: torch.Tensor) -> None:
        place = [(memory.data_ptr(), memory.nbytes, memory.device.index or 0, "")]
        self._kept += [memory, self._agent.register_memory(place, _kind(str(memory.device)))]

    def _read(self, command: Read) -> Times:
        held = command.held
        own = torch.zeros(held.nbytes, dtype=torch.uint8, device=command.device)
        self._register(own)
        remote = self._agent.add_remote_agent(held.agent)
        name = remote.decode() if isinstance(remote, bytes) else remote
        handle = self._agent.initialize_xfer(
            "READ",
            self._agent.get_xfer_descs([(own.data_ptr(), own.nbytes, own.device.index or 0)], _kind(command.device)),
            self._agent.get_xfer_descs(
                [(held.address, held.nbytes, torch.device(held.device).index or 0)], _kind(held.device)
            ),
            name,
        )
        nixl = [_timed(lambda: self._transfer(handle)) for _ in range(command.rounds + 1)]
        expected = _pattern(held.nbytes, held.device)
        equal = torch.equal(own, expected.to(own.device))
        copy = [_timed(lambda: own.copy_(expected)) for _ in range(command.rounds + 1)]
        handle.release()
        # The first of each connects and warms up.
        return Times(nixl[1:], copy[1:], equal)

    def _transfer(self, handle: Any) -> None:
        ends = time.monotonic() + _DEADLINE_S
        state = str(self._agent.transfer(handle))
        while state == "PROC":
            if time.monotonic() > ends:
                raise RollmeshError(f"NIXL did not read within {_DEADLINE_S:.0f} s")
            state = str(self._agent.check_xfer_state(handle))
        if state != "DONE":
            raise RollmeshError(f"NIXL's read ended as {state}")


def _kind(device: str) -> str:
    return "VRAM" if device.startswith("cuda") else "DRAM"


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

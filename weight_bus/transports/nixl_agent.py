"""NIXL's agents: what UCX is told before it is loaded, and memory that an agent knows."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from services.wire.weights_api import MemoryKind
from weight_bus.errors import TransportError
from weight_bus.memory.arena import address_of
from weight_bus.transports.environment import NIXL_BACKEND, NIXL_MEMORY
from weight_bus.transports.nixl_wheel import nixl_module

if TYPE_CHECKING:
    import torch

    from weight_bus.memory.device import DeviceMemory

# Measured on one host: five times as fast as the default list; without tcp it cannot connect.
UCX_TRANSPORTS = "tcp,cma,posix,sysv,self"
UCX_DEVICE_TRANSPORTS = f"{UCX_TRANSPORTS},cuda_copy,cuda_ipc"
"""With which UCX knows memory of a GPU, and reads that of another one of the host."""
# A tenth faster within a host than UCX's default of 512 KiB.
UCX_SEGMENT = "16m"
_TRIAL_BYTES = 4096
_log = structlog.get_logger()
_PIN_NOTHING = frozenset(UCX_TRANSPORTS.split(","))


@dataclass(frozen=True)
class Place:
    """`nbytes` at `address` of memory of this kind. `device`: which of it, as NIXL numbers them; 0 for the host's.

    `within`: address and bytes of the whole that an agent is told of, and what keeps it from being freed.
    """

    address: int
    nbytes: int
    device: int
    kind: MemoryKind
    within: tuple[int, int, Any]

    @property
    def described(self) -> tuple[int, int, int]:
        """As NIXL's lists of descriptors have it."""
        return self.address, self.nbytes, self.device


NOWHERE = Place(0, 0, 0, "DRAM", (0, 0, None))


def host_place(out: memoryview) -> Place:
    """Of writable bytes of the host."""
    if not len(out):
        return NOWHERE
    whole = memoryview(out.obj)
    return Place(address_of(out), len(out), 0, "DRAM", (address_of(whole), whole.nbytes, whole))


def device_place(out: torch.Tensor, device: int, kind: MemoryKind) -> Place:
    """Of uint8 `[n]` of a device's memory."""
    storage = out.untyped_storage()
    return Place(out.data_ptr(), out.nbytes, device, kind, (storage.data_ptr(), storage.nbytes(), storage))


def cut(pieces: Iterable[tuple[int, memoryview]], most: int) -> Iterator[tuple[int, int, memoryview, bool]]:
    """Number, offset and memory of parts of at most `most` bytes, and whether one is its piece's last."""
    for index, (offset, out) in enumerate(pieces):
        for start in range(0, max(1, len(out)), most):
            part = out[start : start + most]
            yield index, offset + start, part, start + len(part) == len(out)


class MakeAgent(Protocol):
    def __call__(self, role: str, *, on_device: bool) -> Any: ...


def ucx_settings(environment: Mapping[str, str], *, on_device: bool = False) -> dict[str, str]:
    """The environment variables that UCX reads when it is loaded, where the user has set no others.

    `on_device`: memory of a GPU is registered.
    """
    wanted = {"UCX_TLS": UCX_DEVICE_TRANSPORTS if on_device else UCX_TRANSPORTS}
    transports = environment.get("UCX_TLS", wanted["UCX_TLS"]).split(",")
    if not _PIN_NOTHING.issuperset(transports) or "cma" in transports:
        # UCX warns of variables that nothing reads.
        wanted["UCX_CMA_SEG_SIZE"] = UCX_SEGMENT
    if _PIN_NOTHING.issuperset(transports):
        # UCX rewrites the C library's memory calls, with 0.4 s of busy waiting, to notice when memory is unmapped that a
        # network card has pinned. These transports pin none.
        wanted["UCX_MEM_MMAP_HOOK_MODE"] = "none"
    return {name: value for name, value in wanted.items() if name not in environment}


def make_agent(role: str, *, on_device: bool = False) -> Any:
    """A NIXL agent on UCX whose name no other process has. Raises TransportError when UCX cannot start.

    `on_device`: for memory of a GPU; the process's first agent decides, as UCX is loaded with it.
    """
    os.environ.update(ucx_settings(os.environ, on_device=on_device))
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    api = import_module(f"{nixl_module()}._api")
    name = f"rollmesh-{role}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        backend = os.environ.get(NIXL_BACKEND, "UCX")
        agent = api.nixl_agent(name, api.nixl_agent_config(enable_prog_thread=False, backends=[backend]))
    except Exception as error:
        raise TransportError(
            f"NIXL could not start ({error})",
            f"see weights.nixl: try weights.nixl.transports={UCX_TRANSPORTS.split(',')}, or weights.transport=shm",
        ) from error
    return agent


def usable(agent: Any, memory: DeviceMemory | None) -> DeviceMemory | None:
    """`memory`, where the agent takes it; else the log says why not, and None. Raises TransportError where the settings ask
    for it (`weights.nixl.memory=device`).
    """
    if memory is None:
        return None
    try:
        with memory.current():
            trial = memory.allocate(_TRIAL_BYTES)
            agent.deregister_memory(register(agent, trial.data_ptr(), trial.nbytes, memory.number, memory.kind))
    except TransportError as error:
        if os.environ.get(NIXL_MEMORY) == "device":
            raise
        _log.warning("weights go through the host's memory", why=str(error))
        return None
    return memory


def register(agent: Any, address: int, nbytes: int, device: int = 0, kind: MemoryKind = "DRAM") -> Any:
    """Tell an agent of memory that others may read, or that it reads into. Raises TransportError where it cannot be."""
    try:
        return agent.register_memory([(address, nbytes, device, "")], kind)
    except Exception as error:
        what, remedy = "", ""
        if kind != "DRAM":
            what, remedy = f" of GPU {device}", "install NIXL's wheel for torch's CUDA, or set weights.nixl.memory=host"
        raise TransportError(f"NIXL could not register {nbytes} bytes{what} ({error})", remedy) from error

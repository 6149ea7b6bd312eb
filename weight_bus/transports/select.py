"""Make the exporter and readers of a weight transport by name; `auto` is nixl where it is installed, else shm.

nixl   RDMA READ of registered memory    shm    one copy on the same host
nccl   broadcast, gloo without a GPU     file   safetensors snapshots
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from services.security.permissions import is_loopback, is_unspecified
from services.wire.errors import UsageError
from weight_bus.transports.base import Exporter, Reader
from weight_bus.transports.file import FileExporter, FileReader
from weight_bus.transports.nixl_wheel import cuda_of_torch, nixl_module, package_for
from weight_bus.transports.shm import ShmExporter, ShmReader

if TYPE_CHECKING:
    from weight_bus.memory.device import DeviceMemory

_KNOWN = ("nixl", "shm", "nccl", "file")


def nixl_installed() -> bool:
    """Whether NIXL can be imported, without importing it."""
    return nixl_module() is not None


def resolve(name: str) -> str:
    """`nixl`, `shm`, `nccl` or `file`. Raises UsageError for an unknown name, or for nixl where it is missing."""
    if name == "auto":
        return "nixl" if nixl_installed() else "shm"
    if name == "nixl" and not nixl_installed():
        raise UsageError(
            "the nixl transport is not installed",
            f"pip install '{package_for(cuda_of_torch())}' (Linux) or set weights.transport=shm",
        )
    if name not in _KNOWN:
        raise UsageError(f"no weight transport {name!r}", f"known: auto, {', '.join(_KNOWN)}")
    return name


def make_exporter(
    name: str,
    run_id: str,
    *,
    host: str = "127.0.0.1",
    file_root: Path | None = None,
    file_keep: int = 2,
    key: str | None = None,
    model_folder: Path | None = None,
    device: DeviceMemory | None = None,
) -> Exporter:
    """The publisher's side of the transport `name`. Raises UsageError as `resolve` does, for file without a folder, and for
    broadcasts at an address that others reach without a key to sign what they carry.

    `host`: the address that broadcasts are offered at. `file_root`, `file_keep`, `key`, `model_folder`: for snapshots,
    see `FileExporter`. `device`: whose memory nixl's arenas lie in
    (`weight_bus.transports.device_choice`); None: the host's.
    """
    match resolve(name):
        case "shm":
            return ShmExporter(run_id)
        case "file":
            return FileExporter(_needed(file_root), keep=file_keep, key=key, model_folder=model_folder)
        case "nccl":
            from weight_bus.transports.nccl.exporter import CollectiveExporter

            _check_host(host, key)
            return CollectiveExporter(host)
        case _:
            from weight_bus.transports.nixl import NixlExporter

            return NixlExporter(device)


def make_readers(
    name: str, deadline_s: float = 30.0, *, file_root: Path | None = None, device: DeviceMemory | None = None
) -> list[Reader]:
    """Readers in order of preference: the named one first, then what else could reach a source.

    `file_root`: the folder that weight files may be read from; without it none is. `device`: whose memory nixl reads that
    of other devices into; None: it reads into the host's.
    """
    found = resolve(name)
    readers: list[Reader] = []
    if found == "nixl":
        from weight_bus.transports.nixl import NixlReader

        readers.append(NixlReader(deadline_s, device))
    elif found == "nccl":
        from weight_bus.transports.nccl.reader import CollectiveReader

        readers.append(CollectiveReader(deadline_s))
    elif found == "file":
        return [FileReader(_needed(file_root)), ShmReader()]
    readers.append(ShmReader())
    if file_root is not None:
        readers.append(FileReader(file_root))
    return readers


def _check_host(host: str, key: str | None) -> None:
    if is_unspecified(host):
        raise UsageError(
            f"weights.broadcast_host={host} is no address that an engine can call",
            "name one of this machine's addresses",
        )
    if key is None and not is_loopback(host):
        raise UsageError(
            f"weights.broadcast_host={host} is not a loopback address, and there is no weights key",
            "set 127.0.0.1, or give --keys-dir (`rollmesh keys init`)",
        )


def _needed(file_root: Path | None) -> Path:
    if file_root is None:
        raise UsageError("the file transport has no folder", "set weights.file_root")
    return file_root

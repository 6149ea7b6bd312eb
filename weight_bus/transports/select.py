"""Which transport a name means on this machine: `auto` is nixl where it is installed, else shm."""

from __future__ import annotations

from importlib.util import find_spec

from services.wire.errors import UsageError
from weight_bus.transports.base import Exporter, Reader
from weight_bus.transports.shm import ShmExporter, ShmReader


def nixl_installed() -> bool:
    """Whether NIXL can be imported, without importing it."""
    return find_spec("nixl_cu12") is not None


def resolve(name: str) -> str:
    """`nixl` or `shm`. Raises UsageError for an unknown name, or for nixl where it is missing."""
    if name == "auto":
        return "nixl" if nixl_installed() else "shm"
    if name == "nixl" and not nixl_installed():
        raise UsageError(
            "the nixl transport is not installed",
            "pip install 'nixl-cu12>=1.5,<2' (Linux) or set weights.transport=shm",
        )
    if name not in ("nixl", "shm"):
        raise UsageError(f"no weight transport {name!r}", "known: auto, nixl, shm")
    return name


def make_exporter(name: str, run_id: str) -> Exporter:
    """The publisher's side of the transport `name` (`auto`, `nixl`, `shm`). Raises UsageError as `resolve` does."""
    if resolve(name) == "shm":
        return ShmExporter(run_id)
    from weight_bus.transports.nixl import NixlExporter

    return NixlExporter()


def make_readers(name: str, deadline_s: float = 30.0) -> list[Reader]:
    """Readers in order of preference: the named one first, then what else could reach a source."""
    if resolve(name) == "shm":
        return [ShmReader()]
    from weight_bus.transports.nixl import NixlReader

    return [NixlReader(deadline_s), ShmReader()]

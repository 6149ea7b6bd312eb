"""What `[weights.nixl]` and `[weights.nccl]` come to: environment variables that UCX, NIXL, NCCL and gloo read when loaded.

They are set before a library is, in the process that was given the settings; what it starts inherits them. A variable that
is set already stays: it is this machine's own, and hosts of one run may differ.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Mapping, MutableMapping
from difflib import get_close_matches
from pathlib import Path

import structlog

from services.config.settings import WeightSettings
from services.wire.errors import UsageError

NIXL_BACKEND = "ROLLMESH_NIXL_BACKEND"
NIXL_MEMORY = "ROLLMESH_NIXL_MEMORY"
GLOO_INTERFACE = "ROLLMESH_GLOO_INTERFACE"
"""Apart from GLOO_SOCKET_IFNAME, which vLLM's own groups within a machine read."""
BROADCAST_PORTS = "ROLLMESH_BROADCAST_PORTS"
_INFINIBAND = Path("/sys/class/infiniband")

_log = structlog.get_logger()


def wire_environment(weights: WeightSettings) -> dict[str, str]:
    """The variables that these settings make; nothing for those that nobody set. Pure."""
    nixl, nccl = weights.nixl, weights.nccl
    wanted = {
        NIXL_BACKEND: "" if nixl.backend == "UCX" else nixl.backend,
        NIXL_MEMORY: "" if nixl.memory == "auto" else nixl.memory,
        "UCX_NET_DEVICES": ",".join(nixl.devices),
        "UCX_TLS": ",".join(nixl.transports),
        "UCX_TCP_PORT_RANGE": nixl.ports or "",
        "NCCL_SOCKET_IFNAME": f"={nccl.interface}" if nccl.interface else "",
        "NCCL_IB_HCA": f"={','.join(nccl.devices)}" if nccl.devices else "",
        GLOO_INTERFACE: nccl.interface or "",
        BROADCAST_PORTS: nccl.ports or "",
    }
    return {name: value for name, value in wanted.items() if value}


def check_devices(weights: WeightSettings, interfaces: Collection[str], infiniband: Collection[str]) -> None:
    """Raise UsageError for a device that this machine does not have. Pure.

    UCX names a port of an InfiniBand device behind a colon, and a device of InfiniBand may stand for all its ports.
    """
    for name in weights.nixl.devices:
        _known("weights.nixl.devices", name, [*interfaces, *infiniband])
    for name in weights.nccl.devices:
        _known("weights.nccl.devices", name, infiniband)
    if weights.nccl.interface is not None:
        _known("weights.nccl.interface", weights.nccl.interface, interfaces)


def set_wire(weights: WeightSettings, environment: MutableMapping[str, str] = os.environ) -> None:
    """Have the libraries of this process, and of those that it starts, do as the settings say. Raises UsageError as
    `check_devices` does."""
    wanted = wire_environment(weights)
    if not wanted:
        return
    check_devices(weights, [name for _, name in socket.if_nameindex()], _infiniband())
    for name, value in wanted.items():
        stands = environment.setdefault(name, value)
        if stands != value:
            _log.info("the environment goes before the settings", variable=name, value=stands, settings=value)


def ports_of(environment: Mapping[str, str] = os.environ) -> range:
    """Those that broadcasts may be offered at; 0, for any, where nobody chose."""
    low, dash, high = environment.get(BROADCAST_PORTS, "").partition("-")
    return range(int(low), int(high) + 1) if dash else range(1)


def _known(setting: str, name: str, known: Collection[str]) -> None:
    if name.partition(":")[0] in known:
        return
    near = get_close_matches(name, known, 1)
    nearest = f": the nearest is {near[0]!r}" if near else ""
    raise UsageError(
        f"{setting}: this machine has no device {name!r}{nearest}", f"it has {', '.join(sorted(known)) or 'none'}"
    )


def _infiniband() -> list[str]:
    try:
        return [device.name for device in _INFINIBAND.iterdir()]
    except OSError:
        return []

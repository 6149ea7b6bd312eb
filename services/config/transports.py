"""Which devices, addresses and ports weights travel over: `[weights.nixl]` and `[weights.nccl]`."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from services.config.base import Section
from services.policies.placement.wire_memory import WireMemory


def _port_range(text: str) -> str:
    low, dash, high = text.partition("-")
    if not (dash and low.isdecimal() and high.isdecimal() and 1024 <= int(low) <= int(high) <= 65535):
        raise ValueError(f"{text!r} is no range of ports: write LOW-HIGH, of 1024 to 65535, such as 40000-40099")
    return text


PortRange = Annotated[str, AfterValidator(_port_range)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:@-]+$")]


class NixlSettings(Section):
    """An empty list leaves the choice to UCX, or to UCX's own environment variables, which go before these settings."""

    backend: Name = Field(default="UCX", description="NIXL's plug-in, by its name: `UCX`, `LIBFABRIC`, `Mooncake`, …")
    devices: tuple[Name, ...] = Field(
        default=(),
        description="Network devices, such as `mlx5_0:1` or `eth1` (`UCX_NET_DEVICES`); empty: all of the machine",
    )
    transports: tuple[Name, ...] = Field(
        default=(), description="UCX's transports, such as `rc`, `tcp`, `cuda_copy`, `self` (`UCX_TLS`)"
    )
    memory: WireMemory = Field(
        default="auto",
        description="Where weights lie on the wire: device: in GPUs' memory at both ends; auto: there, where trainer and "
        "engines have GPUs with room for it",
    )
    ports: PortRange | None = Field(
        default=None, description="Ports that UCX's TCP listens on, `LOW-HIGH` (`UCX_TCP_PORT_RANGE`); empty: any"
    )


class NcclSettings(Section):
    """Of broadcasts (`weights.transport = nccl`), by NCCL or gloo."""

    interface: Name | None = Field(
        default=None,
        description="Network interface of both ends (`NCCL_SOCKET_IFNAME`; gloo's too); empty: the one that leads to "
        "`weights.broadcast_host`",
    )
    devices: tuple[Name, ...] = Field(default=(), description="InfiniBand devices of NCCL (`NCCL_IB_HCA`)")
    ports: PortRange | None = Field(
        default=None, description="Ports that the trainer offers broadcasts at, `LOW-HIGH`; empty: any"
    )

"""Devices, addresses and ports of the wire: the environment that the settings make, and what is refused."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from services.config.load import load_settings
from services.config.settings import WeightSettings
from services.wire.errors import UsageError
from weight_bus.transports.environment import (
    BROADCAST_PORTS,
    GLOO_INTERFACE,
    NIXL_BACKEND,
    check_devices,
    ports_of,
    set_wire,
    wire_environment,
)

HERE = next(name for _, name in socket.if_nameindex())
CLUSTER = {
    "transport": "nixl",
    "nixl": {"devices": ["mlx5_0:1", "mlx5_1:1"], "transports": ["rc", "cuda_copy", "self"], "ports": "42000-42099"},
    "nccl": {"interface": "eth1", "devices": ["mlx5_0"], "ports": "43000-43009"},
}


def wire(**given: object) -> WeightSettings:
    return WeightSettings.model_validate(given)


def test_without_settings_the_libraries_choose() -> None:
    environment: dict[str, str] = {}
    set_wire(wire(), environment)
    assert environment == {}


def test_a_cluster_is_resolved_to_what_ucx_nccl_and_gloo_read() -> None:
    assert wire_environment(wire(**CLUSTER)) == {
        "UCX_NET_DEVICES": "mlx5_0:1,mlx5_1:1",
        "UCX_TLS": "rc,cuda_copy,self",
        "UCX_TCP_PORT_RANGE": "42000-42099",
        "NCCL_SOCKET_IFNAME": "=eth1",
        "NCCL_IB_HCA": "=mlx5_0",
        GLOO_INTERFACE: "eth1",
        BROADCAST_PORTS: "43000-43009",
    }
    assert wire_environment(wire(nixl={"backend": "LIBFABRIC"})) == {NIXL_BACKEND: "LIBFABRIC"}


def test_what_a_machine_sets_itself_goes_before_the_settings() -> None:
    environment = {"UCX_TLS": "tcp"}
    set_wire(wire(nixl={"transports": ["rc", "self"], "devices": [HERE]}), environment)
    assert environment == {"UCX_TLS": "tcp", "UCX_NET_DEVICES": HERE}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"nixl": {"devices": ["mlx5_9:1"]}}, r"weights.nixl.devices: .* no device 'mlx5_9:1'"),
        ({"nixl": {"devices": ["eth11"]}}, r"weights.nixl.devices: .* no device 'eth11': the nearest is 'eth1'"),
        ({"nccl": {"interface": "etj1"}}, r"weights.nccl.interface: .* no device 'etj1': the nearest is 'eth1'"),
        ({"nccl": {"devices": ["eth1"]}}, r"weights.nccl.devices: .* no device 'eth1'.*it has mlx5_0, mlx5_1"),
    ],
)
def test_a_device_that_the_machine_does_not_have_is_refused_by_name(given: dict[str, object], said: str) -> None:
    check_devices(wire(**CLUSTER), ["lo", "eth1"], ["mlx5_0", "mlx5_1"])
    with pytest.raises(UsageError, match=said):
        check_devices(wire(**given), ["lo", "eth1"], ["mlx5_0", "mlx5_1"])


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("weights.nixl.device=['eth1']", "devices"),
        ("weights.nixl.ports=42000", "weights.nixl.ports"),
        ("weights.nixl.ports=500-600", "1024 to 65535"),
        ("weights.nccl.ports=43009-43000", "no range of ports"),
        ("weights.nccl.interface=eth0,eth1", "weights.nccl.interface"),
        ("weights.nccl.interface=eth1", "would have no effect under weights.transport=auto"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(override: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load_settings(None, [override])


def test_nixl_settings_are_refused_where_nobody_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[weights]\ntransport = "shm"\n[weights.nixl]\ntransports = ["tcp"]\n')
    with pytest.raises(UsageError, match=r"weights.nixl.transports=\('tcp',\) would have no effect under .*=shm"):
        load_settings(file, [])


def test_broadcasts_are_offered_at_the_ports_that_were_named() -> None:
    torch = pytest.importorskip("torch")
    del torch
    from weight_bus.errors import TransportError
    from weight_bus.transports.nccl import group

    assert list(ports_of({})) == [0]
    with socket.socket() as taken, pytest.MonkeyPatch.context() as patch:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        patch.setenv(BROADCAST_PORTS, f"{port}-{port + 20}")
        store, found = group.open_store("127.0.0.1", 5.0)
        assert port < found <= port + 20
        patch.setenv(BROADCAST_PORTS, f"{port}-{port}")
        with pytest.raises(TransportError, match=r"weights\.nccl\.ports"):
            group.open_store("127.0.0.1", 5.0)
        del store

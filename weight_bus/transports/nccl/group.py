"""NCCL and gloo process groups for broadcasts, one an epoch, apart from the trainer's own process group.

    store, one an export     epoch ─► number that is open for joining
                             E/joined ─► tickets given out      E/from/T ─► first byte that ticket T wants
                             E/gone/T ─► T has given up          E/done ─► members that have everything
                             E/plan  ─► `Plan`: members, first byte, chunk; fixed, once set

The publisher is rank 0, the members follow in the plan's order. Gloo and NCCL run the same code: NCCL's chunks lie in
GPU memory, gloo's on the host.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta
from typing import Any, Protocol

import msgspec
import torch
from torch import distributed

from services.security.permissions import is_loopback
from weight_bus.errors import TransportError
from weight_bus.transports.environment import GLOO_INTERFACE, ports_of
from weight_bus.transports.nccl.bounded_store import BoundedStore

# Torch's type stubs lack the classes made in C++.
_c10d: Any = distributed

GLOO, NCCL = "gloo", "nccl"
IN_FLIGHT = 2
"""Chunks under way at once: one arrives while the one before is used."""


class Store(Protocol):
    """What is used of torch's key-value store. Each method raises RuntimeError when the store is gone."""

    def add(self, key: str, amount: int) -> int: ...

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...


class Plan(msgspec.Struct, frozen=True):
    """Who takes part in an epoch (tickets in rank order, from rank 1) and what is sent: all bytes from `start` on."""

    members: list[int]
    start: int
    chunk_bytes: int
    stall_s: float


def default_backend() -> str:
    """NCCL where there is a GPU and torch has it, else gloo."""
    return NCCL if torch.cuda.is_available() and distributed.is_nccl_available() else GLOO


def open_store(host: str, timeout_s: float) -> tuple[Store, int]:
    """A store that listens on `host` alone, on a free port; gives the port too. Raises TransportError."""
    family = socket.AF_INET6 if _is_v6(host) else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # torch would listen on every address of the machine: it is given a socket that does not.
        _bind(listener, host, ports_of())
        listener.listen(1024)
        port = int(listener.getsockname()[1])
        store: Store = _c10d.TCPStore(
            host,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
    except (OSError, RuntimeError) as error:
        listener.close()
        raise TransportError(
            f"no broadcast store could be opened on {host} ({error})",
            "set weights.broadcast_host to an address of this machine, and weights.nccl.ports to ports that are free",
        ) from error
    return store, port


def _bind(listener: socket.socket, host: str, ports: range) -> None:
    """To the first of `ports` that is free. Raises OSError."""
    for port in ports:
        try:
            listener.bind((host, port))
            return
        except OSError:
            if port == ports[-1]:
                raise


def reach_store(host: str, port: int, timeout_s: float) -> Store:
    """The store of a publisher, which has so long for each call. Raises TransportError when nobody answers within
    `timeout_s`."""
    try:
        # torch tries again, loudly and until its deadline, where nobody listens: ask once before.
        socket.create_connection((host, port), timeout_s).close()
        store = BoundedStore(
            _c10d.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s)), timeout_s
        )
    except (OSError, RuntimeError) as error:
        remedy = "is the publisher gone?"
        if is_loopback(host):
            remedy = (
                "a loopback address leads to this engine's own machine: where the publisher is on another one, set "
                "weights.broadcast_host to an address of that; else, is the publisher gone?"
            )
        raise TransportError(f"no broadcast store answers at {host}:{port} ({error})", remedy) from error
    return store


def make_group(backend: str, store: Store, epoch: int, rank: int, size: int, peer: str, stall_s: float) -> Any:
    """The group of one epoch; blocks until all its members are there. Raises RuntimeError when one is not in `stall_s`.

    `peer`: an address that the group's traffic goes to; it decides which of this machine's addresses is used.
    """
    plain = store.plain if isinstance(store, BoundedStore) else store
    place = _c10d.PrefixStore(f"{epoch}/group", plain)
    if backend == NCCL:
        options = _c10d.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=stall_s)
        return _c10d.ProcessGroupNCCL(place, rank, size, options)
    gloo = _c10d.ProcessGroupGloo
    made = gloo._Options()
    made._timeout = timedelta(seconds=stall_s)
    interface = os.environ.get(GLOO_INTERFACE)
    made._devices = [
        gloo.create_device(interface=interface) if interface else gloo.create_device(hostname=local_address(peer))
    ]
    made._threads = IN_FLIGHT
    return gloo(place, rank, size, made)


def end_group(group: Any) -> None:
    """Leave the group: members that still wait for this one get an error, now or when their stall time is over."""
    try:
        group.abort()
    except RuntimeError:
        # Not every backend can; its sockets are closed when the last reference goes.
        return


def chunk_buffer(backend: str, nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda" if backend == NCCL else "cpu")


def local_address(peer: str) -> str:
    """The address of this machine that traffic to `peer` leaves from; no packet is sent. Raises RuntimeError."""
    family = socket.AF_INET6 if _is_v6(peer) else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((peer, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise RuntimeError(f"no route to {peer} ({error})") from error


def quiet_torch() -> None:
    """Torch logs a stack trace for every peer that disconnects; we log one line instead."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _is_v6(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def seconds(count: float) -> timedelta:
    return timedelta(seconds=count)

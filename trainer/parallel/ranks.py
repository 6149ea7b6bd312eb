"""The ranks of a trainer: one process each, of one process group, in a mesh of `services.policies.training.layout`.

    with joined(settings, …) as ranks:      torchrun's environment variables ─► process group ─► mesh; closed at the end
    Ranks.alone()                           one process without a group: every call answers at once

    ranks.mesh["data"]          the group of one dimension, as torch's `fully_shard` and DTensors take it
    ranks.send / receive        bytes from rank 0 to each, over a gloo group of their own
    ranks.gather                everyone's bytes, to everyone

Every collective has a deadline. Nothing is pickled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from services.policies.training.layout import ALONE, DIMENSIONS, Layout
from services.wire.errors import RollmeshError, UsageError

COLLECTIVE_S = 600.0
"""Deadline of a collective of a step: the slowest rank's share of it."""
ORDER_S = 7200.0
"""How long a rank waits for the next order of rank 0, which may wait for trajectories, or for engines."""
_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class RankError(RollmeshError):
    """Another rank is gone, or did not come in time: none can go on."""

    code = "rank"


@dataclass(frozen=True)
class Ranks:
    """This process as one of `layout.ranks`. `device`: its own. `mesh`: None where it is alone."""

    rank: int
    layout: Layout
    device: torch.device
    mesh: DeviceMesh | None = None
    _orders: dist.ProcessGroup | None = None

    @staticmethod
    def alone(device: torch.device | None = None) -> Ranks:
        """One process, without a process group. `device`: the GPU where there is one."""
        if device is None:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        return Ranks(0, ALONE, device)

    @staticmethod
    def of_group(layout: Layout, device: torch.device | None = None) -> Ranks:
        """Of torch's default process group, which is there. Made by all of its ranks alike.

        Raises UsageError where the group has another number of ranks.
        """
        size, rank = dist.get_world_size(), dist.get_rank()
        if size != layout.ranks:
            raise UsageError(f"{layout} makes {layout.ranks} ranks, and {size} were started", "set trainer.parallel")
        device = _own_device() if device is None else device
        mesh = init_device_mesh(device.type, layout.shape, mesh_dim_names=DIMENSIONS)
        orders = dist.new_group(backend="gloo", timeout=timedelta(seconds=ORDER_S))
        return Ranks(rank, layout, device, mesh, orders)

    @property
    def several(self) -> bool:
        return self.mesh is not None

    @property
    def leads(self) -> bool:
        """Rank 0: it reads the stream, decides, logs and publishes."""
        return self.rank == 0

    @property
    def share(self) -> int:
        """Which of `layout.shares` parts of the rows are this rank's."""
        return self.layout.share(self.rank)

    def send(self, orders: Sequence[bytes]) -> None:
        """From rank 0: `orders[rank]` to each other rank, which is in `receive`. Raises RankError."""
        if self._orders is None:
            return
        sizes = torch.tensor([len(order) for order in orders])
        with _told("a rank does not take orders"):
            dist.broadcast(sizes, 0, group=self._orders)
            sent = [
                dist.isend(_tensor(order), rank, group=self._orders)
                for rank, order in enumerate(orders)
                if rank and len(order)
            ]
            for work in sent:
                if work is not None:
                    work.wait()

    def receive(self) -> bytes:
        """The next order for this rank, which is not rank 0. Raises RankError where none comes."""
        sizes = torch.zeros(self.layout.ranks, dtype=torch.int64)
        with _told("rank 0 gives no orders"):
            dist.broadcast(sizes, 0, group=self._orders)
            order = torch.empty(int(sizes[self.rank]), dtype=torch.uint8)
            if len(order):
                dist.recv(order, 0, group=self._orders)
        return order.numpy().tobytes()

    def gather(self, part: bytes) -> list[bytes]:
        """Everyone's bytes, by rank, on every rank. Raises RankError."""
        if self._orders is None:
            return [part]
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.layout.ranks)]
        with _told("a rank does not answer"):
            dist.all_gather(sizes, torch.tensor([len(part)]), group=self._orders)
            most = max(int(size) for size in sizes)
            padded = torch.zeros(most, dtype=torch.uint8)
            padded[: len(part)] = _tensor(part)
            parts = [torch.empty(most, dtype=torch.uint8) for _ in sizes]
            dist.all_gather(parts, padded, group=self._orders)
        return [found[: int(size)].numpy().tobytes() for found, size in zip(parts, sizes, strict=True)]


@contextmanager
def joined(layout: Layout, environ: Mapping[str, str] = os.environ) -> Iterator[Ranks]:
    """This process's place among the ranks that were started; the group is closed at the end.

    `environ`: torchrun's variables, where `layout` has more than one rank. Raises UsageError where they are not there, or
    name another number of ranks, and RankError where the others do not come.
    """
    if layout.ranks == 1:
        yield Ranks.alone()
        return
    if missing := [name for name in _VARIABLES if name not in environ]:
        raise UsageError(f"{layout.ranks} ranks, and {', '.join(missing)} not set", "start them with torchrun")
    device = _own_device(environ)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    with _told("the ranks do not meet"):
        dist.init_process_group(backend, rank=rank, world_size=size, timeout=timedelta(seconds=COLLECTIVE_S))
    try:
        yield Ranks.of_group(layout, device)
    finally:
        dist.destroy_process_group()


def ranks_started(environ: Mapping[str, str] = os.environ) -> int | None:
    """How many ranks torchrun, or whoever sets its variables, has started; None where nobody has."""
    return int(environ["WORLD_SIZE"]) if "WORLD_SIZE" in environ and "RANK" in environ else None


def _own_device(environ: Mapping[str, str] = os.environ) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@contextmanager
def _told(what: str) -> Iterator[None]:
    """torch.distributed raises RuntimeErrors: for a process that is gone, and for a deadline."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(f"{what} ({error})", "see the logs of the other ranks") from error

"""The ranks of a trainer: one process each, of one process group, in a mesh of `services.policies.training.layout`.

    with joined(layout) as ranks:           torchrun's environment variables ─► process group ─► mesh; closed at the end
    Ranks.alone()                           one process without a group: every call answers at once

    ranks.mesh["data"]          the group of one dimension, as torch's `fully_shard` and DTensors take it
    ranks.send / receive        bytes from rank 0 to each, over a gloo group of their own
    ranks.gather                everyone's bytes, to everyone

Every collective has a deadline. Nothing is pickled.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from services.policies.training.layout import ALONE, DIMENSIONS, Layout
from services.wire.errors import RollmeshError, UsageError
from trainer.parallel.shared_memory import shared_bytes
from trainer.parallel.start import Started
from trainer.parallel.watch import Watch

COLLECTIVE_S = 600.0
"""Deadline of a collective, at the least: the slowest rank's share of a step."""
ORDER_S = 7200.0
"""How long a rank waits for the next order of rank 0, which may wait for trajectories, or for engines."""
MEET_S = 600.0
"""How long ranks wait for each other to start."""
_OF_GROUPS = ("gloo/", "[gloo]", "NCCL", "Connection closed by peer", "Connection reset by peer")
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
    experts: DeviceMesh | None = None
    """`mesh` with `data` in two, `spread` and `expert`, where data ranks split experts: those of one `expert` group are
    neighbours, and ranks that differ otherwise have the same experts."""
    launch: str = ""
    """The same for all ranks that were started together, and another for those of the next start."""
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
        experts = mesh_of_experts(mesh, layout)
        orders = dist.new_group(backend="gloo", timeout=timedelta(seconds=ORDER_S))
        ranks = Ranks(rank, layout, device, mesh, experts, _orders=orders)
        return replace(ranks, launch=ranks.gather(secrets.token_hex(8).encode())[0].decode())

    def shared(self, group: dist.ProcessGroup, size: int) -> Tensor | None:
        """uint8 `[size]`, the same memory for all ranks of `group`, as `shared_bytes` has it; None where they exchange
        otherwise: on GPUs, and where there is none in common. All of its ranks call it."""
        if self.device.type != "cpu" or dist.get_backend(group) != dist.Backend.GLOO:
            return None
        return shared_bytes(group, size)

    @property
    def several(self) -> bool:
        return self.mesh is not None

    @property
    def leads(self) -> bool:
        """Rank 0: it reads the stream, decides, logs and publishes."""
        return self.rank == 0

    @property
    def context(self) -> DeviceMesh | None:
        """Those that share the tokens of each row; None where one has them all."""
        return None if self.mesh is None or self.layout.context == 1 else self.mesh["context"]

    @property
    def averaged(self) -> int:
        """Over how many ranks a gradient is averaged that is to be their sum: losses are multiplied by it."""
        return self.layout.shares * self.layout.context

    @property
    def share(self) -> int:
        """Which of `layout.shares` parts of the rows are this rank's."""
        return self.layout.share(self.rank)

    def of_shares(self, by_rank: Sequence[bytes]) -> list[bytes]:
        """Of what ranks told, that of one rank for each share of the rows."""
        found: dict[int, bytes] = {}
        for rank, told in enumerate(by_rank):
            found.setdefault(self.layout.share(rank), told)
        return [found[share] for share in range(self.layout.shares)]

    def send(self, orders: Sequence[bytes]) -> None:
        """From rank 0: `orders[rank]` to each other rank, which is in `receive`. Raises RankError."""
        if self._orders is None:
            return
        sizes = torch.tensor([len(order) for order in orders])
        with _told("a rank does not take orders"):
            dist.broadcast(sizes, 0, group=self._orders)
            # Held until they are sent.
            tensors = [_tensor(order) for order in orders]
            sent = [
                dist.isend(tensor, rank, group=self._orders)
                for rank, tensor in enumerate(tensors)
                if rank and len(tensor)
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


def mesh_of_experts(mesh: DeviceMesh, layout: Layout) -> DeviceMesh | None:
    """`Ranks.experts`, of ranks in `mesh`."""
    if layout.expert_on != "data":
        return None
    return mesh._unflatten("data", (layout.data // layout.expert, layout.expert), ("spread", "expert"))


@contextmanager
def joined(layout: Layout, started: Started | None = None, collective_s: float = COLLECTIVE_S) -> Iterator[Ranks]:
    """This process's place among the ranks; their group is closed at the end, and they are watched until then.

    `started`: the ranks that this process started; None where torchrun, or another, has set its variables.
    `collective_s`: deadline of a collective; one that is gone is found by the watch, long before. Raises
    UsageError where these are not there, or name another number of ranks, and RankError where the others do not come, or
    one is gone.
    """
    if layout.ranks == 1:
        yield Ranks.alone()
        return
    environ = os.environ if started is None else started.environ
    if missing := [name for name in _VARIABLES if name not in environ]:
        raise UsageError(f"{layout.ranks} ranks, and {', '.join(missing)} not set", "start them with torchrun")
    rank, size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    if size != layout.ranks:
        raise UsageError(f"{layout} makes {layout.ranks} ranks, and {size} were started", "set trainer.parallel")
    device = _own_device(environ)
    with _told("the ranks do not meet"):
        store = _store(environ, rank, size)
        beside = PrefixStore("watch", store.clone())  # type: ignore[attr-defined]
        watch = Watch(beside, rank, size, [] if started is None else started.others)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("group", store),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=collective_s),
        )
    try:
        ranks = Ranks.of_group(layout, device)
        yield ranks
        if rank:
            # Before rank 0 may go.
            watch.close()
        ranks.gather(b"")
        watch.close()
        dist.destroy_process_group()
    except RankError as error:
        gone = None if rank else watch.named()
        raise error if gone is None else RankError(gone, "see the log above, and that of its machine") from error
    except BaseException as error:
        # The group is not closed: others may wait within a collective, and end once this process has.
        watch.failed(f"{type(error).__name__}: {error}")
        raise


def _store(environ: Mapping[str, str], rank: int, size: int) -> Store:
    """Where the ranks meet: torchrun's own, or one that rank 0 serves."""
    of_torchrun = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = TCPStore(
        environ["MASTER_ADDR"],
        int(environ["MASTER_PORT"]),
        None if of_torchrun else size,
        is_master=rank == 0 and not of_torchrun,
        timeout=timedelta(seconds=MEET_S),
    )
    # What ranks of an earlier start left there is not read.
    return PrefixStore(f"rollmesh/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _own_device(environ: Mapping[str, str] = os.environ) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


@contextmanager
def meeting() -> Iterator[None]:
    """Around passes of models that are spread over ranks: raises RankError where a collective in them fails."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, dist.DistError) or any(words in str(error) for words in _OF_GROUPS):
            raise RankError(
                f"a rank did not take part in a step ({error})", "see the logs of the other ranks"
            ) from error
        raise


@contextmanager
def _told(what: str) -> Iterator[None]:
    """torch.distributed raises RuntimeErrors: for a process that is gone, and for a deadline."""
    try:
        yield
    except RuntimeError as error:
        raise RankError(f"{what} ({error})", "see the logs of the other ranks") from error

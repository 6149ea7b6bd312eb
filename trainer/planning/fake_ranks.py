"""A process group of one process: it answers as rank 0 of many would see it, without any of the others.

torch's backend `fake` does nothing in a collective, and returns at once. Tensors without numbers do not mind.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from services.policies.training.layout import DIMENSIONS, Layout
from services.wire.errors import UsageError
from trainer.parallel.ranks import Ranks, mesh_of_experts
from trainer.parallel.sharding import mesh_of_same_experts, mesh_of_shares


@dataclass(frozen=True)
class FakeRanks(Ranks):
    """What others tell is what this one tells. `exchange`: what it would share with them on one machine without GPUs; None
    where it would not."""

    exchange: list[Tensor] | None = None

    def gather(self, part: bytes) -> list[bytes]:
        return [part] * self.layout.ranks

    def shared(self, group: dist.ProcessGroup, size: int) -> Tensor | None:  # noqa: ARG002 (as the real ones)
        if self.exchange is None:
            return None
        self.exchange.append(torch.empty(size, dtype=torch.uint8))
        return self.exchange[-1]


@contextmanager
def fake_ranks(layout: Layout, *, gpu: bool) -> Iterator[FakeRanks | None]:
    """Rank 0 of `layout`, None where it is one rank; as on GPUs, or as on CPUs of one machine.

    Raises UsageError where this process has a group already.
    """
    if layout.ranks == 1:
        yield None
        return
    if dist.is_initialized():
        raise UsageError("a plan of several ranks needs a process without a process group", "start it by itself")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.ranks)
    try:
        mesh = init_device_mesh("cpu", layout.shape, mesh_dim_names=DIMENSIONS)
        # Made now, when a mesh can still be asked where its ranks stand.
        mesh_of_shares(mesh, layout)
        experts = mesh_of_experts(mesh, layout)
        if experts is not None:
            mesh_of_same_experts(experts, layout)
        yield FakeRanks(0, layout, torch.device("cpu"), mesh, experts, exchange=None if gpu else [])
    finally:
        dist.destroy_process_group()

"""A vocabulary whose logits are on several ranks: rows of the head's weight on each, in order.

Each call is a collective: all ranks of the shard's group make it, with rows of the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's rows of a head's weight: `start … start + size − 1`. `most`: that any rank has, which may be more."""

    group: dist.ProcessGroup
    start: int
    size: int
    most: int

    def largest(self, logits: Tensor) -> Tensor:
        """`[r]`, over the whole vocabulary; `logits`: `[r, size]`."""
        found = logits.amax(-1) if self.size else logits.new_full((len(logits),), -torch.inf)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        return found

    def summed(self, part: Tensor) -> Tensor:
        """The sum of all ranks' `part`, in its place."""
        dist.all_reduce(part, group=self.group)
        return part

    def likeliest(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` largest of the whole vocabulary and their ids, `[r, count]` each, the largest first.

        `logits`: `[r, size]`; `count`: at most the vocabulary.
        """
        values, ids = logits.topk(min(count, self.size), dim=-1)
        missing = count - values.shape[-1]
        values, ids = functional.pad(values, (0, missing), value=-torch.inf), functional.pad(ids, (0, missing))
        ranks = dist.get_world_size(self.group)
        every_value, every_id = ([torch.empty_like(each) for _ in range(ranks)] for each in (values, ids))
        dist.all_gather(every_value, values, group=self.group)
        dist.all_gather(every_id, ids + self.start, group=self.group)
        largest, which = torch.cat(every_value, dim=-1).topk(count, dim=-1)
        return largest, torch.cat(every_id, dim=-1).gather(-1, which)

    def own(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Where `ids` stand in this rank's rows, 0 for others; and whether they do, bool."""
        places = ids - self.start
        inside = (places >= 0) & (places < self.size)
        return torch.where(inside, places, 0), inside


def local_rows(weight: Tensor) -> tuple[Tensor, VocabularyShard | None]:
    """This rank's rows of `weight`, `[V, …]`, with its gradient; None where they are all of them.

    Raises ValueError where it is on a mesh of several dimensions, or cut otherwise than by rows.
    """
    if not isinstance(weight, DTensor):
        return weight, None
    mesh, placements = weight.device_mesh, weight.placements
    if mesh.ndim != 1 or placements[0] not in (Replicate(), Shard(0)):
        raise ValueError(f"a head is on one mesh dimension, whole or by rows, not {placements} on {mesh}")
    local: Tensor = weight.to_local()
    if placements[0] == Replicate() or mesh.size() == 1:
        return local, None
    # As torch cuts: chunks of one size, of which the last may be short, or missing.
    most = -(-weight.shape[0] // mesh.size())
    start = min(most * mesh.get_local_rank(), weight.shape[0])
    return local, VocabularyShard(mesh.get_group(), start, len(local), most)

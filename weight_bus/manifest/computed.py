"""Weights that are published otherwise than as they lie: computed for it, or in parts on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

from services.wire.errors import UsageError
from weight_bus.manifest.local_part import LocalPart


@dataclass(frozen=True)
class ComputedTensor:
    """A weight that exists only while it is published: computed when its turn to be copied comes, and given up after it.

    `compute` gives a tensor of `shape`, of any device and floating dtype; it is called once for each publish. `placed_as`:
    a tensor on the same ranks with the same placements, where it is spread over ranks; then every rank computes it.
    """

    shape: torch.Size
    compute: Callable[[], torch.Tensor]
    placed_as: DTensor | None = None


PublishedTensor = torch.Tensor | ComputedTensor | LocalPart


def computed(tensor: PublishedTensor) -> torch.Tensor:
    """The tensor itself, computed now where it does not exist yet. Raises UsageError for a part of one."""
    if isinstance(tensor, LocalPart):
        raise UsageError(f"of a weight of {list(tensor.shape)} only a part is on this rank", "gather it first")
    return tensor.compute() if isinstance(tensor, ComputedTensor) else tensor

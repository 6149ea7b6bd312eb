"""A weight that exists only while it is published: computed when its turn to be copied comes, and given up after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ComputedTensor:
    """`compute` gives a tensor of `shape`, of any device and floating dtype; it is called once for each publish."""

    shape: torch.Size
    compute: Callable[[], torch.Tensor]


PublishedTensor = torch.Tensor | ComputedTensor


def computed(tensor: PublishedTensor) -> torch.Tensor:
    """The tensor itself, computed now where it does not exist yet."""
    return tensor.compute() if isinstance(tensor, ComputedTensor) else tensor

"""Copies of many tensors in one block of host memory, which the next copies are written over.

One block, and not one a tensor: the allocator then hands out no holes between what training needs, and rounds up once.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate

import torch
from torch import Tensor

_ALIGNED = 64
"""Bytes: of a cache line, and no element is larger."""


def copied(live: Mapping[str, Tensor], over: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous copies of `live` on the host, each with its own shape and dtype.

    `over`: earlier copies, which nobody reads any more. Their memory is used again where they were of tensors like these;
    else it is let go of before new memory is taken, and `over` is empty.
    """
    if _likes(over) != _likes(live):
        over.clear()
        over = _room(live)
    return {name: over[name].copy_(tensor.detach()) for name, tensor in live.items()}


def _likes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def _room(like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    sizes = [tensor.numel() * tensor.element_size() for tensor in like.values()]
    starts = list(accumulate((-(-size // _ALIGNED) * _ALIGNED for size in sizes), initial=0))
    block = torch.empty(starts[-1], dtype=torch.uint8)
    return {
        name: block[start : start + size].view(tensor.dtype).view(tensor.shape)
        for (name, tensor), start, size in zip(like.items(), starts, sizes, strict=False)
    }

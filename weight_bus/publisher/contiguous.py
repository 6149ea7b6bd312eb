"""Move a model's weights into contiguous memory in the arena's layout: publishing them is then one copy.

    before   ┌─a─┐    ┌──b──┐  ┌c┐        wherever the allocator put them
    after    │ a │  b  │c│                one mapping, on huge pages where the system has them; `weight_bus.manifest.layout`

Publishing 214 MB then takes 1.1 to 1.2 times one memcpy; 112 separate tensors take 1.3 to 1.4 (docs/benchmarks.md). A
training step takes the same time either way.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch.distributed.tensor import DTensor

from weight_bus.manifest.layout import ITEM_BYTES, plan_mixed_layout
from weight_bus.manifest.tensors import dtype_name, flat_bytes, tensor_at
from weight_bus.memory.arena import private_arena


def lay_contiguous(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Move the tensors' data into contiguous memory, in the order given (the publisher's); whether they were moved.

    The tensors stay the same objects: optimizers and modules need no change. Those that are one memory under two names
    (tied weights) stay so. Nothing is moved unless all are contiguous host memory of dtypes that can be served.
    Raises TransportError when there is no memory for it.
    """
    if not tensors or not all(_can_move(tensor) for tensor in tensors.values()):
        return False
    names: dict[tuple[int, int, str], list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault((tensor.data_ptr(), tensor.nbytes, dtype_name(tensor.dtype)), []).append(name)
    if any(begin + nbytes > after for (begin, nbytes, _), (after, _, _) in pairwise(sorted(names))):
        # One is a part of another, or the same bytes in another dtype.
        return False
    firsts = {same[0]: tensors[same[0]] for same in names.values()}
    layout = plan_mixed_layout({name: (tuple(one.shape), dtype_name(one.dtype)) for name, one in firsts.items()})
    flat = flat_bytes(private_arena(layout.total_bytes).view)
    for entry, same in zip(layout.tensors, names.values(), strict=True):
        place = tensor_at(flat, entry)
        with torch.no_grad():
            place.copy_(tensors[entry.name])
        for name in same:
            # One after the other: a tensor's old memory is freed before the next is copied.
            tensors[name].data = place.view(tensors[name].shape)
    return True


def _can_move(tensor: torch.Tensor) -> bool:
    return (
        not isinstance(tensor, DTensor)
        and tensor.device.type == "cpu"
        and tensor.is_contiguous()
        and tensor.nbytes > 0
        and dtype_name(tensor.dtype) in ITEM_BYTES
    )

"""Whether a manifest's layout is that of an engine's tensors, and the digest of what they hold."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weight_bus.background import BESIDE_DECODING, Pace
from weight_bus.errors import StageError
from weight_bus.layout import plan_mixed_layout, root_digest
from weight_bus.manifest import Layout
from weight_bus.scatter import BucketPlan, Memory, bucket_hash
from weight_bus.slices import Slice
from weight_bus.views import dtype_name


def digest_of(plan: BucketPlan, tensors: Mapping[str, torch.Tensor]) -> str:
    """Root digest of what lies in `tensors`, in the buckets of `plan`."""
    memory = Memory(plan.layout, tensors)
    pace = pace_beside(memory)
    hashes = []
    for (_, _, length), pieces in zip(plan.ranges, plan.pieces, strict=True):
        hashes.append(bucket_hash(pieces, length, memory))
        pace.rest()
    return root_digest(hashes)


def pace_beside(memory: Memory) -> Pace:
    """How fast to work beside decoding from such memory: a GPU has its own."""
    return Pace(BESIDE_DECODING if memory.on_host else 1.0)


def check_fits(layout: Layout, tensors: Mapping[str, torch.Tensor], slices: Mapping[str, Slice]) -> None:
    """Raise StageError, naming what differs, unless the layout is that of these tensors by names, shapes and dtypes.

    Of those that `slices` names only that part is here.
    """
    offered = {entry.name: entry for entry in layout.tensors}
    missing, unknown = sorted(tensors.keys() - offered.keys()), sorted(offered.keys() - tensors.keys())
    if missing or unknown:
        raise StageError(
            f"the manifest lacks {_some(missing)} and names {_some(unknown)} that this engine does not know",
            "publish the model that the engine serves",
        )
    for name, entry in offered.items():
        shape = slices[name].shape if name in slices else tuple(tensors[name].shape)
        dtype = dtype_name(tensors[name].dtype)
        if (shape, dtype) != (entry.shape, entry.dtype):
            raise StageError(f"{name} is {dtype}{list(shape)} here, {entry.dtype}{list(entry.shape)} in the manifest")
    planned = plan_mixed_layout({entry.name: (entry.shape, entry.dtype) for entry in layout.tensors})
    if planned != layout:
        raise StageError("the manifest's offsets are not those its names, shapes and dtypes give")


def _some(names: list[str]) -> str:
    return "nothing" if not names else ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

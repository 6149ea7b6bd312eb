"""Which part of each weight a rank of a tensor parallel vLLM holds.

| vLLM's layer              | weight            | along | a rank's                                              |
|---------------------------|-------------------|-------|-------------------------------------------------------|
| column parallel           | `[out, in]`       | 0     | `out / ranks` rows; of the bias, too                  |
| merged (gate and up, qkv) | parts of rows     | 0     | as many rows of each part; heads of keys and values   |
|                           |                   |       | that are fewer than ranks are held by several ranks   |
| row parallel              | `[out, in]`       | 1     | `in / ranks` columns; all of the bias                 |
| embedding, output head    | `[vocabulary, …]` | 0     | `padded vocabulary / ranks` rows; padding is no one's |
| replicated                |                   |       | all of it                                             |

As vLLM's own weight loaders cut them. Seen by the layers' attributes; vLLM is not imported.
"""

from __future__ import annotations

import torch
from torch import nn

from weight_bus.errors import StageError
from weight_bus.slices import Slice


def rows_of_vocabulary(module: nn.Module, tensor: torch.Tensor) -> tuple[torch.Tensor, Slice | None]:
    """What of an embedding's rows is vocabulary, and which; the rest is padding."""
    whole = int(module.org_vocab_size)  # type: ignore[arg-type]
    if _ranks(module) == 1:
        return tensor[:whole], None
    indices = module.shard_indices
    start, end = int(indices.org_vocab_start_index), int(indices.org_vocab_end_index)  # type: ignore[union-attr,arg-type]
    return tensor[: end - start], Slice((whole, *tensor.shape[1:]), 0, start)


def part_rows(module: nn.Module) -> list[int] | None:
    """How many rows of each of its parts a fused layer has here; None for a layer that has no parts."""
    sizes: list[int] | None = getattr(module, "output_sizes", None)
    return None if sizes is None else [size // _ranks(module) for size in sizes]


def slice_of_part(module: nn.Module, number: int, rows: torch.Tensor) -> Slice | None:
    """Where part `number` of a fused layer, of which `rows` are here, lies in the whole part."""
    ranks, held = _ranks(module), rows.shape[0]
    if ranks == 1:
        return None
    # Queries are never repeated; heads of keys and values are, where there are fewer than ranks.
    repeated = int(getattr(module, "num_kv_head_replicas", 1)) if number else 1
    start = int(module.tp_rank) // repeated * held  # type: ignore[arg-type]
    return Slice((held * ranks // repeated, *rows.shape[1:]), 0, start)


def slice_of(name: str, module: nn.Module, tensor: torch.Tensor) -> Slice | None:
    """Where a weight or bias that is not fused lies in the whole; None where it is the whole.

    Raises StageError, naming it, for a layer that is split in another way.
    """
    ranks = _ranks(module)
    if ranks == 1:
        return None
    whole_out, whole_in = getattr(module, "output_size", None), getattr(module, "input_size", None)
    if isinstance(whole_out, int) and isinstance(whole_in, int) and tensor.ndim in (1, 2):
        whole = (whole_out, whole_in)[: tensor.ndim]
        split = [dim for dim, size in enumerate(whole) if tensor.shape[dim] != size]
        if not split:
            return None
        found = Slice(whole, split[0], int(module.tp_rank) * tensor.shape[split[0]])  # type: ignore[arg-type]
        if tensor.shape[split[0]] * ranks == whole[split[0]] and found.fits(tuple(tensor.shape)):
            return found
    raise StageError(
        f"{name} of shape {tuple(tensor.shape)} is split over {ranks} ranks in a way that is not known here",
        "this layer needs a rule in weight_bus/vllm_slices.py, or serve the model with one GPU an engine",
    )


def _ranks(module: nn.Module) -> int:
    return int(getattr(module, "tp_size", 1))

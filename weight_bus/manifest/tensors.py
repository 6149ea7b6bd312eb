"""Zero-copy views: tensors over bytes, and the bytes of tensors."""

from __future__ import annotations

import torch

from services.wire.errors import UsageError
from weight_bus.manifest.layout import ITEM_BYTES
from weight_bus.manifest.manifest import TensorEntry


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """`torch.float32` for `float32`. Raises UsageError for a name no weight may have."""
    dtype = getattr(torch, name, None) if name in ITEM_BYTES else None
    if not isinstance(dtype, torch.dtype):
        raise UsageError(f"weights of dtype {name!r} cannot be served", f"known: {', '.join(ITEM_BYTES)}")
    return dtype


def flat_bytes(buffer: memoryview) -> torch.Tensor:
    """A uint8 tensor `[n]` over `n` writable bytes. It keeps them alive."""
    return torch.frombuffer(buffer, dtype=torch.uint8)


def tensor_at(flat: torch.Tensor, entry: TensorEntry) -> torch.Tensor:
    """The tensor that `entry` names, as a view into the arena `flat` (uint8 `[total_bytes]`)."""
    return flat[entry.offset : entry.offset + entry.nbytes].view(dtype_of(entry.dtype)).view(entry.shape)


def host_bytes(tensor: torch.Tensor) -> memoryview | None:
    """A contiguous tensor's own memory; None where it is not contiguous, or not in host memory."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    return bytes_under(tensor).numpy().data


def bytes_under(tensor: torch.Tensor) -> torch.Tensor:
    """A uint8 tensor `[nbytes]` over a contiguous tensor's own memory."""
    return tensor.detach().view(-1).view(torch.uint8)

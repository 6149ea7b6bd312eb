"""Precision of the trainer: which dtype passes are computed in. Weights, gradients and sums stay float32.

masters float32 ──cast where a product needs it (autocast)──► products in bfloat16 ──► residuals, norms, losses float32
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

from services.wire.errors import UsageError

Precision = Literal["auto", "float32", "bfloat16"]


def compute_dtype(wanted: Precision, device: torch.device) -> torch.dtype:
    """bfloat16 on a GPU that has it, float32 elsewhere, unless something else is wanted.

    Raises UsageError for bfloat16 on a GPU without it.
    """
    has = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    if wanted == "bfloat16" and device.type == "cuda" and not has:
        raise UsageError("this GPU does not compute in bfloat16", "set trainer.dtype=float32")
    if wanted == "auto":
        return torch.bfloat16 if has else torch.float32
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


def computing(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[object]:
    """Passes within are computed in `dtype`.

    Copies of weights are not cached: a pass uses each once, and those of layers that are computed once more would be held
    until it has ended, 2 bytes for each weight of the model.
    """
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype, cache_enabled=False)


def use_tf32(wanted: bool, device: torch.device) -> None:
    """Whether float32 products of this process may be made with 10 bits of mantissa.

    Raises UsageError where it is wanted and there is no GPU.
    """
    if wanted and device.type != "cuda":
        raise UsageError("trainer.tf32 without a GPU has no effect", "leave it out")
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high" if wanted else "highest")

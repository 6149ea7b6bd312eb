"""RMS norms on a CPU by vLLM's own compiled kernels, registered by its own means.

vLLM ships these kernels for CPUs too but, run eagerly, takes six tensor operations a norm instead: five times the time,
and a twelfth of a step of a small model. Where a kernel cannot take what it is given, vLLM goes on to its native one. It
insists on the whole signature of its native norm, names too, whether all is used or not.
"""
# ruff: noqa: ARG001

from __future__ import annotations

import torch

PROVIDER = "rollmesh"


def norm_priority() -> dict[str, list[str]]:
    """vLLM's `ir_op_priority` with ours first; empty where this build of vLLM lacks the kernels. Idempotent."""
    from vllm import ir
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not (hasattr(torch.ops._C, "rms_norm") and hasattr(torch.ops._C, "fused_add_rms_norm")):
        return {}
    rms_norm, add_rms_norm = ir.ops.rms_norm, ir.ops.fused_add_rms_norm
    if PROVIDER not in rms_norm.impls:
        rms_norm.register_impl(PROVIDER, supports_args=_takes_norm)(_rms_norm)
        add_rms_norm.register_impl(PROVIDER, supports_args=_takes_sum, inplace=True)(_fused_add_rms_norm)
    return {"rms_norm": [PROVIDER], "fused_add_rms_norm": [PROVIDER]}


def _takes_norm(x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None) -> bool:
    return variance_size is None and weight is not None and weight.dtype == x.dtype


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, epsilon: float, variance_size: int | None = None
) -> torch.Tensor:
    # The kernel takes rows that lie one after another; the queries of a joint projection do not.
    rows = x.contiguous()
    normed = torch.empty_like(rows)
    torch.ops._C.rms_norm(normed, rows, weight, epsilon)
    return normed


def _takes_sum(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    lies_well = x.is_contiguous() and x_residual.is_contiguous() and x_residual.dtype == x.dtype
    return lies_well and _takes_norm(x, weight, epsilon, variance_size)


def _fused_add_rms_norm(
    x: torch.Tensor,
    x_residual: torch.Tensor,
    weight: torch.Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual

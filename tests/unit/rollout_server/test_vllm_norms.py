"""Our provider of RMS norms computes what vLLM's own native one does, and leaves to it what the kernels cannot take."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

import torch

from rollout_server.engines.vllm.launch import PROVIDER, norm_priority, on_cpu

pytestmark = pytest.mark.vllm
EPSILON = 1e-6


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    if not on_cpu() or not norm_priority():
        pytest.skip("this vLLM has no such kernels, or runs on a GPU")


def close(ours: torch.Tensor, native: torch.Tensor) -> None:
    torch.testing.assert_close(ours, native, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("rows", [1, 3, 64])
def test_norms_equal_the_native_ones_also_on_slices_of_a_joint_projection(rows: int) -> None:
    from vllm import ir

    generator = torch.Generator().manual_seed(rows)
    joint = torch.randn(rows, 3 * 256, generator=generator)
    keys, weight = joint[:, 256:512].view(rows, 8, 32), torch.randn(32, generator=generator)
    assert rows == 1 or not keys.is_contiguous()
    before, norms = keys.clone(), ir.ops.rms_norm.impls
    close(norms[PROVIDER].impl_fn(keys, weight, EPSILON), norms["native"].impl_fn(keys, weight, EPSILON))
    assert torch.equal(keys, before)

    x, residual = torch.randn(rows, 256, generator=generator), torch.randn(rows, 256, generator=generator)
    weight, sums = torch.randn(256, generator=generator), ir.ops.fused_add_rms_norm.impls
    native = sums["native"].impl_fn(x.clone(), residual.clone(), weight, EPSILON)
    for ours, theirs in zip(sums[PROVIDER].impl_fn(x, residual, weight, EPSILON), native, strict=True):
        close(ours, theirs)


def test_what_the_kernels_cannot_take_goes_to_the_native_norm() -> None:
    from vllm import ir

    x, weight = torch.randn(4, 32), torch.randn(32)
    with ir.ops.rms_norm.set_priority([PROVIDER, "native"]), ir.ops.fused_add_rms_norm.set_priority([PROVIDER]):
        assert ir.ops.rms_norm.dispatch(x, weight, EPSILON, None).provider == PROVIDER
        for arguments in ((x, None, EPSILON, None), (x, weight, EPSILON, 16), (x.bfloat16(), weight, EPSILON, None)):
            assert ir.ops.rms_norm.dispatch(*arguments).provider == "native"
        slices = torch.randn(4, 64)[:, :32]
        assert ir.ops.fused_add_rms_norm.dispatch(x, x, weight, EPSILON, None).provider == PROVIDER
        assert ir.ops.fused_add_rms_norm.dispatch(slices, x, weight, EPSILON, None).provider == "native"


def test_registering_again_changes_nothing() -> None:
    from vllm import ir

    first = ir.ops.rms_norm.impls[PROVIDER]
    assert norm_priority() == norm_priority()
    assert ir.ops.rms_norm.impls[PROVIDER] is first

"""Packed rows on a GPU: one kernel over all rows in 16-bit floats, row by row in float32, and the same either way."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from trainer.data.packing import lay_end_to_end
from trainer.model.forward import PackedForward
from trainer.sft.tiny_model import build_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
def test_packed_rows_give_what_each_gives_alone(dtype: torch.dtype, tolerance: float) -> None:
    model = build_model(seed=3).to("cuda", dtype)
    reference = copy.deepcopy(model)
    numbers = np.random.default_rng(7)
    rows = [numbers.integers(1, 60, length).astype(np.int32) for length in (1, 7, 7, 7, 33, 190)]
    row = lay_end_to_end(rows, model.device)
    packed = PackedForward(model)
    assert packed.separation == "within"
    places = torch.arange(row.input_ids.shape[1], device="cuda")
    found = packed.logits(row, places).float()
    wanted = torch.cat(
        [reference(input_ids=torch.from_numpy(ids).long()[None].cuda()).logits[0] for ids in rows]
    ).float()
    largest = wanted.abs().max().item()
    torch.testing.assert_close(found, wanted, rtol=0, atol=tolerance * largest)
    found.square().mean().backward()
    wanted.square().mean().backward()
    for weight, of_reference in zip(model.parameters(), reference.parameters(), strict=True):
        assert weight.grad is not None and of_reference.grad is not None
        scale = max(1e-6, of_reference.grad.abs().max().item())
        torch.testing.assert_close(weight.grad, of_reference.grad, rtol=0, atol=3 * tolerance * scale)

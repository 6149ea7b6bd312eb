"""vLLM's fused experts by the folder's names, without vLLM: modules that are shaped as its modules are."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from weight_bus.errors import StageError
from weight_bus.vllm.experts import is_experts
from weight_bus.vllm.weights import VllmWeights

EXPERTS, ROWS, HIDDEN = 4, 6, 8


class Placed:
    """Which experts are here: numbers from the whole model's to the rank's."""

    def __init__(self, here: list[int]) -> None:
        self._here = here

    def map_global_to_local(self, expert: int) -> int:
        return self._here.index(expert) if expert in self._here else -1


class Experts(nn.Module):
    """Of one rank; `ranks` split each expert, `here` are those of an expert parallel rank."""

    def __init__(self, rank: int = 0, ranks: int = 1, here: list[int] | None = None) -> None:
        super().__init__()
        here = list(range(EXPERTS)) if here is None else here
        rows = ROWS // ranks
        self.w13_weight = nn.Parameter(torch.randn(len(here), 2 * rows, HIDDEN))
        self.w2_weight = nn.Parameter(torch.randn(len(here), HIDDEN, rows))
        self.global_num_experts, self.local_num_experts = EXPERTS, len(here)
        self.expert_map_manager = Placed(here)
        self.ckpt_gate_proj_name, self.ckpt_up_proj_name, self.ckpt_down_proj_name = "gate_proj", "up_proj", "down_proj"
        self.moe_config = SimpleNamespace(
            intermediate_size_per_partition=rows,
            intermediate_size_per_partition_unpadded=rows,
            hidden_dim=HIDDEN,
            tp_size=ranks,
            tp_rank=rank,
        )
        self.quant_method: Any = SimpleNamespace(unquantized_backend=SimpleNamespace(name="TRITON"))


class Model(nn.Module):
    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.mlp = nn.Module()
        self.mlp.experts = nn.Module()
        self.mlp.experts.routed_experts = experts


def shape_of(part: str) -> tuple[int, int]:
    return (HIDDEN, ROWS) if part == "down_proj" else (ROWS, HIDDEN)


NAMES = {
    f"mlp.experts.{expert}.{part}.weight": shape_of(part)
    for expert in range(EXPERTS)
    for part in ("gate_proj", "up_proj", "down_proj")
}


def test_experts_are_named_as_in_the_folder_and_are_views_of_what_is_served() -> None:
    experts = Experts()
    assert is_experts(experts)
    assert not is_experts(nn.Linear(2, 2))
    weights = VllmWeights(Model(experts))
    live = weights.live()
    assert {name: tuple(tensor.shape) for name, tensor in live.items()} == NAMES
    assert weights.slices == {}
    assert torch.equal(live["mlp.experts.2.gate_proj.weight"], experts.w13_weight[2, :ROWS])
    assert torch.equal(live["mlp.experts.2.up_proj.weight"], experts.w13_weight[2, ROWS:])
    weights.shadow()["mlp.experts.3.down_proj.weight"].fill_(7.0)
    assert not bool((experts.w2_weight[3] == 7.0).any())
    weights.flip()
    assert bool((experts.w2_weight[3] == 7.0).all())
    assert not bool((experts.w2_weight[:3] == 7.0).any())


@pytest.mark.parametrize("parallel", ["tensor", "expert"])
def test_the_slices_of_all_ranks_together_are_every_expert_once(parallel: str) -> None:
    covered = {name: torch.zeros(shape, dtype=torch.int64) for name, shape in NAMES.items()}
    for rank in range(2):
        # Numbers need not be consecutive.
        experts = Experts(rank, 2) if parallel == "tensor" else Experts(here=[rank, rank + 2])
        weights = VllmWeights(Model(experts))
        assert weights.live().keys() == NAMES.keys()
        for name, held in weights.live().items():
            # Of a slice, also one that is all of it, other ranks may have nothing.
            part = weights.slices[name]
            assert part.shape == NAMES[name]
            assert part.fits(tuple(held.shape))
            covered[name].narrow(part.dim, part.start, held.shape[part.dim]).add_(1)
        if parallel == "expert":
            assert torch.equal(weights.live()[f"mlp.experts.{rank + 2}.down_proj.weight"], experts.w2_weight[1])
    assert all(bool((times == 1).all()) for times in covered.values())


def refused(experts: Experts, why: str) -> None:
    with pytest.raises(StageError, match=rf"mlp\.experts\.routed_experts\.w\w+ {why}"):
        VllmWeights(Model(experts))


def test_experts_that_cannot_be_replaced_are_named() -> None:
    quantised, shuffled, packed, padded, biased = (Experts() for _ in range(5))
    quantised.quant_method = SimpleNamespace()
    refused(quantised, "is quantised")
    shuffled.quant_method.unquantized_backend.name = "FLASHINFER_TRTLLM"
    refused(shuffled, "is held in the layout of vLLM's kernel FLASHINFER_TRTLLM")
    packed.quant_method.unquantized_backend.name = "CPU"
    with pytest.raises(StageError, match=r"vLLM packed mlp\.experts\.routed_experts\.w13_weight away"):
        VllmWeights(Model(packed))
    padded.moe_config.intermediate_size_per_partition_unpadded = ROWS - 1
    refused(padded, "of shape")
    biased.w2_bias = nn.Parameter(torch.zeros(EXPERTS, HIDDEN))
    refused(biased, "of shape")

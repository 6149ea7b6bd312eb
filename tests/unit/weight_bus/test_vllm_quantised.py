"""Layers that vLLM quantises, without vLLM: modules and methods that are shaped as its own are."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.unit.weight_bus.test_vllm_weights import WAYS
from weight_bus.errors import StageError
from weight_bus.receiver.buckets import own_digest
from weight_bus.vllm.quantised import PLAIN, Plain, quantised_layers, quantising_bytes
from weight_bus.vllm.sets import ShadowMode
from weight_bus.vllm.weights import VllmWeights

HIDDEN, ROWS, EXPERTS = 8, 16, 3
ways = pytest.mark.parametrize(("shadow", "in_place"), WAYS)


def int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = weight.abs().amax(-1, keepdim=True).float() / 127
    return (weight.float() / scale).round().to(torch.int8), scale


class Kernel:
    def process_weights_after_loading(self, layer: Any) -> None:
        layer.weight = nn.Parameter(layer.weight.data.t(), requires_grad=False)


class Linear(nn.Module):
    """As vLLM leaves a layer of an online method: turned weights and a scale for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.output_sizes = [ROWS // 2, ROWS // 2]
        self.quant_method: Any = LinearMethod()
        self.weight = nn.Parameter(torch.randn(ROWS, HIDDEN, dtype=torch.bfloat16), requires_grad=False)
        self.bias = nn.Parameter(torch.randn(ROWS, dtype=torch.bfloat16), requires_grad=False)
        load(self)


class LinearMethod:
    def __init__(self) -> None:
        self.kernel = Kernel()

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "_already_called_process_weights_after_loading", False):
            return
        weight, scale = int8(layer.weight)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.weight_scale = nn.Parameter(scale, requires_grad=False)
        self.kernel.process_weights_after_loading(layer)
        layer._already_called_process_weights_after_loading = True


@dataclass
class Desc:
    scale: torch.Tensor


@dataclass
class QuantConfig:
    w1: Desc
    w2: Desc


class ExpertsMethod:
    """`folds`: its configuration holds a product of scales, as of kernels that fold them into one."""

    def __init__(self, *, folds: bool = False) -> None:
        self.moe_quant_config: QuantConfig | None = None
        self.folds = folds

    def process_weights_after_loading(self, layer: Any) -> None:
        for leaf in ("w13", "w2"):
            weight, scale = int8(getattr(layer, f"{leaf}_weight"))
            setattr(layer, f"{leaf}_weight", nn.Parameter(weight, requires_grad=False))
            setattr(layer, f"{leaf}_weight_scale", nn.Parameter(scale, requires_grad=False))
        first, second = layer.w13_weight_scale, layer.w2_weight_scale
        self.moe_quant_config = QuantConfig(Desc(first * 2 if self.folds else first), Desc(second))


class Experts(nn.Module):
    def __init__(self, method: ExpertsMethod | None = None) -> None:
        super().__init__()
        self.quant_method: Any = method or ExpertsMethod()
        self.expert_map_manager = SimpleNamespace(map_global_to_local=lambda expert: expert)
        self.moe_config = SimpleNamespace(
            intermediate_size_per_partition=ROWS,
            intermediate_size_per_partition_unpadded=ROWS,
            hidden_dim=HIDDEN,
            tp_size=1,
            tp_rank=0,
        )
        self.local_num_experts = self.global_num_experts = EXPERTS
        self.ckpt_gate_proj_name, self.ckpt_up_proj_name, self.ckpt_down_proj_name = "gate", "up", "down"
        for name, shape in (("w13_weight", (EXPERTS, 2 * ROWS, HIDDEN)), ("w2_weight", (EXPERTS, HIDDEN, ROWS))):
            setattr(self, name, nn.Parameter(torch.randn(shape, dtype=torch.bfloat16), requires_grad=False))
        load(self)


class Model(nn.Module):
    packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}  # noqa: RUF012 - as vLLM has it

    def __init__(self, experts: ExpertsMethod | None = None) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(HIDDEN, dtype=torch.bfloat16), requires_grad=False)
        self.gate_up_proj = Linear()
        self.mlp = nn.Module()
        self.mlp.experts = nn.Module()
        self.mlp.experts.routed_experts = Experts(experts)


def load(layer: Any) -> None:
    """Quantise it as vLLM does at the end of loading, with the plain weights kept."""
    plain = {name: one.detach().clone() for name, one in layer.named_parameters()}
    layer.quant_method.process_weights_after_loading(layer)
    layer.__dict__[PLAIN] = Plain(plain)


def served(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: one.detach().clone() for name, one in model.named_parameters()}


def write(weights: VllmWeights, seed: int) -> None:
    """Stage a version."""
    numbers = torch.Generator().manual_seed(seed)
    for tensor in weights.shadow().values():
        tensor.copy_(torch.randn(tensor.shape, generator=numbers))
    weights.sets.keep()


@ways
def test_a_version_is_staged_as_it_is_published_and_served_as_vllm_quantises_it(
    shadow: ShadowMode, in_place: bool
) -> None:
    torch.manual_seed(0)
    model = Model()
    experts = model.mlp.experts.routed_experts
    weights = VllmWeights(model, shadow, in_place=in_place)
    assert {str(tensor.dtype) for tensor in weights.live().values()} == {"torch.bfloat16"}
    assert weights.live()["up_proj.weight"].shape == (ROWS // 2, HIDDEN)
    assert weights.live()["mlp.experts.2.down.weight"].shape == (HIDDEN, ROWS)
    first, first_digest = served(model), own_digest(weights.live())

    write(weights, 1)
    assert all(torch.equal(tensor, first[name]) for name, tensor in served(model).items()), "decoding goes on"
    staged = own_digest(weights.shadow())
    weights.flip()
    assert own_digest(weights.live()) == staged
    expected, scale = int8(torch.cat([weights.live()["gate_proj.weight"], weights.live()["up_proj.weight"]]))
    assert torch.equal(model.gate_up_proj.weight, expected.t())
    assert torch.equal(model.gate_up_proj.weight_scale, scale)
    assert torch.equal(model.gate_up_proj.bias[: ROWS // 2], weights.live()["gate_proj.bias"])
    expected, scale = int8(weights.live()["mlp.experts.1.down.weight"])
    assert torch.equal(experts.w2_weight[1], expected)
    # The kernel of experts finds its scales where it has always found them.
    assert torch.equal(experts.quant_method.moe_quant_config.w2.scale[1], scale)
    weights.check_served()

    weights.flip_back()
    assert own_digest(weights.live()) == first_digest
    assert all(torch.equal(tensor, first[name]) for name, tensor in served(model).items())
    weights.check_served()
    write(weights, 2)
    weights.flip()
    assert not torch.equal(model.gate_up_proj.weight, first["gate_up_proj.weight"])
    weights.check_served()
    model.gate_up_proj.weight[0, 0] += 1
    with pytest.raises(StageError, match="not those that were made of the version"):
        weights.check_served()


def test_plain_weights_are_counted_as_the_hosts() -> None:
    model = Model()
    plain = sum(
        one.nbytes for layer in quantised_layers(model).values() for one in layer.__dict__[PLAIN].tensors.values()
    )
    total = sum(parameter.nbytes for parameter in model.parameters())
    held = VllmWeights(model, in_place=False).sets.held
    assert (held.beside, held.host) == (total, total + 2 * plain)
    experts = model.mlp.experts.routed_experts
    largest = 2 * sum(one.numel() for one in experts.__dict__[PLAIN].tensors.values())
    assert quantising_bytes(quantised_layers(model)) == largest + 2 * sum(one.nbytes for one in experts.parameters())
    assert quantising_bytes({}) == 0


def test_what_would_not_follow_a_version_is_refused_by_name() -> None:
    with pytest.raises(StageError, match=r"mlp\.experts\.routed_experts keeps w1\.scale beside its weights"):
        VllmWeights(Model(ExpertsMethod(folds=True)))
    aside = Model()
    aside.gate_up_proj.quant_method.kernel.packed = torch.ones(4)
    with pytest.raises(StageError, match=r"gate_up_proj keeps packed beside its weights \(Kernel\)"):
        VllmWeights(aside)
    other = Model()
    other.gate_up_proj.weight_scale.mul_(2)
    with pytest.raises(StageError, match=r"gate_up_proj\.weight_scale is quantised by LinearMethod"):
        VllmWeights(other)
    split = Model()
    split.gate_up_proj.tp_size = 2
    with pytest.raises(StageError, match="gate_up_proj is split over 2 ranks, and LinearMethod takes scales of all"):
        VllmWeights(split)

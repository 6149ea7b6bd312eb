"""Tensor parallelism: the weights of a model's layers on several ranks, by the plan that `transformers` has for its family.

    colwise   rows of W, a part of the outputs       q, k, v, gate, up        heads, features on their rank
    rowwise   columns of W, a part of the sum        o, down                  summed over the ranks
    head      rows of W, a part of the vocabulary                             `trainer.parallel.vocabulary`
    the rest  whole on each rank: norms, and the embedding, unless it is the head

What is cut becomes a DTensor on the mesh, `Shard(dim)` or, where one tensor holds two (gate and up of experts),
`_StridedShard(dim, split_factor)`; what is not stays a plain tensor. All ranks have the same tokens, compute the same
loss of them, and have the same gradients of what is whole: nothing is left to be summed over the mesh.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import apply_tensor_parallelism, replace_layer_number_by_wildcard

from services.wire.errors import UsageError
from trainer.parallel.gradients import on_the_way

_SUMMED = "replicated_with_grad_allreduce"
"""Weights of what sees only heads of its rank. `transformers` sums their gradient over the ranks after a pass, and with it
what earlier passes of the step left there: right for one pass a step only. So this is done here."""
_TRAINED_STYLES = frozenset(
    (
        "all_reduce",
        "colwise",
        "colwise_gather_output",
        "colwise_rep",
        "embedding_rowwise",
        "mla_kv_a_proj",
        "moe_identity_expert",
        "moe_tp_experts",
        "packed_colwise",
        "packed_rowwise",
        "rowwise",
        "rowwise_rep",
        "rowwise_split_input",
        _SUMMED,
    )
)
_UNTRAINED = ("llama4_text",)
"""Families whose plan fails in a pass with gradients (transformers 5.19): it writes into what a gradient goes through."""
_ADAPTER_SIDES = {"colwise": "lora_B", "rowwise": "lora_A"}
_HEADS = ("num_attention_heads", "num_key_value_heads")


def tensor_plan(model: PreTrainedModel, ranks: int, without: Iterable[str] = ()) -> dict[str, str]:
    """How each module and parameter of `model` is cut for `ranks`, by names with `*` for a layer's number.

    `model` may be on meta, and have adapters. `without`: what is cut otherwise (`trainer.parallel.expert`), with all below
    it. Raises UsageError for a family that has no plan, and where something does not divide.
    """
    kind, apart = model.config.get_text_config().model_type, tuple(without)
    plan = {
        name: style
        for name, style in model.tp_plan.items()
        if not any(name == one or name.startswith(f"{one}.") for one in apart)
    }
    if kind in _UNTRAINED or not any("*" in name for name in plan):
        raise UsageError(
            f"trainer.parallel.tensor={ranks}: there is no plan to cut layers of {kind} models that trains",
            "set trainer.parallel.tensor=1",
        )
    if others := sorted(set(plan.values()) - _TRAINED_STYLES):
        raise UsageError(
            f"trainer.parallel.tensor={ranks}: {kind} models are cut in ways that cannot be trained: {', '.join(others)}",
            "set trainer.parallel.tensor=1",
        )
    config = model.config.get_text_config()
    sizes = {"vocab_size": config.vocab_size}
    if any("attn" in name and style == "colwise" for name, style in plan.items()):
        sizes |= {name: getattr(config, name) for name in _HEADS if getattr(config, name, None)}
    for name, size in sizes.items():
        if size % ranks:
            raise UsageError(
                f"trainer.parallel.tensor={ranks}: {name} of this {kind} model is {size}, which does not divide",
                f"set trainer.parallel.tensor to a divisor of {size}",
            )
    return _with_adapters(model, plan, ranks)


def tensor_parallel(model: PreTrainedModel, mesh: DeviceMesh, without: Iterable[str] = ()) -> PreTrainedModel:
    """Cut `model` on `mesh`, of one dimension, and return it. Each rank holds the same whole weights before, or meta ones;
    whole ones are let go of.

    A head that is tied to the embedding stays so: both are one parameter, cut by rows. Raises UsageError as `tensor_plan`.
    """
    plan = tensor_plan(model, mesh.size(), without)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = {module: name for name, module in model.named_modules()}
    tied = head is not None and head.weight is embedding.weight
    if tied:
        if names[head] in plan:
            plan[names[embedding]] = "embedding_rowwise"
        else:
            plan.pop(names[embedding], None)
    summed = {name for name, style in plan.items() if style == _SUMMED}
    ways = {name: style for name, style in plan.items() if name not in summed}
    try:
        apply_tensor_parallelism(model, mesh, ways)
    except ValueError as error:
        raise UsageError(
            f"trainer.parallel.tensor={mesh.size()}: {error}", "set it to a number that divides this"
        ) from error
    group = mesh.get_group()
    for module, name in names.items():
        if replace_layer_number_by_wildcard(name) in summed:
            on_the_way(module, lambda weight: _Summed.apply(weight, group))  # type: ignore[no-untyped-call]
    if tied:
        # Not by `tie_weights`, which a loader calls: it need not know of this mesh.
        head._parameters["weight"] = embedding._parameters["weight"]
    _check_even(model, mesh)
    return model


def _with_adapters(model: PreTrainedModel, plan: dict[str, str], ranks: int) -> dict[str, str]:
    """`plan` for a model whose linear layers may have low-rank adapters, y = W·x + B·(A·x), by peft's names for them: of
    outputs that are cut B is cut alike, of inputs that are cut A."""
    adapted, plain = dict[str, list[str]](), set[str]()
    for name, module in model.named_modules():
        wanted = replace_layer_number_by_wildcard(name)
        if wanted not in plan:
            continue
        if hasattr(module, "lora_A"):
            adapted[wanted] = [*module.lora_A]
        else:
            plain.add(wanted)
    found = {name: style for name, style in plan.items() if name not in adapted}
    for name, adapters in adapted.items():
        style = plan[name]
        if style not in _ADAPTER_SIDES or name in plain:
            why = "in some layers only" if name in plain else f"which are cut {style}"
            raise UsageError(
                f"trainer.parallel.tensor={ranks}: adapters of {name}, {why}, cannot be cut",
                "name others in trainer.lora.targets, or set trainer.parallel.tensor=1",
            )
        found[f"{name}.base_layer"] = style
        found |= {f"{name}.{_ADAPTER_SIDES[style]}.{adapter}": style for adapter in adapters}
    return found


def _check_even(model: PreTrainedModel, mesh: DeviceMesh) -> None:
    for name, parameter in model.named_parameters():
        if not isinstance(parameter, DTensor) or parameter.device_mesh != mesh:
            continue
        (placement,) = parameter.placements
        if placement.is_replicate():
            continue
        size = parameter.shape[getattr(placement, "dim", 0)]
        if size % (mesh.size() * getattr(placement, "split_factor", 1)):
            raise UsageError(
                f"trainer.parallel.tensor={mesh.size()}: {name} has {size} to be cut, which does not divide",
                f"set trainer.parallel.tensor to a divisor of {size}",
            )


class _Summed(torch.autograd.Function):
    """The tensor itself; its gradient is the sum over the group."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Others may hold on to it.
        whole = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(whole, group=ctx.group)
        return whole, None

"""Adapters that are published alone, in vLLM: its own low-rank layers, of whose slot each version takes the place.

    qkv_proj    y = W·x + B_q·(A_q·x) | B_k·(A_k·x) | B_v·(A_v·x)        W: loaded once, never moved
                      slots  [slots, 1, most rank, in], [slots, 1, out, most rank] for each part
                             zeros beyond the adapter's rank, and in layers that are none of its targets

There is a slot for each run. Every request asks for its run's adapter, so that a version is the slot's bytes, read where
the layers read them. A flip copies the staged A and B over them, between two steps; other slots stay as they are. Of a
tensor parallel engine, a rank has the rows of B or the columns of A that belong to its slice of W, as vLLM cuts them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from weight_bus.errors import StageError
from weight_bus.manifest.adapter import AdapterPlan, a_name, adapted_modules, b_name
from weight_bus.receiver.slices import Slice
from weight_bus.vllm.sets import CopiedSets
from weight_bus.vllm.weights import slice_of_part


def the_adapter(slot: int = 1) -> Any:
    """vLLM's name for what every request of a run asks for, by which it tells cached prefixes apart, too.

    Its path is of no file: the slot is filled before anyone asks. Slots are counted from 1, as vLLM counts adapters.
    """
    from vllm.lora.request import LoRARequest

    return LoRARequest("policy" if slot == 1 else f"policy-{slot}", slot, "published")


def open_slot(runner: Any, rank: int, slot: int = 1) -> int:
    """Have a worker's model serve the adapter, of zeros at first; its place in the layers' tensors, from 0.

    Called once, before the first request that asks for it.
    """
    runner.lora_manager.add_dummy_lora(the_adapter(slot), rank)
    # Known by now: this gives it the place.
    runner.lora_manager.add_adapter(the_adapter(slot))
    place: int = runner.lora_manager._adapter_manager.lora_index_to_id.index(slot)
    return place


def slot_bytes(model: nn.Module) -> int:
    """Of all slots: as much again is staged in."""
    return sum(tensor.nbytes for tensor in _slots(model).values())


class VllmAdapters:
    """One run's adapters of a model as the receiver wants them (`weight_bus.receiver.receiver.WeightTarget`).

    `place`: of its slot in the layers' tensors. Raises StageError, naming it, for a layer whose slot is not as described
    above.
    """

    def __init__(self, model: nn.Module, plan: AdapterPlan, place: int = 0) -> None:
        self._model, self._plan = model, plan
        own = {name: tensor[place : place + 1] for name, tensor in _slots(model).items()}
        views = list(self._views(own))
        if not views:
            raise StageError(f"no layer of {type(model).__name__} is among trainer.lora.targets={plan.targets}")
        self.slices = {name: part for name, _, part in views if part is not None}
        self.sets = CopiedSets(own)
        self._live = {name: view for name, view, _ in self._views(self.sets.live)}
        self._shadow = {name: view for name, view, _ in self._views(self.sets.spare)}

    def live(self) -> Mapping[str, torch.Tensor]:
        return self._live

    def shadow(self) -> Mapping[str, torch.Tensor]:
        return self._shadow

    def flip(self) -> None:
        self.sets.flip()

    def flip_back(self) -> None:
        self.sets.flip_back()

    def _views(self, storage: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, Slice | None]]:
        """Name and view of every A and B in `storage`, one slot by its names here, and which slice of the whole it is."""
        layers = list(_layers(self._model))
        parts = {f"{module}.weight": (0, 0) for name, layer in layers for module in _modules(self._model, name, layer)}
        wanted = set(adapted_modules(parts, self._plan.targets))
        for name, layer in layers:
            for number, module in enumerate(_modules(self._model, name, layer)):
                if module in wanted:
                    first, second = storage[_slot(name, "a", number)], storage[_slot(name, "b", number)]
                    yield from self._part(module, layer, number, first, second)

    def _part(
        self, module: str, layer: Any, number: int, first: torch.Tensor, second: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor, Slice | None]]:
        rank = self._plan.rank
        if first.ndim != 4 or first.shape[0] != 1 or first.shape[2] < rank or second.shape[3] < rank:
            raise StageError(
                f"the slot of {module}'s adapter has shapes {list(first.shape)} and {list(second.shape)}, rank {rank} does "
                "not fit",
                "leave LoRA arguments out of [rollout.vllm], or name other trainer.lora.targets",
            )
        a, b = first[0, 0, :rank], second[0, 0, :, :rank]
        yield a_name(module), a, _slice(layer.base_layer, "input_size", a, 1)
        whole = slice_of_part(layer.base_layer, number, b) if len(layer.lora_a_stacked) > 1 else None
        yield b_name(module), b, whole or _slice(layer.base_layer, "output_size", b, 0)


def _slice(base: Any, size: str, tensor: torch.Tensor, dim: int) -> Slice | None:
    """Of the A or B of a layer that is not fused, which rank's part it is along `dim`; None: the whole."""
    whole, own = int(getattr(base, size)), tensor.shape[dim]
    fused = getattr(base, "output_sizes", None) is not None and dim == 0
    if own == whole or fused:
        return None
    shape = (whole, tensor.shape[1]) if dim == 0 else (tensor.shape[0], whole)
    return Slice(shape, dim, int(base.tp_rank) * own)


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """vLLM's layers that have slots, by the names of the layers in whose places they are."""
    for name, module in model.named_modules():
        if hasattr(module, "lora_a_stacked") and hasattr(module, "base_layer"):
            yield name, module


def _modules(model: nn.Module, name: str, layer: Any) -> list[str]:
    """Hugging Face names of what is fused in a layer, one for each of its slots. Raises StageError where they differ."""
    parent, _, last = name.rpartition(".")
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    parts = packed.get(last, [last])
    if len(layer.lora_a_stacked) != len(parts):
        raise StageError(
            f"{name} has {len(layer.lora_a_stacked)} slots for adapters of {', '.join(parts)}",
            "name other trainer.lora.targets, or set weights.publish=merged",
        )
    return [f"{parent}.{part}" if parent else part for part in parts]


def _slots(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        _slot(name, kind, number): tensor
        for name, layer in _layers(model)
        for kind, stacked in (("a", layer.lora_a_stacked), ("b", layer.lora_b_stacked))
        for number, tensor in enumerate(stacked)
    }


def _slot(layer: str, kind: str, number: int) -> str:
    return f"{layer}.{kind}.{number}"

"""LoRA (`trainer.lora`): low-rank adapters on linear layers of a policy whose own weights are frozen, by the library peft.

y = W·x + (alpha / rank)·B·(A·x)       A: random, by the run's seed; B: 0, so that the run begins with its first policy

trained, in checkpoints    A and B, in float32
published, exported        W + (alpha / rank)·B·A under W's own name; `final-adapter` has A and B alone
published alone            A and (alpha / rank)·B (`weights.publish = "adapter"`, `weight_bus.manifest.adapter`)
reference                  the same model with its adapters off
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from services.config.training.lora import LoraSettings
from services.wire.errors import UsageError
from services.wire.extras import install
from trainer.parallel.sharding import whole
from weight_bus.manifest.adapter import a_name, b_name
from weight_bus.manifest.computed import ComputedTensor, PublishedTensor
from weight_bus.manifest.local_part import part_of

if TYPE_CHECKING:
    from peft.tuners.lora import Linear

_log = structlog.get_logger()

_NAME = "default"
"""peft's own for the one adapter of a model."""


class Adapters:
    """The adapters of one model, which stays of its class; its own weights are frozen from then on."""

    def __init__(self, model: PreTrainedModel, settings: LoraSettings, seed: int) -> None:
        """Put them into `model`, on its device. Raises UsageError where a target is none of its linear layers.

        The same model, settings and seed give the same bytes.
        """
        # Takes a second to import, and only runs with adapters need it.
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ModuleNotFoundError as error:
            raise UsageError(
                f"trainer.lora.rank={settings.rank} needs peft, which is not installed", install("lora")
            ) from error
        from peft.functional import cast_adapter_dtype
        from peft.tuners.lora import Linear

        self._model = model
        self._config = LoraConfig(
            task_type="CAUSAL_LM",
            r=settings.rank,
            lora_alpha=settings.alpha,
            target_modules=_targets(model, settings),
            lora_dropout=0.0,
            bias="none",
        )
        with torch.random.fork_rng(devices=[]), _stood_in_for(model):
            torch.manual_seed(seed)
            inject_adapter_in_model(self._config, model, _NAME)
        # peft makes them in the dtype of the layer, in which small steps would be lost.
        cast_adapter_dtype(model, _NAME)
        self._layers = {name: module for name, module in model.named_modules() if isinstance(module, Linear)}
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        _log.info("adapters are trained", layers=len(self._layers), parameters=trained)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Within, the model computes what it did before it had adapters. Graphs of passes before may be used after."""
        for layer in self._layers.values():
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in self._layers.values():
                layer.enable_adapters(True)

    def merged(self, weights: Mapping[str, Tensor]) -> dict[str, PublishedTensor]:
        """Of the model's `weights` by their present names: what a model without adapters holds, by its names.

        Weights of layers without adapters are the same tensors.
        """
        merged: dict[str, PublishedTensor] = {}
        for name, tensor in weights.items():
            if name.partition(".lora_")[0] in self._layers:
                continue
            module, _, own = name.rpartition(".")
            module = module.removesuffix(".base_layer")
            layer = self._layers.get(module)
            if layer is None:
                merged[name] = tensor
            else:
                merged[f"{module}.{own}"] = _sum(layer, tensor) if own == "weight" else tensor
        return merged

    def alone(self) -> dict[str, PublishedTensor]:
        """A and B, as engines apply them to weights of their own: alpha / rank is in B. Raises UsageError, naming it, for a
        layer whose weight lies the other way round."""
        found: dict[str, PublishedTensor] = {}
        for name, layer in self._layers.items():
            if layer.fan_in_fan_out:
                raise UsageError(
                    f"the adapter of {name}, a {type(layer.get_base_layer()).__name__}, cannot be published alone",
                    "set weights.publish=merged",
                )
            found[a_name(name)] = layer.lora_A[_NAME].weight.detach()
            found[b_name(name)] = _scaled(layer.lora_B[_NAME].weight, layer.scaling[_NAME])
        return found

    def state(self) -> dict[str, Tensor]:
        """A and B, the live ones, by peft's names."""
        from peft import get_peft_model_state_dict

        # Not asked to look for changed embeddings: that would ask the hub for the base.
        state = get_peft_model_state_dict(self._model, adapter_name=_NAME, save_embedding_layers=False)
        return {f"base_model.model.{name}": tensor.detach() for name, tensor in state.items()}

    def save(self, folder: Path, base: Path, state: Mapping[str, Tensor] | None = None) -> None:
        """Write A and B in peft's format, for the model in `base`: `PeftModel.from_pretrained(model, folder)` loads them.

        `state`: all of each, where the model has only this rank's. Raises OSError.
        """
        from peft import LoraConfig

        found = self.state() if state is None else state
        tensors = {name: tensor.cpu().contiguous() for name, tensor in found.items()}
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        config = LoraConfig(**self._config.to_dict())
        config.base_model_name_or_path, config.inference_mode = str(base), True
        config.target_modules = sorted(config.target_modules or ())
        config.save_pretrained(str(folder))


@contextmanager
def _stood_in_for(model: PreTrainedModel) -> Iterator[None]:
    """Weights on meta are of the host's memory meanwhile, one element each: peft moves what it makes to where they are."""
    held = [(module, name, weight) for module in model.modules() for name, weight in module._parameters.items()]
    empty = [(module, name, weight) for module, name, weight in held if weight is not None and weight.is_meta]
    for module, name, weight in empty:
        one = torch.zeros((), dtype=weight.dtype).expand(weight.shape)
        module._parameters[name] = nn.Parameter(one, weight.requires_grad)
    try:
        yield
    finally:
        for module, name, weight in empty:
            weight.requires_grad_(module._parameters[name].requires_grad)
            module._parameters[name] = weight


def _scaled(weight: Tensor, scale: float) -> ComputedTensor:
    @torch.no_grad()
    def compute() -> Tensor:
        return weight.detach() * scale

    return ComputedTensor(weight.shape, compute, weight if isinstance(weight, DTensor) else None)


def _sum(layer: Linear, weight: Tensor) -> ComputedTensor:
    """W + (alpha / rank)·B·A in float32, in one operation: peft's own merge takes two to three times as long."""
    first, second, scale = layer.lora_B[_NAME].weight, layer.lora_A[_NAME].weight, layer.scaling[_NAME]
    if layer.fan_in_fan_out:
        # A Conv1D holds its weight turned.
        first, second = second.T, first.T

    @torch.no_grad()
    def compute() -> Tensor:
        if not isinstance(weight, DTensor):
            return torch.addmm(weight.to(first.dtype), first, second, alpha=scale)
        # A and B are small: every rank has them whole for as long as it adds them to its part of the weight.
        part = part_of("a weight with adapters", weight)
        rows, columns = (torch.cat([torch.arange(*each) for each in ranges]) for ranges in part.spans)
        of_rows, of_columns = whole(first)[rows.to(first.device)], whole(second)[:, columns.to(second.device)]
        local = torch.addmm(part.local.to(first.dtype), of_rows, of_columns, alpha=scale)
        return DTensor.from_local(
            local, weight.device_mesh, weight.placements, run_check=False, shape=weight.shape, stride=weight.stride()
        )

    return ComputedTensor(weight.shape, compute, weight if isinstance(weight, DTensor) else None)


def _targets(model: PreTrainedModel, settings: LoraSettings) -> list[str]:
    """What the settings say, in names that mean linear layers of `model`; raises UsageError where one does not.

    peft's own `all-linear` takes more: routers, and experts that are one parameter, which are no linear layers.
    """
    modules, head = dict(model.named_modules()), model.get_output_embeddings()
    linear = [
        name
        for name, module in modules.items()
        # What is frozen, such as an encoder of images, stays as it is.
        if isinstance(module, nn.Linear | Conv1D) and module is not head and module.weight.requires_grad
    ]
    if isinstance(settings.targets, str):
        return linear
    known = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
    for target in settings.targets:
        found = [name for name in modules if name == target or name.endswith(f".{target}")]
        if not found:
            raise UsageError(
                f"trainer.lora.targets: the model has no module {target!r}", f"name linear layers of it: {known}"
            )
        for name in found:
            if name not in linear:
                # The head computes logits from its weight alone, and may share it with the embedding.
                kind = "the language head" if modules[name] is head else f"of class {type(modules[name]).__name__}"
                raise UsageError(
                    f"trainer.lora.targets: {target!r} is {kind}, which gets no adapter",
                    f"name linear layers of it: {known}",
                )
    return settings.targets

"""A model with adapters, as a trainer has it, and the publisher of its versions."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.config.training.lora import LoraSettings
from tests.support.model_families import FOR_VLLM, Sizes, make_family
from trainer.model.adapters import Adapters
from trainer.model.learner import named_weights
from weight_bus.manifest.adapter import base_digest
from weight_bus.manifest.computed import computed
from weight_bus.manifest.manifest import Adapter, Manifest
from weight_bus.publisher.publisher import Publisher
from weight_bus.transports.shm import ShmExporter

SIZES = {**FOR_VLLM, "num_key_value_heads": 2, "max_position_embeddings": 512}


class TrainedAdapters:
    """`folder` has the base, or gets one of `family`. `numbers`: what the steps are drawn from."""

    def __init__(
        self,
        folder: Path,
        run_id: str,
        *,
        rank: int,
        alpha: int,
        targets: str | list[str] = "all-linear",
        family: str = "Qwen3",
        numbers: int = 2,
        sizes: Sizes = SIZES,
    ) -> None:
        self.folder, self._family = folder, family
        if not (folder / "config.json").exists():
            make_family(family, sizes).save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model: PreTrainedModel = model.eval().requires_grad_(True)
        self._adapters = Adapters(self._model, LoraSettings(rank=rank, alpha=alpha, targets=targets), seed=3)
        self._numbers = torch.Generator().manual_seed(numbers)
        of = Adapter(base_digest=base_digest(folder), rank=rank, alpha=alpha)
        self.publisher = Publisher(run_id, self._adapters.alone(), "float32", ShmExporter(run_id), 1 << 14, adapter=of)

    def train(self) -> None:
        with torch.no_grad():
            for parameter in self._model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape, generator=self._numbers), alpha=0.02)

    def publish(self, version: int) -> Manifest:
        return self.publisher.publish(version, self._adapters.alone()).manifest()

    def save_merged(self, folder: Path) -> PreTrainedModel:
        state = self._model.state_dict()
        live = {name: state[name] for name in named_weights(self._model)}
        merged = {name: computed(tensor) for name, tensor in self._adapters.merged(live).items()}
        plain = make_family(self._family, SIZES)
        plain.load_state_dict(merged, strict=False)
        plain.save_pretrained(folder)
        return plain

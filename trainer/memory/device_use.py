"""What a step took of the device: memory, and floating-point operations against the card's."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import torch
from torch import nn
from transformers import PreTrainedModel

from services.policies.training.flops import StepCost, peak_flops
from services.wire.run_metrics import DeviceUse
from trainer.data.packing import MicroBatch, PackedBatch


class Gauge:
    """Reads what each step of a model took. `width`: of its hidden states where prefixes are computed once, else None.

    `peak`: operations a second that the device is made for; left out: by the card's name.
    """

    def __init__(self, model: PreTrainedModel, width: int | None, *, frozen: bool, peak: float | None = None) -> None:
        self._cost, self._width = step_cost(model, frozen=frozen), width
        self._device = model.device
        cuda = self._device.type == "cuda"
        self._peak = peak_flops(torch.cuda.get_device_name(self._device)) if peak is None and cuda else peak
        self._process = None if cuda else psutil.Process()

    def read(self, batch: PackedBatch, seconds: float) -> DeviceUse:
        """Of a step of `batch` that took so long, forward and backward."""
        mfu = None
        if self._peak is not None:
            mfu = (
                self._cost.flops(run for micro in batch.micro_batches for run in self._runs(micro))
                / seconds
                / self._peak
            )
        if self._process is not None:
            return DeviceUse(memory_bytes=int(self._process.memory_info().rss), mfu=mfu)
        most = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return DeviceUse(memory_bytes=int(most), mfu=mfu)

    def _runs(self, micro: MicroBatch) -> Iterator[tuple[int, int, int]]:
        row = micro.row
        if row.needs is not None and self._width is not None:
            row = row.needs.condensed(self._width, self._device).row
        before = (0,) * len(row.runs) if row.shared is None else row.shared.before
        return ((own, shared, count) for (own, count), shared in zip(row.runs, before, strict=True))


def step_cost(model: PreTrainedModel, *, frozen: bool) -> StepCost:
    """Of any decoder that its configuration describes in `transformers`' usual words."""
    config = model.config.get_text_config()
    heads = int(config.num_attention_heads)
    head = int(getattr(config, "head_dim", None) or config.hidden_size // heads)
    return StepCost(_weights(model, config), int(config.num_hidden_layers) * heads * head, frozen)


def _weights(model: nn.Module, config: object) -> int:
    chosen, experts = (int(getattr(config, name, 0) or 0) for name in ("num_experts_per_tok", "num_experts"))
    experts = experts or int(getattr(config, "num_local_experts", 0) or 0)
    weights = 0.0
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            share = chosen / experts if experts and ".experts." in name else 1.0
            weights += module.weight.numel() * share
        elif experts and name.endswith(".experts"):
            # Stacked, not a module each.
            weights += sum(weight.numel() for weight in module.parameters(recurse=False)) * chosen / experts
    return int(weights)

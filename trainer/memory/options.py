"""What the formula of memory reads of a run's settings, for a machine. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.config.checks import layout_in_force
from services.config.settings import RunSettings
from services.policies.training.memory import MemoryOptions
from trainer.algorithms.needs import needs_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Machine:
    """`ranks`: each with a device of its own; `device_bytes`: of a GPU, None for a CPU."""

    ranks: int = 1
    device_bytes: int | None = None

    @property
    def gpu(self) -> bool:
        return self.device_bytes is not None


def machine_of(device: torch.device, ranks: int = 1) -> Machine:
    """The machine of a trainer whose ranks each have a device like this one."""
    if device.type != "cuda":
        return Machine(ranks)
    import torch

    return Machine(ranks, int(torch.cuda.get_device_properties(device).total_memory))


def options_of(settings: RunSettings, machine: Machine) -> MemoryOptions:
    """What the formula reads of the settings. Raises UsageError as `layout_in_force`: what ranks refuse is not planned."""
    trainer = settings.trainer
    needs = needs_of(trainer)
    half = trainer.dtype == "bfloat16" or (trainer.dtype == "auto" and machine.gpu)
    return MemoryOptions(
        tokens=trainer.micro_batch_tokens,
        half=half,
        layout=layout_in_force(settings, machine.ranks),
        checkpointing=trainer.activation_checkpointing,
        gpu=machine.gpu,
        activation_offload=trainer.activation_offload,
        optimizer_offload=trainer.optimizer.offload,
        optimizer=trainer.optimizer.kind,
        state_bits=trainer.optimizer.state_bits,
        lora_rank=trainer.lora.rank,
        reference=needs.reference and not trainer.lora.rank,
        critic=needs.critic,
        offload_idle=trainer.offload_idle,
        serving_bytes=2 if settings.model.dtype == "bfloat16" else 4,
        arenas=settings.weights.arenas,
        publish_on_device=machine.gpu and settings.weights.nixl.memory == "device",
        reshard_after_forward=trainer.parallel.reshard_after_forward,
        device_bytes=machine.device_bytes,
    )

"""`rollmesh memory --fit`: settings under which a step fits, as lines to copy."""

from __future__ import annotations

from services.config.settings import RunSettings
from services.policies.training.memory_fit import fit, smallest
from services.policies.training.model_shape import ModelShape
from services.wire.errors import UsageError
from trainer.planning.plan import Machine, options_of

_GIB = 1 << 30


def fit_settings(
    shape: ModelShape, settings: RunSettings, machine: Machine, share: float
) -> tuple[RunSettings, list[str]]:
    """The settings with what the fit chose, and its lines. `share`: of the GPU's memory that may be filled.

    Raises UsageError, with the sum, where nothing fits.
    """
    assert machine.device_bytes is not None
    asked = options_of(settings, machine)
    found = fit(shape, asked, share * machine.device_bytes)
    if found is None:
        least = smallest(shape, asked).estimate
        raise UsageError(
            f"nothing fits: with everything checkpointed and offloaded it is {least.total / _GIB:.1f} GiB of "
            f"{machine.device_bytes / _GIB:.1f} ({least.words})",
            "take more GPUs, fewer trainer.micro_batch_tokens, or adapters (trainer.lora.rank=16)",
        )
    options, trainer = found.options, settings.trainer
    parallel = trainer.parallel.model_copy(update={"data": options.layout.data, "tensor": options.layout.tensor})
    chosen = trainer.model_copy(
        update={
            "micro_batch_tokens": options.tokens,
            "activation_checkpointing": options.checkpointing,
            "activation_offload": options.activation_offload,
            "optimizer": trainer.optimizer.model_copy(update={"offload": options.optimizer_offload}),
            "parallel": parallel,
        }
    )
    lines = [
        f"trainer.micro_batch_tokens = {options.tokens}",
        f'trainer.activation_checkpointing = "{options.checkpointing}"',
        f"trainer.activation_offload = {str(options.activation_offload).lower()}",
        f"trainer.optimizer.offload = {str(options.optimizer_offload).lower()}",
    ]
    if machine.ranks > 1:
        lines.append(f"trainer.parallel.data = {options.layout.data}")
        lines.append(f"trainer.parallel.tensor = {options.layout.tensor}")
    return settings.model_copy(update={"trainer": chosen}), lines

"""Before weights are loaded: whether a run can fit the GPU that there is, by the formula."""

from __future__ import annotations

from pathlib import Path

import structlog

from services.config.settings import RunSettings
from services.policies.training.memory import SURE, Estimate, estimate
from services.wire.errors import UsageError
from trainer.memory.options import Machine, options_of
from trainer.planning.plan import read_shape

_GIB = 1 << 30
_log = structlog.get_logger()


def estimate_of(folder: Path, settings: RunSettings, machine: Machine) -> Estimate | None:
    """Of a step on a GPU of `machine`; None on a CPU, and for a configuration that the formula does not know."""
    if machine.device_bytes is None:
        return None
    try:
        shape = read_shape(folder)
    except UsageError as error:
        _log.info("whether a step fits the GPU is not known beforehand", why=error.what)
        return None
    return estimate(shape, options_of(settings, machine))


def refuse_what_cannot_fit(folder: Path, settings: RunSettings, machine: Machine) -> None:
    """Raises UsageError, with the sum, for settings whose step takes more than a GPU of `machine` has.

    Nothing on a CPU, whose memory may be swapped, and for a configuration that the formula does not know.
    """
    found = estimate_of(folder, settings, machine)
    if found is None or machine.device_bytes is None or found.total <= SURE * machine.device_bytes:
        return
    raise UsageError(
        f"a step of {folder.name} takes about {found.total / _GIB:.1f} GiB, and a GPU has "
        f"{machine.device_bytes / _GIB:.1f} ({found.words})",
        "see `rollmesh memory --fit`: trainer.activation_checkpointing=full, fewer trainer.micro_batch_tokens, more ranks, "
        "or on one rank trainer.optimizer.offload=true and adapters (trainer.lora.rank) take less",
    )

"""What no single setting shows: settings that contradict each other, and those that would have no effect.

Of the loss and the advantage: `trainer.algorithms.describe`.
"""

from __future__ import annotations

from services.config.base import changed_fields, idle
from services.config.settings import RunSettings, TrainerSettings
from services.policies.admission import most_updates
from services.wire.errors import UsageError


def check(settings: RunSettings) -> None:
    """Raises UsageError for settings under which a run could not go on, or of which one would have no effect."""
    _refuse_starvation(settings)
    _refuse_idle_optimizer(settings.trainer)
    _refuse_schedule(settings)


def _refuse_starvation(settings: RunSettings) -> None:
    updates, most = settings.trainer.updates_per_batch, most_updates(settings.k)
    if updates > most:
        raise UsageError(
            f"trainer.updates_per_batch={updates} cannot be under k={settings.k}: a batch is sampled before its "
            f"first step, so tokens of its last would be {updates - 1} steps old",
            f"set k={updates - 1} or more ({2 * updates - 1} lets engines generate while the trainer trains), or "
            f"trainer.updates_per_batch={most} or less",
        )


def _refuse_idle_optimizer(trainer: TrainerSettings) -> None:
    optimizer = trainer.optimizer
    if optimizer.kind != "muon":
        for name, value in changed_fields(optimizer.muon).items():
            raise idle(
                f"optimizer.muon.{name}",
                value,
                f"optimizer.kind={optimizer.kind}",
                "leave it out, or set trainer.optimizer.kind=muon",
            )
    if optimizer.decay_norms_and_biases and not trainer.weight_decay:
        raise idle("optimizer.decay_norms_and_biases", True, "weight_decay=0", "set trainer.weight_decay")


def _refuse_schedule(settings: RunSettings) -> None:
    trainer, schedule = settings.trainer, settings.trainer.schedule
    changed = changed_fields(schedule)
    if "decay_share" in changed and schedule.kind != "wsd":
        under = f"schedule.kind={schedule.kind}"
        raise idle(
            "schedule.decay_share", schedule.decay_share, under, "leave it out, or set trainer.schedule.kind=wsd"
        )
    if "floor" in changed and schedule.kind == "constant":
        remedy = "leave it out, or set trainer.schedule.kind=linear, cosine or wsd"
        raise idle("schedule.floor", schedule.floor, "schedule.kind=constant", remedy)
    try:
        schedule.of_run(trainer.warmup_steps, settings.steps)
    except ValueError as error:
        raise UsageError(
            f"trainer.{error}",
            "make trainer.warmup_steps smaller, or steps more"
            + (", or trainer.schedule.decay_share smaller" if schedule.kind == "wsd" else ""),
        ) from error

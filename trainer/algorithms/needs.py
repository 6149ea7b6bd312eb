"""What a choice of loss and advantage needs beside the policy: a reference, a critic, a teacher. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from services.config.base import changed_fields, idle
from services.config.settings import TrainerSettings
from services.wire.errors import UsageError
from trainer.algorithms.advantages.registry import find_estimator
from trainer.algorithms.losses.registry import find_loss

_OF_CRITIC = ("values", "returns")


@dataclass(frozen=True)
class Needs:
    """`reference`: logprobs of the run's first policy; `critic`: values, and a model of them; `teacher`: its logprobs."""

    reference: bool
    critic: bool
    teacher: bool


def needs_of(trainer: TrainerSettings) -> Needs:
    """Raises UsageError for a loss or an estimator that there is not."""
    columns = {column for _, column in _read(trainer)}
    return Needs(
        reference=bool(trainer.loss.kl or trainer.advantage.kl) or "reference" in columns,
        critic=find_estimator(trainer.advantage.estimator).critic,
        teacher=trainer.advantage.distil is not None or "teacher" in columns,
    )


def check_columns(trainer: TrainerSettings) -> None:
    """Raises UsageError, by name, for a column that there cannot be under the other settings."""
    needs, estimator = needs_of(trainer), trainer.advantage.estimator
    for reader, column in _read(trainer):
        if column in _OF_CRITIC and not needs.critic:
            raise UsageError(
                f"{reader} reads the column {column!r}, and trainer.advantage.estimator={estimator} has no critic",
                "set trainer.advantage.estimator=gae, or another whose entry has a critic",
            )
        if column == "teacher":
            _check_there(trainer, f"{reader} reads a teacher's logprobs")
    if trainer.advantage.distil is not None:
        _check_there(trainer, f"trainer.advantage.distil={trainer.advantage.distil:g} reads a teacher's logprobs")
    teacher = changed_fields(trainer.teacher)
    for name, value in () if needs.teacher else teacher.items():
        under = f"advantage.estimator={estimator}, which reads no teacher's logprobs"
        raise idle(f"teacher.{name}", value, under, "set trainer.advantage.estimator=opd or trainer.advantage.distil")
    if "key_file" in teacher and trainer.teacher.url is None:
        under = "no teacher.url: what `rollmesh up` serves asks for the mesh's own keys"
        raise idle("teacher.key_file", trainer.teacher.key_file, under, "leave it out")


def _check_there(trainer: TrainerSettings, what: str) -> None:
    if not trainer.teacher.there:
        raise UsageError(f"{what}, and there is no teacher", "set trainer.teacher.url, or trainer.teacher.model")


def _read(trainer: TrainerSettings) -> list[tuple[str, str]]:
    """The columns that are read, each with the setting that chose its reader."""
    loss, estimator = trainer.loss.policy, trainer.advantage.estimator
    of_loss = [(f"trainer.loss.policy={loss}", column) for column in find_loss(loss).columns]
    return [
        *of_loss,
        *((f"trainer.advantage.estimator={estimator}", column) for column in find_estimator(estimator).columns),
    ]

"""What a choice of loss and advantage needs beside the policy: a reference, a critic. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from services.config.settings import TrainerSettings
from services.wire.errors import UsageError
from trainer.algorithms.advantages.registry import find_estimator
from trainer.algorithms.losses.registry import find_loss

_OF_CRITIC = ("values", "returns")


@dataclass(frozen=True)
class Needs:
    """`reference`: logprobs of the run's first policy; `critic`: values, and a model of them."""

    reference: bool
    critic: bool


def needs_of(trainer: TrainerSettings) -> Needs:
    """Raises UsageError for a loss or an estimator that there is not."""
    columns = {column for _, column in _read(trainer)}
    return Needs(
        reference=bool(trainer.loss.kl or trainer.advantage.kl) or "reference" in columns,
        critic=find_estimator(trainer.advantage.estimator).critic,
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


def _read(trainer: TrainerSettings) -> list[tuple[str, str]]:
    """The columns that are read, each with the setting that chose its reader."""
    loss, estimator = trainer.loss.policy, trainer.advantage.estimator
    of_loss = [(f"trainer.loss.policy={loss}", column) for column in find_loss(loss).columns]
    return [
        *of_loss,
        *((f"trainer.advantage.estimator={estimator}", column) for column in find_estimator(estimator).columns),
    ]

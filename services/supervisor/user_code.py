"""Code of the user's own, a task or an algorithm, looked at before anything is started: in a process of its own, so that
neither its libraries nor its mistakes come into the supervisor."""

from __future__ import annotations

from pathlib import Path

import msgspec

from services.config.base import Section
from services.config.load import dump_settings
from services.config.settings import RunSettings, TrainerSettings
from services.config.training.algorithm import DISTILLATION, Formula
from services.host.commands import ask
from services.wire.errors import UNDECODABLE
from services.wire.tasks.name import parse_task
from services.wire.tasks.trial import TaskTrial


async def check_tasks(settings: RunSettings) -> list[TaskTrial]:
    """See whether the tasks can be made, in a process of its own: neither libraries nor the user's code are imported here.
    Returns how each speaks; nothing of a task that is built in.

    Raises UsageError with what that process says of a name, an option or a library; RollmeshError when it hangs.
    """
    if not settings.tasks and parse_task(settings.task).built_in:
        return []
    flags = ("--config", "/dev/stdin", "--check", "--json")
    hangs = f"{settings.task_in_words} was not made"
    said = await ask(("run-environment", *flags), hangs, dump_settings(settings).encode())
    return [each for line in said.splitlines() if (each := _decoded(line)) is not None]


def _decoded(line: bytes) -> TaskTrial | None:
    """None for what the user's code has printed."""
    try:
        return msgspec.json.decode(line, type=TaskTrial)
    except UNDECODABLE:
        return None


async def with_algorithm(settings: RunSettings) -> tuple[RunSettings, dict[str, str]]:
    """`settings` with the defaults of an algorithm of the user's own; dotted name → whose, for those that were added.

    Raises UsageError for one that cannot be imported, for settings that it has not, and for what it reads and is not there.
    """
    trainer = settings.trainer
    loss, advantage = trainer.loss, trainer.advantage
    named = {"loss": _found(loss.policy), "advantage": _found(advantage.estimator)}
    distils = trainer.teacher.there or advantage.distil is not None or advantage.estimator == DISTILLATION
    usual = TrainerSettings()
    own = any(":" in name for name in named.values()) or bool(loss.own) or bool(advantage.own)
    if not own and not distils and (loss.policy, advantage.estimator) == (usual.loss.policy, usual.advantage.estimator):
        return settings, {}
    loss = loss.model_copy(update={"policy": named["loss"]})
    advantage = advantage.model_copy(update={"estimator": named["advantage"]})
    settings = _with_trainer(settings, loss=loss, advantage=advantage)
    command = ("formula", "--json", "--config", "/dev/stdin")
    said = await ask(command, "the algorithm was not imported", dump_settings(settings).encode())
    found = msgspec.json.decode(said, type=Formula)
    added: dict[str, str] = {}
    for section, table, before in (("loss", found.loss, loss.own), ("advantage", found.advantage, advantage.own)):
        added |= {f"trainer.{section}.own.{key}": f"default of {named[section]}" for key in table if key not in before}
    loss, advantage = (
        loss.model_copy(update={"own": found.loss}),
        advantage.model_copy(update={"own": found.advantage}),
    )
    return _with_trainer(settings, loss=loss, advantage=advantage), added


def _with_trainer(settings: RunSettings, **sections: Section) -> RunSettings:
    return settings.model_copy(update={"trainer": settings.trainer.model_copy(update=sections)})


def _found(algorithm: str) -> str:
    """Its name with a file in it as an absolute path, so that it means the same wherever it is read again."""
    where, colon, attribute = algorithm.rpartition(":")
    return f"{Path(where).expanduser().absolute()}:{attribute}" if colon and where.endswith(".py") else algorithm

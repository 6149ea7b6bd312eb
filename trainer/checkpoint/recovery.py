"""Recovery after a crash: the newest checkpoint, then the batches of the step log once more, read from the stream.

checkpoint v ──► step log from v ──► the same batches, the same settings ──┬── the same bytes ──► the version that engines
                                                                           │                     may have seen
                                                                           └── others ──► one above all that were announced
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from services.config.settings import RunSettings, TrainerSettings
from services.config.training.optimizer import ScheduleSettings
from services.policies.batching import Group, Member
from services.run_store.stream import StreamEntry
from services.wire.choices import BlobError, attach
from services.wire.errors import RollmeshError
from services.wire.trajectory import Trajectory, decode_trajectory
from trainer.checkpoint.checkpoint import UnreadableError, restore_newest
from trainer.checkpoint.log_lines import StepRecord, Tunables
from trainer.checkpoint.step_log import Terms
from trainer.model.roles import Roles

_log = structlog.get_logger()

LIVES = 3
"""In so many lives of the trainer a batch is tried before its groups are dropped."""
_NO_BYTES = {
    "checkpoint_every",
    "batch_timeout_s",
    "stop_timeout_s",
    "on_anomaly",
    "deterministic",
    "activation_checkpointing",
    "activation_offload",
    "offload_idle",
    "parallel",
}
"""Settings of the trainer that no step's bytes depend on; `deterministic` and `parallel` are of the environment, and may
change."""
_ABSENT_BEFORE = (
    "dtype",
    "compile",
    "tf32",
    "optimizer",
    "schedule",
    "epochs_per_batch",
    "lora",
    "loss.own",
    "loss.router_aux",
    "loss.positive",
    "advantage.own",
    "advantage.distil",
    "advantage.distil_discount",
    "advantage.trace_alpha",
    "advantage.reward",
    "advantage.critic.trace",
    "advantage.critic.pretrain_steps",
    "teacher",
)
"""Settings that runs of before did not know: at their defaults they leave a fingerprint as it was."""


class ReplayError(RollmeshError):
    """The stream no longer holds what a step consumed, so its version cannot be made again."""

    code = "replay"


class DivergedError(RollmeshError):
    """With `trainer.deterministic`: the repeated steps gave other bytes than those that were announced.

    Exit code 2: a restart would come to the same.
    """

    code = "diverged"
    exit_code = 2


def diverged(version: int, changes: Sequence[str]) -> DivergedError:
    """`changes`: of the environment since the life before."""
    now = f"; since then: {', '.join(changes)}" if changes else ""
    return DivergedError(
        f"trainer.deterministic: the repeated steps gave other bytes than were announced as version {version}{now}",
        "start the trainer with the libraries and the device that it had, or set trainer.deterministic=false to go on "
        "under another version",
    )


def restore(folder: Path, roles: Roles, run_id: str) -> int | None:
    """Load the newest checkpoint; returns its version, or None where the run is to be repeated from its beginning.

    That is so without a checkpoint, and where none can be read: the step log and the stream say whether they reach back.
    Raises MismatchError.
    """
    try:
        return restore_newest(folder, roles, run_id)
    except UnreadableError as error:
        _log.error("the run is repeated from its beginning", why=error.what)
        return None


def fingerprint(settings: RunSettings) -> str:
    """Names the settings that the bytes of a step depend on: another value, another version."""
    return _fingerprint(settings, _NO_BYTES, _schedule_steps(settings))


def terms_of(settings: RunSettings) -> Terms:
    """What the step log holds of a run's settings."""
    trainer = settings.trainer
    tunables = Tunables(
        micro_batch_tokens=trainer.micro_batch_tokens,
        learning_rate=trainer.learning_rate,
        warmup_steps=trainer.warmup_steps,
        clip_grad_norm=trainer.clip_grad_norm,
        schedule=trainer.schedule.model_dump(mode="json"),
        steps=_schedule_steps(settings),
    )
    fixed = _fingerprint(settings, _NO_BYTES | {*Tunables.__struct_fields__})
    return Terms(fixed, fingerprint(settings), tunables)


def under(settings: RunSettings, tunables: Tunables, micro_batch_tokens: int | None = None) -> RunSettings:
    """`settings` with the tunables of another time, and passes of so many tokens where that is given."""
    changes = msgspec.structs.asdict(tunables)
    steps = changes.pop("steps")
    changes["schedule"] = ScheduleSettings.model_validate(tunables.schedule)
    if micro_batch_tokens is not None:
        changes["micro_batch_tokens"] = micro_batch_tokens
    trainer = settings.trainer.model_copy(update=changes)
    return settings.model_copy(update={"trainer": trainer, "steps": settings.steps if steps is None else steps})


def _schedule_steps(settings: RunSettings) -> int | None:
    """The run's steps, where bytes depend on them."""
    return None if settings.trainer.schedule.kind == "constant" else settings.steps


def _fingerprint(settings: RunSettings, without: set[str], steps: int | None = None) -> str:
    trainer = settings.trainer.model_dump(mode="json", exclude=without)
    # Where state is kept changes no bytes.
    trainer["optimizer"]["offload"] = False
    # Nor does where a teacher is asked: which one it is stays, where that is known.
    trainer["teacher"] = {"model": trainer["teacher"]["model"]}
    defaults = TrainerSettings().model_dump(mode="json")
    defaults["teacher"] = {"model": None}
    for name in _ABSENT_BEFORE:
        *sections, key = name.split(".")
        of_run, by_default = trainer, defaults
        for section in sections:
            of_run, by_default = of_run[section], by_default[section]
        if key in of_run and of_run[key] == by_default[key]:
            del of_run[key]
    # Its name of before.
    trainer["updates_per_batch"] = trainer.pop("minibatches_per_batch")
    named = {"k": settings.k, "seed": settings.seed, "trainer": trainer}
    if settings.rollout.routing_replay:
        named["routing_replay"] = True
    canonical = msgspec.json.encode(named if steps is None else named | {"steps": steps}, order="sorted")
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()


@dataclass(frozen=True)
class Replay:
    """The steps to repeat, oldest first."""

    records: list[StepRecord]

    @staticmethod
    def since(version: int, log: Sequence[StepRecord]) -> Replay:
        """Those after `version`. Raises ReplayError when the log does not reach back to it."""
        records = [record for record in log if record.version >= version]
        if records and records[0].version != version:
            raise ReplayError(
                f"the step log begins at version {records[0].version}, the newest checkpoint is version {version}",
                "start a new run with another --run-dir",
            )
        return Replay(records)


def groups_of(record: StepRecord, entries: Sequence[StreamEntry]) -> list[Group[Trajectory]]:
    """The batch of `record` as it was. Raises ReplayError when entries are missing."""
    if [entry.stream_id for entry in entries] != record.entries:
        raise ReplayError(
            f"{len(record.entries) - len(entries)} entries of the batch from {record.version} on are gone from the stream",
            "start a new run with another --run-dir",
        )
    try:
        return regrouped(entries)
    except BlobError as error:
        what = f"the batch from {record.version} on cannot be trained as it was: {error.what}"
        raise ReplayError(what, "start a new run with another --run-dir") from error


def regrouped(entries: Sequence[StreamEntry]) -> list[Group[Trajectory]]:
    """The groups of sound entries, in the order of their first siblings. Raises BlobError where a blob is missing."""
    groups: dict[str, Group[Trajectory]] = {}
    for entry in entries:
        one = decode_trajectory(entry.payload)
        if entry.ref:
            one = attach(one, entry.ref, entry.blob)
        group = groups.setdefault(one.group_id, Group(one.group_id, one.group_ordinal, []))
        group.members.append(Member(entry.stream_id, one.group_id, one.group_ordinal, one.group_size, one.member, one))
    return list(groups.values())

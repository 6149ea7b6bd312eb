"""Batches that could not be trained, with what is needed to look at them and to repeat them.

anomalies/
  version-00000006-anomaly/    a batch for the steps from version 6, and the cause that its groups were dropped for
    report.json       why, and each trajectory: entry, group, reward, sampled tokens, behaviour logprobs
    batch.msgpack     the trajectories as they came from the stream
    config.toml       the settings in force
    state/            a checkpoint of before the step that failed: weights, optimizer, price; of the newest batch only

The newest MOST are kept.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from services.config.load import dump_settings, load_settings
from services.config.settings import RunSettings
from services.host.files import appearing
from services.policies.batching import Group, Member
from services.run_store.stream import StreamEntry
from services.wire.errors import RollmeshError, UsageError
from services.wire.packed import unpack_logprobs, unpack_mask
from services.wire.trajectory import Trajectory, encode_trajectory
from trainer.checkpoint import checkpoint
from trainer.checkpoint.recovery import regrouped
from trainer.model.roles import Roles

MOST = 4
_PREFIX = "version-"
_log = structlog.get_logger()


class DumpedTrajectory(msgspec.Struct, frozen=True, kw_only=True):
    """`logprobs`: the behaviour policy's smallest and largest of the sampled tokens; None where there are none."""

    entry: str
    group: str
    member: int
    reward: float
    reward_components: dict[str, float]
    sampled_tokens: int
    versions: list[int]
    logprobs: tuple[float, float] | None


class DumpReport(msgspec.Struct, frozen=True, kw_only=True):
    """`version`: the batch's steps began from it. `made`: so many of its `updates` steps were made before one failed."""

    run_id: str
    version: int
    updates: int
    made: int
    cause: str
    why: str
    trajectories: list[DumpedTrajectory]


_batches = msgspec.msgpack.Decoder(list[StreamEntry])


@dataclass(frozen=True)
class Dump:
    """A batch as it was dumped. `state`: folder of the checkpoint; None where a newer dump has it."""

    report: DumpReport
    settings: RunSettings
    groups: list[Group[Trajectory]]
    state: Path | None


def dump(
    folder: Path, roles: Roles, settings: RunSettings, groups: Sequence[Group[Trajectory]], report: DumpReport
) -> Path | None:
    """Write a batch under `folder`; its path, None where the disk refuses: that must not hide what went wrong."""
    target = folder / f"{_PREFIX}{report.version:08d}-{report.cause}"
    try:
        for old in _dumps(folder):
            shutil.rmtree(old / "state", ignore_errors=True)
        shutil.rmtree(target, ignore_errors=True)
        with appearing(target) as making:
            (making / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
            batch = [
                StreamEntry(member.entry, encode_trajectory(member.payload))
                for group in groups
                for member in group.members
            ]
            (making / "batch.msgpack").write_bytes(msgspec.msgpack.encode(batch))
            (making / "config.toml").write_text(dump_settings(settings), encoding="utf-8")
            state = checkpoint.take(making / "state", roles, report.run_id, "")
            checkpoint.write(making / "state", state, checkpoint.writers_of(roles.ranks))
        for old in [each for each in _dumps(folder) if each != target][: 1 - MOST]:
            shutil.rmtree(old, ignore_errors=True)
    except (OSError, RollmeshError) as error:
        _log.error("the batch could not be dumped", folder=str(target), why=str(error))
        return None
    return target


def read_dump(path: Path) -> Dump:
    """Raises UsageError for a folder that holds no dump.

    dump = read_dump(path)
    roles = make_roles(lambda: load_policy(model), dump.settings, 0)
    restore_newest(dump.state, roles, dump.report.run_id)
    train_batch(roles, dump.settings, dump.groups, dump.report.updates)
    """
    try:
        report = msgspec.json.decode((path / "report.json").read_bytes(), type=DumpReport)
        batch = _batches.decode((path / "batch.msgpack").read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} holds no dumped batch ({error})", "name a folder in a run's anomalies/") from error
    state = path / "state"
    settings = load_settings(path / "config.toml", [])
    return Dump(report, settings, regrouped(batch), state if state.exists() else None)


def describe_batch(groups: Sequence[Group[Trajectory]]) -> list[DumpedTrajectory]:
    """What a report says of each trajectory."""
    return [_describe(member) for group in groups for member in group.members]


def _describe(member: Member[Trajectory]) -> DumpedTrajectory:
    one = member.payload
    sampled = [
        float(logprob)
        for segment in one.segments
        for logprob in unpack_logprobs(segment.logprobs)[unpack_mask(segment.loss_mask) == 1]
    ]
    return DumpedTrajectory(
        entry=member.entry,
        group=member.group,
        member=member.index,
        reward=one.reward,
        reward_components=one.reward_components,
        sampled_tokens=one.sampled_tokens(),
        versions=sorted({span.version for segment in one.segments for span in segment.version_spans}),
        logprobs=(min(sampled), max(sampled)) if sampled else None,
    )


def _dumps(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.glob(f"{_PREFIX}*"), key=lambda path: path.stat().st_mtime)

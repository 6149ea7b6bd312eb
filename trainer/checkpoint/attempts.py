"""Training on a batch, with what becomes of it in the step log: made, made in smaller passes, skipped, or given up.

    record ──► try ──► made ──────────────────────────► outcome (written before anybody hears of the version)
                 ├──► not finite ──► dump ──► stop ───► ended: the run ends, and a restart tries again
                 │                        └─► skip ───► outcome: its groups are dropped as `anomaly`
                 └──► an error, or killed ────────────► the next life tries again; after LIVES of them: dump,
                                                        outcome: its groups are dropped as `untrainable`

A batch whose outcome is in the log is repeated as it was made. Only one without is anybody's to decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.config.settings import RunSettings
from services.policies.batching import Drop, DropCause, Group
from services.policies.versions import after_skips
from services.wire.trajectory import Trajectory
from trainer.checkpoint.anomalies import DumpReport, describe_batch, dump
from trainer.checkpoint.log_lines import AnnouncedRecord, Attempt, Ended, Outcome, Skip, StepRecord
from trainer.checkpoint.recovery import LIVES, ReplayError, terms_of, under
from trainer.checkpoint.step_log import StepLog
from trainer.io_loop import Background
from trainer.model.anomaly import AnomalyError, is_out_of_memory
from trainer.model.roles import Roles
from trainer.model.train_batch import PreparedBatch, Trained, Tried, parts_of, train_batch, try_batch
from trainer.parallel.ranks import RankError

LOG_DEADLINE_S = 60.0
MOST_SKIPPED = 10
"""Batches in a row that may be skipped: where more are, the weights or the settings are to blame."""
MOST_CHARACTERS = 500
"""Of an error, in the log and in dead letters."""
Batch = Sequence[Group[Trajectory]]

_log = structlog.get_logger()


@dataclass(frozen=True)
class Made:
    """What became of a batch. `steps`: that were made; `outcome`: as the log has it, once `logged` is done.

    `dropped`: the groups that were not trained.
    """

    steps: Sequence[Trained]
    outcome: Outcome
    dropped: Batch
    logged: Future[None]


class Attempts:
    """Used by the training thread. `journal`: a pool of one thread, which writes `log`; `folder`: for dumps."""

    def __init__(
        self,
        run_id: str,
        settings: RunSettings,
        roles: Roles,
        log: StepLog,
        journal: ThreadPoolExecutor,
        background: Background,
        folder: Path,
    ) -> None:
        self.log = log
        self._run_id, self._settings, self._roles = run_id, settings, roles
        self._journal, self._background, self._folder = journal, background, folder
        self._tunables = terms_of(settings).tunables
        self._in_force = settings
        """With smaller passes since memory ran out in one."""
        self._newest: Future[None] | None = None
        """The last that was written of a batch."""
        self._skipped = 0

    @property
    def in_force(self) -> RunSettings:
        """The settings that the next batch is trained under."""
        return self._in_force

    def train(self, record: StepRecord, groups: Batch, prepared: PreparedBatch | None = None) -> Made:
        """Train on a new batch, `prepared` where that was done ahead.

        Raises AnomalyError where the run is to stop at it, and what kept it from being trained.
        """
        self.log.records.append(record)
        self._newest = self._journal.submit(self.log.append, record)
        return self._train(self._in_force, record, groups, prepared)

    def repeat(self, record: StepRecord, groups: Batch) -> Sequence[Trained]:
        """A batch of an earlier life once more, as the log has it; the steps that it gives.

        One of which the log has no outcome is tried again, or given up. Raises as `train` does, and ReplayError where there
        is no memory for one that was made: smaller passes would give other bytes to a version that may be known.
        """
        if record is self.log.unproven:
            return self._again(record, groups)
        outcome = self.log.outcomes.get(record.version)
        tokens, made = (None, None) if outcome is None else (outcome.micro_batch_tokens, outcome.made)
        settings = under(self._settings, self.log.tunables_at(record.version), tokens)
        try:
            return train_batch(self._roles, settings, groups, record.updates, made)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise ReplayError(
                f"memory ran out as the batch from version {record.version} was repeated in passes of "
                f"{settings.trainer.micro_batch_tokens} tokens, which fitted once ({error})",
                "start the trainer where it has as much memory as before",
            ) from error

    def announce(self, version: int, digest: str) -> Future[None]:
        """Write down that `version` is about to be announced with these bytes; done before it may be.

        It outlives this process. After a power cut it may be lost, and the bus is asked (`trainer.run`).
        """
        return self._journal.submit(self.log.write, AnnouncedRecord(version, digest), durable=False)

    def skip_to(self, version: int) -> None:
        """Go on as `version` with the weights as they are; durable when this returns, and all that was written before."""
        learner = self._roles.learner
        skip = Skip(learner.version, version)
        learner.skip_to(version)
        self.log.skips[skip.version] = skip.to
        self._write(skip)

    def follow_skips(self) -> None:
        """Where an earlier life went on under another version, the repetition does, too."""
        version = after_skips(self._roles.learner.version, self.log.skips)
        if version != self._roles.learner.version:
            self._roles.learner.skip_to(version)

    def written(self) -> Future[None]:
        """Done once all that was logged so far is durable. Its result is what kept it from that."""
        newest = self._newest
        return self._journal.submit(self._make_durable, newest)

    def _again(self, record: StepRecord, groups: Batch) -> Sequence[Trained]:
        lives = self.log.lives
        if lives >= LIVES:
            why = f"its batch ended the trainer {lives} times ({self.log.last_end or 'it was killed'})"
            self._dump(record, groups, 0, DropCause.UNTRAINABLE, why)
            _log.error("batch given up", version=record.version, groups=len(groups), why=why)
            tokens = self._in_force.trainer.micro_batch_tokens
            given_up = self._conclude(record, [], groups, tokens, DropCause.UNTRAINABLE, why)
            self._wait(given_up.logged)
            return []
        # A kill tells nothing of memory: the last life takes the smallest passes that there are.
        settings = under(self._settings, self._tunables, 1) if lives == LIVES - 1 else self._in_force
        self._write(Attempt(record.version, settings.trainer.micro_batch_tokens))
        made = self._train(settings, record, groups)
        self._wait(made.logged)
        return made.steps

    def _train(
        self, settings: RunSettings, record: StepRecord, groups: Batch, prepared: PreparedBatch | None = None
    ) -> Made:
        tried = self._try(settings, record, groups, prepared)
        minibatches = settings.trainer.shape.of(record.updates).minibatches
        # A group that one epoch has trained on is trained, whatever became of the next.
        dropped = [group for part in parts_of(groups, minibatches)[len(tried.steps) :] for group in part]
        if tried.anomaly is not None:
            return self._not_finite(tried, tried.anomaly, record, groups, dropped)
        self._skipped = 0
        if tried.micro_batch_tokens < settings.trainer.micro_batch_tokens:
            self._in_force = under(self._settings, self._tunables, tried.micro_batch_tokens)
        return self._conclude(record, tried.steps, dropped, tried.micro_batch_tokens)

    def _try(self, settings: RunSettings, record: StepRecord, groups: Batch, prepared: PreparedBatch | None) -> Tried:
        """How this life ends in a batch, if it does, is in the log before it does."""
        try:
            return try_batch(self._roles, settings, groups, record.updates, prepared)
        except Exception as error:
            why = f"{type(error).__name__}: {error}"[:MOST_CHARACTERS]
            _log.error("batch cannot be trained", version=record.version, why=why)
            # Another rank's end says nothing about the batch.
            self._write(Ended(record.version, why, counts=not isinstance(error, RankError)))
            raise
        except (SystemExit, KeyboardInterrupt):
            self._write(Ended(record.version, "the trainer was told to stop", counts=False))
            raise

    def _not_finite(
        self, tried: Tried, anomaly: AnomalyError, record: StepRecord, groups: Batch, dropped: Batch
    ) -> Made:
        where = self._dump(record, groups, len(tried.steps), DropCause.ANOMALY, anomaly.what)
        self._skipped = 0 if tried.steps else self._skipped + 1
        if self._settings.trainer.on_anomaly == "stop" or self._skipped > MOST_SKIPPED:
            self._write(Ended(record.version, anomaly.what, counts=False))
            also = f" (the {self._skipped}th batch in a row)" if self._skipped > MOST_SKIPPED else ""
            raise AnomalyError(f"{anomaly.what}{also}; the batch is in {where or 'the stream'}", anomaly.remedy)
        _log.error("batch skipped", version=record.version, groups=len(dropped), why=anomaly.what, dump=str(where))
        tokens = tried.micro_batch_tokens
        return self._conclude(record, tried.steps, dropped, tokens, DropCause.ANOMALY, anomaly.what)

    def _conclude(
        self,
        record: StepRecord,
        steps: Sequence[Trained],
        dropped: Batch,
        micro_batch_tokens: int,
        cause: DropCause | None = None,
        why: str = "",
    ) -> Made:
        outcome = Outcome(
            version=record.version,
            made=len(steps),
            micro_batch_tokens=micro_batch_tokens,
            cause=cause or "",
            why=why,
            dropped=[member.entry for group in dropped for member in group.members],
        )
        # The ordinary one is what a repetition comes to by itself: it waits for no disk.
        expected = self.log.tunables_at(record.version).micro_batch_tokens
        durable = cause is not None or micro_batch_tokens != expected
        self.log.conclude(outcome)
        self._newest = self._journal.submit(self._write_after, self._newest, outcome, durable=durable)
        return Made(steps, outcome, dropped, self._newest)

    def _dump(self, record: StepRecord, groups: Batch, made: int, cause: DropCause, why: str) -> Path | None:
        report = DumpReport(
            run_id=self._run_id,
            version=record.version,
            updates=record.updates,
            made=made,
            cause=cause,
            why=why,
            trajectories=describe_batch(groups),
        )
        return dump(self._folder, self._roles, self._in_force, groups, report)

    def _write(self, line: Attempt | Ended | Skip) -> None:
        """Durable when this returns, and all that was written before."""
        self._wait(self._journal.submit(self.log.write, line))

    def _wait(self, written: Future[None]) -> None:
        self._background.result(written, "writing the step log", LOG_DEADLINE_S)

    def _write_after(self, before: Future[None] | None, outcome: Outcome, *, durable: bool) -> None:
        """On the log's thread. Raises what kept the batch's record from the disk: nobody may hear of its version then."""
        if before is not None:
            before.result(LOG_DEADLINE_S)
        self.log.write(outcome, durable=durable)

    def _make_durable(self, newest: Future[None] | None) -> None:
        if newest is not None:
            newest.result(LOG_DEADLINE_S)
        self.log.sync()


def drops_of(outcome: Outcome) -> dict[str, Drop]:
    """The entries that a batch's outcome dropped."""
    return {entry: Drop(entry, DropCause(outcome.cause), outcome.why) for entry in outcome.dropped}

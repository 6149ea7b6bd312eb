"""Training loop: take a batch, make its optimizer steps, publish the weights, write metrics and checkpoints.

take ──► record the batch (disk) ──► U steps from v ──► outcome (disk) ──► publish v + U ──► metrics ──► (checkpoint)
                                                           │                  │
                                                           ├── written ──► announce v + U      in the background
                                                           └── written ──► acknowledge the entries

Where the batch behind it is there as a batch begins to train, it is taken and packed meanwhile, on a thread of its own.

U is the batch's minibatches times its epochs (`services.policies.training.batch_shape`). Versions between are published to
nobody, and a restart begins where a batch does. What becomes of a batch that cannot be trained:
`trainer.checkpoint.attempts`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog

from services.config.settings import RunSettings
from services.observability.tracing import Tracing
from services.policies.admission import StoreUse
from services.policies.batching import Group
from services.policies.training.deadlines import batch_within
from services.policies.training.health import signs
from services.run_store.patience import REPEAT_WITHIN_S, repeated
from services.run_store.stream import TrajectoryReader, stream_order
from services.wire.rollout_api import Evaluation
from services.wire.run_metrics import StepMetrics, StepTimes
from services.wire.trajectory import Trajectory
from trainer.checkpoint.attempts import Attempts, Made, drops_of
from trainer.checkpoint.checkpoint import KEEP, good_versions
from trainer.checkpoint.log_lines import StepRecord
from trainer.checkpoint.saving import Saving
from trainer.checkpoint.step_log import StepLog
from trainer.data.stream_reader import Intake
from trainer.data.tally import Arrivals
from trainer.data.teacher import Teacher
from trainer.data.teacher_client import TeacherError
from trainer.io_loop import Background, Interrupt, WaitSign
from trainer.metrics.files import RunRecords
from trainer.metrics.rollouts import RolloutRecorder
from trainer.metrics.step import outcome, step_metrics
from trainer.model.anomaly import AnomalyError
from trainer.model.learner import Learner
from trainer.model.roles import Roles
from trainer.model.train_batch import PreparedBatch, Trained, prepare
from trainer.weights import WeightUpdates

ACKNOWLEDGE_DEADLINE_S = REPEAT_WITHIN_S + 30.0
PACK_DEADLINE_S = 600.0
_SLICE_S, _POST_AFTER_S, _REPOST_S = 0.1, 0.2, 1.0

_log = structlog.get_logger()


@dataclass(frozen=True)
class Identity:
    """Whose steps these are, and the settings their bytes depend on."""

    run_id: str
    fingerprint: str


@dataclass(frozen=True)
class Ahead:
    """A batch that was taken while the one before it trained. `prepared`: of `groups`, once it is done."""

    groups: list[Group[Trajectory]]
    prepared: Future[PreparedBatch]


@dataclass
class TrainingLoop:
    """Everything one step touches. `checkpoints`: their folder."""

    identity: Identity
    settings: RunSettings
    roles: Roles
    checkpoints: Path
    background: Background
    intake: Intake
    reader: TrajectoryReader
    updates: WeightUpdates
    attempts: Attempts
    records: RunRecords
    sign: WaitSign
    interrupt: Interrupt
    tracing: Tracing
    store: Callable[[], StoreUse | None]
    """What Redis held a moment ago; None where nothing bounds it."""
    evaluations: Callable[[], Sequence[Evaluation]]
    """Those made beside training, as far as they were told a moment ago."""
    files: ThreadPoolExecutor
    """One thread: metrics and rollouts."""
    saving: Saving
    packing: ThreadPoolExecutor
    """One thread: the next batch's advantages and packing."""
    teacher: Teacher | None = None
    recorder: RolloutRecorder | None = None
    """None where no rollouts are kept."""
    unknown_token: int | None = None
    """What the tokenizer puts for text that its vocabulary has not."""
    _settling: list[Future[None]] = field(default_factory=list)
    _ahead: Ahead | None = None
    _longest_wait_s: float = 0.0
    """For a batch."""
    _longest_batch_s: float = 0.0
    """Of those trained so far."""
    _line: StepMetrics | None = None
    """Of the step before."""

    @property
    def log(self) -> StepLog:
        return self.attempts.log

    @property
    def learner(self) -> Learner:
        return self.roles.learner

    def run(self) -> bool:
        """Train until `settings.steps` are made or an evaluation is good enough; False when an interrupt came first."""
        # A batch that was taken ahead is trained in any case: nobody else has it.
        while self.learner.steps_made < self.settings.steps and (self._ahead is not None or not self._good_enough):
            self.background.check()
            structlog.contextvars.bind_contextvars(version=self.learner.version)
            started = time.perf_counter()
            groups = self._next_batch()
            if groups is None or not self._hear_teacher(groups, self.learner.steps_made + 1, self._must_stop):
                return False
            before, version = self.learner.steps_made, self.learner.version
            try:
                with self.tracing.begin("trainer.batch") as span:
                    self._one_batch(groups, started)
                    span.note(version=self.learner.version, groups=len(groups))
            except AnomalyError:
                if self.learner.version == version:
                    self.saving.make_up()
                raise
            due = self.saving.after_steps(before, version)
            if due or (not self.saving.busy and (self._store_fills() or self.intake.wants_checkpoint())):
                self.checkpoint()
            self.saving.heed(self.evaluations())
            if self.interrupt:
                return False
        structlog.contextvars.bind_contextvars(version=self.learner.version)
        if self.learner.steps_made < self.settings.steps:
            wanted = self.settings.evaluation.stop_at
            _log.info("an evaluation found the success that was asked for: the run ends", evaluation_stop_at=wanted)
        self.saving.make_up()
        return True

    def repeat(self, record: StepRecord, groups: Sequence[Group[Trajectory]]) -> None:
        """A batch of an earlier incarnation once more, from its step log; nothing is published."""
        self._hear_teacher(groups, self.learner.steps_made + 1, lambda: False)
        self._write(self.attempts.repeat(record, groups), 0.0, 0.0)
        if self.teacher is not None:
            self.teacher.settled(record.entries)

    def checkpoint(self) -> Future[Path]:
        """Begin to write a checkpoint of the present version (`Saving.begin`); the stream is trimmed when it is there."""
        saved = self.saving.begin()
        self.background.spawn(self._trim_after(saved), "trim")
        return saved

    def finish_acknowledging(self) -> None:
        """Wait until every trained entry is settled as trained. Raises what went wrong, or DeadlineError."""
        for future in self._settling:
            self.background.result(future, "acknowledging trained trajectories", ACKNOWLEDGE_DEADLINE_S)
        self._settling.clear()

    def _store_fills(self) -> bool:
        """Whether a checkpoint is due early, to free what the stream holds of steps that are made."""
        use = self.store()
        return use is not None and use.filling

    @property
    def _good_enough(self) -> bool:
        return self.saving.good_enough(self.evaluations())

    def _updates(self, made: int = 0) -> int:
        """Optimizer steps of the next batch, after `made` more than there are: the last one may have fewer."""
        return min(self.settings.trainer.updates_per_batch, self.settings.steps - self.learner.steps_made - made)

    def _groups_of(self, updates: int) -> int:
        return self.settings.trainer.shape.of(updates).minibatches * self.settings.rollout.groups_per_step

    def _next_batch(self) -> list[Group[Trajectory]] | None:
        if self._ahead is not None:
            return self._ahead.groups
        first, updates, began = self.learner.steps_made + 1, self._updates(), time.monotonic()
        steps = f"step {first}" if updates == 1 else f"steps {first} to {first + updates - 1}"
        try:
            return self.intake.take(
                self._groups_of(updates),
                batch_within(self.settings.trainer.batch_timeout_s, self._longest_wait_s),
                post=lambda missing: self.sign.post(f"the batch of {steps}: {missing}"),
                stopped=self._must_stop,
            )
        finally:
            self._longest_wait_s = max(self._longest_wait_s, time.monotonic() - began)
            self.sign.clear()

    def _hear_teacher(self, groups: Sequence[Group[Trajectory]], step: int, stopped: Callable[[], bool]) -> bool:
        """Wait until the teacher has told all logprobs of a batch; False once `stopped` says so. Raises TeacherError."""
        teacher = self.teacher
        if teacher is None:
            return True
        asked, began, said_at = teacher.ask(groups), time.monotonic(), 0.0
        trajectories = sum(len(group.members) for group in groups)
        try:
            while True:
                with suppress(FutureTimeout):
                    asked.result(timeout=_SLICE_S)
                if asked.done():
                    asked.result()
                    return True
                if stopped():
                    return False
                now = time.monotonic()
                if now - began > _POST_AFTER_S and now - said_at > _REPOST_S:
                    missing = f"{teacher.missing(groups)} of {trajectories} trajectories"
                    self.sign.post(f"the teacher's logprobs of step {step}: {missing}")
                    said_at = now
        finally:
            self.sign.clear()

    def _take_ahead(self, record: StepRecord) -> Ahead | None:
        """The batch behind that of `record`, where it is there and can be packed before that one is trained."""
        updates = self._updates(record.updates)
        if updates <= 0 or not self.roles.prepares_ahead or self._good_enough:
            return None
        groups = self.intake.take_complete(self._groups_of(updates))
        if groups is None:
            return None
        settings, version = self.attempts.in_force, record.version + record.updates
        return Ahead(groups, self.packing.submit(prepare, self.roles, settings, groups, updates, version))

    def _must_stop(self) -> bool:
        self.background.check()
        return bool(self.interrupt)

    def _one_batch(self, groups: Sequence[Group[Trajectory]], started: float) -> None:
        ahead, prepared = self._ahead, None
        if ahead is not None:
            try:
                prepared = self.background.result(
                    ahead.prepared, "packing the next batch", batch_within(PACK_DEADLINE_S, self._longest_batch_s)
                )
            except TeacherError as error:
                # It was asked once more since (`_hear_teacher`), and has told all.
                _log.warning("the batch is packed again", why=str(error))
        taken = time.perf_counter()
        entries = [member.entry for group in groups for member in group.members]
        record = StepRecord(self.learner.version, entries, self._updates())
        self._ahead = self._take_ahead(record)
        began_ns = time.time_ns()
        made = self.attempts.train(record, groups, prepared)
        record_steps(self.tracing, made.steps, began_ns, wait_s=taken - started)
        ended = time.perf_counter()
        self._longest_batch_s = max(self._longest_batch_s, ended - taken)
        if made.steps:
            self.updates.publish(self.learner.version, self.learner.published(), made.logged)
        self._settling.append(self.background.spawn(self._settle(entries, made), "acknowledge"))
        self._settling = [future for future in self._settling if not future.done()]
        self._write(made.steps, taken - started, time.perf_counter() - ended)

    def _write(self, trained: Sequence[Trained], wait_s: float, publish_s: float) -> None:
        """A line for each step. The first has waited for the batch, the last is published."""
        for step in trained:
            arrivals = self.intake.take_arrivals()
            line = step_metrics(
                step=step.step,
                version=step.version,
                epoch=step.epoch,
                packed_ahead=step.packed_ahead,
                now=time.time(),
                batch=outcome(step.batch, self.unknown_token),
                tally=step.tally,
                rows_trained=step.rows,
                learning_rate=step.learning_rate,
                statistics=step.statistics,
                credited=step.credited,
                valued=step.valued,
                used=step.used,
                times=self._times(
                    step,
                    wait_s if step is trained[0] else 0.0,
                    publish_s if step is trained[-1] else 0.0,
                    arrivals,
                ),
                arrivals=arrivals,
                commits=self.updates.committed,
                update=self.updates.newest_state,
            )
            self._line = line = self._watched(line)
            self.background.watch(self.files.submit(self._to_files, line, step), "metrics")

    def _to_files(self, line: StepMetrics, step: Trained) -> None:
        """On the files' thread. Who reads a step's figures finds its rollouts."""
        if self.recorder is not None:
            self.recorder.keep(step, line.time)
        self.records.write(line)

    def _watched(self, line: StepMetrics) -> StepMetrics:
        """With the signs that the run cannot learn; each is logged when it comes up."""
        found = signs(self._line, line, self.settings.trainer.clip_grad_norm)
        known = {} if self._line is None else self._line.warnings
        for kind, words in found.items():
            if kind not in known:
                _log.warning("this run may not learn", sign=kind, step=line.step, why=words)
        return replace(line, warnings=found) if found else line

    def _times(self, step: Trained, wait_s: float, publish_s: float, arrivals: Arrivals) -> StepTimes:
        update = self.updates.newest
        engines = update.engines if update is not None else []
        return StepTimes(
            wait_ms=wait_s * 1e3,
            pack_ms=step.pack_s * 1e3,
            train_ms=step.train_s * 1e3,
            publish_ms=publish_s * 1e3,
            step_ms=(wait_s + step.pack_s + step.train_s + publish_s) * 1e3,
            stream_ms=arrivals.busy_s * 1e3,
            http_ms=self.updates.call_overhead_ms,
            commit_ms=(update and update.publish_to_commit_ms) or 0.0,
            stage_ms=max((engine.stage_ms for engine in engines), default=0.0),
            flip_ms=max((engine.flip_ms for engine in engines), default=0.0),
        )

    async def _settle(self, entries: list[str], made: Made) -> None:
        await asyncio.wrap_future(made.logged)
        drops = drops_of(made.outcome)
        if drops:
            await self.intake.settle_dropped([group.group for group in made.dropped], drops)
        await self.intake.settle_trained([entry for entry in entries if entry not in drops])

    async def _trim_after(self, saved: Future[Path]) -> None:
        await asyncio.wrap_future(saved)
        kept = await trim(self.reader, self.log, self.checkpoints)
        if kept is not None:
            self.intake.forget_before(kept)


async def trim(reader: TrajectoryReader, log: StepLog, checkpoints: Path) -> str | None:
    """Delete entries that no good checkpoint needs any more: a restart begins at the older of two, at worst.

    While there are fewer it may have to begin where the run did. Returns the oldest entry that is kept; None where nothing
    was to be deleted.
    """
    good = await asyncio.to_thread(good_versions, checkpoints)
    if len(good) < KEEP:
        return None
    # Before what is needed is computed: an entry of a batch that begins meanwhile is still pending here.
    pending = await repeated(reader.oldest_pending, "finding the oldest pending entry")
    log.forget_before(good[-KEEP])
    needed = [entry for record in log.records for entry in record.entries]
    if not needed:
        return None
    keep = min([*needed, *([pending] if pending else [])], key=stream_order)
    await repeated(lambda: reader.trim_before(keep), "trimming the stream")
    return keep


NAME = "trainer.step"


def record_steps(tracing: Tracing, trained: Sequence[Trained], began_ns: int, *, wait_s: float) -> None:
    """Optimizer steps as spans below the current one, recorded after the batch so that they cost it no time.

    trainer.batch ──┬── trainer.step v + 1 ──links──► the traces of the groups that it consumed
                    ├── trainer.step v + 2 ──links──► …
                    └── trainer.update v + 2 ──► the bus ──► each engine's commit

    `began_ns`: when training began; `wait_s`: how long the batch had been waited for.
    """
    if not tracing.on:
        return
    for step in trained:
        ended_ns = began_ns + round((step.pack_s + step.train_s) * 1e9)
        # Siblings that were opened together have one context; each is linked once.
        links = {member.payload.trace for group in step.groups for member in group.members}
        tracing.record(
            NAME,
            began_ns,
            ended_ns,
            links=sorted(links),
            version=step.version,
            groups=len(step.groups),
            trajectories=sum(len(group.members) for group in step.groups),
            rows=step.rows,
            learning_rate=step.learning_rate,
            wait_ms=wait_s * 1e3,
        )
        began_ns, wait_s = ended_ns, 0.0

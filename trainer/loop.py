"""The loop: next batch → step → publish → log.

take ──► record the batch (disk) ──► pack, train ──► publish v + 1 ──► metrics ──► (checkpoint)
                │                                        │
                └── durable ──► announce v + 1 ◄─────────┘      in the background
                       └──────► acknowledge the entries
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from services.policies.batching import Group
from services.settings import RunSettings
from services.stream import TrajectoryReader
from services.wire.trajectory import Trajectory
from trainer.arrivals import Arrivals
from trainer.background import Background
from trainer.checkpoint import Snapshot, save, snapshot, versions
from trainer.critic import ValueStatistics
from trainer.folders import writing
from trainer.intake import Intake
from trainer.interrupt import Interrupt
from trainer.learner import Learner
from trainer.metrics import StepMetrics, StepTimes, outcome, step_metrics
from trainer.packing import pack
from trainer.roles import Roles
from trainer.rows import rows_of
from trainer.run_records import RunRecords
from trainer.step_log import StepLog, StepRecord
from trainer.wait_sign import WaitSign
from trainer.weights import WeightUpdates

ACKNOWLEDGE_DEADLINE_S = 30.0


@dataclass(frozen=True)
class Identity:
    """Whose steps these are, and the settings their bytes depend on."""

    run_id: str
    fingerprint: str


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
    log: StepLog
    records: RunRecords
    sign: WaitSign
    interrupt: Interrupt
    journal: ThreadPoolExecutor
    """One thread: records of the step log become durable in order."""
    files: ThreadPoolExecutor
    """One thread: metrics, samples and checkpoints."""
    _settling: list[Future[None]] = field(default_factory=list)

    @property
    def learner(self) -> Learner:
        return self.roles.learner

    def run(self) -> bool:
        """Train until `settings.steps`; False when an interrupt came first."""
        while self.learner.version < self.settings.steps:
            self.background.check()
            started = time.perf_counter()
            groups = self._next_batch()
            if groups is None:
                return False
            self._one_step(groups, started)
            if self.learner.version % self.settings.trainer.checkpoint_every == 0:
                self.checkpoint()
            if self.interrupt:
                return False
        return True

    def repeat(self, groups: Sequence[Group[Trajectory]]) -> None:
        """A step of an earlier life once more, from its step log; nothing is published."""
        started = time.perf_counter()
        metrics = self._train(groups, started, started)
        self._write(metrics(time.perf_counter()), groups)

    def checkpoint(self) -> Future[Path]:
        """Write a checkpoint of the present version, in the background."""
        taken = snapshot(self.roles, self.identity.run_id, self.identity.fingerprint)
        saved = self.files.submit(self._save, taken)
        self.background.watch(saved, "checkpoint")
        self.background.spawn(self._trim_after(saved), "trim")
        return saved

    def finish_acknowledging(self) -> None:
        """Wait until every trained entry is settled as trained. Raises what went wrong, or DeadlineError."""
        for future in self._settling:
            self.background.result(future, "acknowledging trained trajectories", ACKNOWLEDGE_DEADLINE_S)
        self._settling.clear()

    def _next_batch(self) -> list[Group[Trajectory]] | None:
        trainer = self.settings.trainer
        step = self.learner.version + 1
        try:
            return self.intake.take(
                self.settings.rollout.groups_per_step,
                trainer.batch_timeout_s,
                post=lambda missing: self.sign.post(f"the batch of step {step}: {missing}"),
                stopped=self._must_stop,
            )
        finally:
            self.sign.clear()

    def _must_stop(self) -> bool:
        self.background.check()
        return bool(self.interrupt)

    def _one_step(self, groups: Sequence[Group[Trajectory]], started: float) -> None:
        taken = time.perf_counter()
        entries = [member.entry for group in groups for member in group.members]
        record = StepRecord(self.learner.version, entries)
        self.log.records.append(record)
        durable = self.journal.submit(self.log.append, record)
        metrics = self._train(groups, started, taken)
        trained = time.perf_counter()
        self.updates.publish(self.learner.version, self.learner.weights(), durable)
        self._settling.append(self.background.spawn(self._settle(entries, durable), "acknowledge"))
        self._settling = [future for future in self._settling if not future.done()]
        self._write(metrics(trained), groups)

    def _train(
        self, groups: Sequence[Group[Trajectory]], started: float, taken: float
    ) -> Callable[[float], StepMetrics]:
        rate = self.learner.learning_rate(self.learner.version)
        crediting, critic = self.roles.crediting, self.roles.critic
        credits, credited = crediting.of(groups)
        rows, tally = rows_of(groups, self.learner.version, self.settings.k, credits, skip_idle=self.roles.skips_idle)
        packed = pack(rows, tally, self.settings.trainer.micro_batch_tokens, self.learner.model.device)
        ready = time.perf_counter()
        statistics = self.learner.step(packed)
        valued = ValueStatistics() if critic is None else critic.step(packed)
        crediting.learn(groups)

        def finished(trained: float) -> StepMetrics:
            arrivals = self.intake.take_arrivals()
            return step_metrics(
                version=self.learner.version,
                now=time.time(),
                batch=outcome(groups),
                tally=tally,
                rows_trained=sum(micro.segments for micro in packed.micro_batches),
                learning_rate=rate,
                statistics=statistics,
                credited=credited,
                valued=valued,
                times=self._times(started, taken, ready, trained, arrivals),
                arrivals=arrivals,
                commits=self.updates.committed,
                update=self.updates.newest_state,
            )

        return finished

    def _times(self, started: float, taken: float, ready: float, trained: float, arrivals: Arrivals) -> StepTimes:
        now, update = time.perf_counter(), self.updates.newest
        engines = update.engines if update is not None else []
        return StepTimes(
            wait_ms=(taken - started) * 1e3,
            pack_ms=(ready - taken) * 1e3,
            train_ms=(trained - ready) * 1e3,
            publish_ms=(now - trained) * 1e3,
            step_ms=(now - started) * 1e3,
            stream_ms=arrivals.busy_s * 1e3,
            http_ms=self.updates.call_overhead_ms,
            commit_ms=(update and update.publish_to_commit_ms) or 0.0,
            stage_ms=max((engine.stage_ms for engine in engines), default=0.0),
            flip_ms=max((engine.flip_ms for engine in engines), default=0.0),
        )

    def _write(self, metrics: StepMetrics, groups: Sequence[Group[Trajectory]]) -> None:
        self.background.watch(self.files.submit(self.records.write, metrics, groups), "metrics")

    def _save(self, taken: Snapshot) -> Path:
        with writing(self.checkpoints):
            return save(self.checkpoints, taken)

    async def _settle(self, entries: list[str], durable: Future[None]) -> None:
        await asyncio.wrap_future(durable)
        await self.intake.settle_trained(entries)

    async def _trim_after(self, saved: Future[Path]) -> None:
        """Delete entries that no checkpoint needs any more: a restart begins at the older of the two, at worst."""
        await asyncio.wrap_future(saved)
        oldest = versions(self.checkpoints)[0]
        self.log.forget_before(oldest)
        needed = [entry for record in self.log.records for entry in record.entries]
        pending = await self.reader.oldest_pending()
        if needed:
            keep = min([*needed, *([pending] if pending else [])], key=_stream_order)
            await self.reader.trim_before(keep)


def _stream_order(stream_id: str) -> tuple[int, int]:
    milliseconds, _, sequence = stream_id.partition("-")
    return int(milliseconds), int(sequence or 0)

"""When checkpoints are written, beside training: on a thread of their own, one at a time, from one copy of the state.

step ──► due? ──► none being written? ──► copied over the last copy ──► (training goes on) ──► step log durable ──► written
                          └── one is: the next step asks again, or the run's end
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from services.config.settings import EvaluationSettings
from services.host.files import writing
from services.policies.training.deadlines import within
from services.wire.rollout_api import Evaluation
from trainer.checkpoint.attempts import LOG_DEADLINE_S
from trainer.checkpoint.checkpoint import Snapshot, save, save_part, take, writers_of
from trainer.checkpoint.evaluated import heed, keep_for_evaluation
from trainer.io_loop import Background
from trainer.model.roles import Roles

SAVE_LEAST_S = 3600.0

_log = structlog.get_logger()
Save = Callable[[Path, Snapshot], Path]


@dataclass
class Saving:
    """The checkpoints of a run. For the training thread.

    `every`: optimizer steps between two. `logged`: of the step log that leads to the present version.
    """

    folder: Path
    evaluations_file: Path
    roles: Roles
    run_id: str
    fingerprint: str
    every: int
    evaluation: EvaluationSettings
    logged: Callable[[], Future[None]]
    thread: Executor
    background: Background
    save: Save = save
    _written: Future[Path] | None = None
    _copy: Snapshot | None = None
    """Of the last checkpoint; the next one is copied over it, once that is written."""
    _due: bool = False
    _to_be_evaluated: bool = False
    """A version that is due for evaluation has no checkpoint yet."""
    _heeded: Sequence[Evaluation] = field(default_factory=tuple)

    @property
    def _written_within(self) -> float:
        """Seconds that a checkpoint may take."""
        return within(SAVE_LEAST_S, 0 if self._copy is None else self._copy.nbytes)

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._written is not None and not self._written.done()

    def after_steps(self, steps: int, version: int) -> bool:
        """Whether a checkpoint is due, and can be begun. `steps`, `version`: those before the steps just made."""
        learner, chosen = self.roles.learner, self.evaluation
        if chosen.keep_best and chosen.every and learner.version // chosen.every > version // chosen.every:
            # It will be evaluated, and may be the best.
            self._due = self._to_be_evaluated = True
        self._due = self._due or learner.steps_made // self.every > steps // self.every
        return self._due and not self.busy

    def begin(self) -> Future[Path]:
        """Write a checkpoint of the present version, in the background, once the log that leads to it is durable.

        Waits for one that is being written: there is one copy of the state at most.
        """
        if self._written is not None:
            self.background.result(self._written, "writing the checkpoint before", self._written_within)
        self._copy = taken = take(self.folder, self.roles, self.run_id, self.fingerprint, self._copy)
        self._written = written = self.thread.submit(self._write, self.logged(), taken, self._to_be_evaluated)
        self._due = self._to_be_evaluated = False
        self.background.watch(written, "checkpoint")
        return written

    def make_up(self) -> None:
        """The run ends here: wait for a checkpoint that is being written, and write one that was put off for it."""
        if self._due:
            self.begin()
        if self._written is not None:
            self.background.result(self._written, "writing the last checkpoint", self._written_within)

    def _write(self, logged: Future[None], taken: Snapshot, to_be_evaluated: bool) -> Path:
        """Raises what kept the log from being durable."""
        logged.result(LOG_DEADLINE_S)
        with writing(self.folder):
            writers = writers_of(self.roles.ranks)
            saved = self.save(self.folder, taken) if writers is None else save_part(self.folder, taken, writers)
            if to_be_evaluated:
                keep_for_evaluation(self.folder, taken.meta.version)
            return saved

    def heed(self, told: Sequence[Evaluation]) -> None:
        """Have evaluations that are new written down, and checkpoints let go of that were kept for them."""
        if len(told) > len(self._heeded):
            self._heeded = told
            future = self.thread.submit(heed, self.folder, self.evaluations_file, told, self.evaluation.every)
            self.background.watch(future, "evaluations")

    def heed_last(self, told: Sequence[Evaluation]) -> None:
        """At the run's end, and wait for it: of the checkpoints that were kept for an evaluation the best stays."""
        every = self.evaluation.every
        self.thread.submit(heed, self.folder, self.evaluations_file, told, every, last=True).result(
            self._written_within
        )

    def good_enough(self, told: Sequence[Evaluation]) -> bool:
        """Whether one has found the success that the run is to end with."""
        wanted = self.evaluation.stop_at
        return wanted is not None and any(each.success >= wanted for each in told)

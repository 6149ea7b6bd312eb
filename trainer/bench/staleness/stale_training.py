"""One run of the staleness table: the trainer's own step on tokens that are K optimizer steps old.

    weights of the last K + 1 versions ──oldest──► 16 groups of 8 answers ──► rows ──► micro-batches ──► Learner.steps
             ▲                                                                                              │
             └──────────────────────────────────── version + 1 ─────────────────────────────────────────────┘

Where a batch has several steps, all its parts are drawn first, each by the policy of K steps before its own step.

Nothing is random but the warm start and the draws, both by the run's seed: all runs of a seed meet the same problems in the
same order. Recipe: `TrainerSettings` and `RolloutSettings` as they are by default, but for the loss.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from services.settings import RolloutSettings
from services.wire.demonstrations import Question
from trainer.assembly import load_policy
from trainer.bench.staleness.arms import ARMS
from trainer.bench.staleness.lagged import LaggedPolicy
from trainer.bench.staleness.results import Outcome, StaleRun
from trainer.bench.staleness.rollouts import Rollouts
from trainer.bench.staleness.warm_starts import held_out_in, model_in, problems_in
from trainer.learner import Learner
from trainer.packing import PackedBatch, pack
from trainer.recipe import read_checks
from trainer.rows import rows_of
from trainer.sampling_check import sampled_accuracy

ROLLOUT = RolloutSettings()


def train_stale(run: StaleRun, folder: Path, versions: dict[str, str]) -> Outcome:
    """Train `run` to its end and judge the trainer's policy.

    Raises UsageError for a `folder` that is not as `trainer.bench.staleness.warm_starts` makes it.
    """
    started = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(model_in(folder))
    training = StaleTraining(run, load_policy(model_in(folder)), tokenizer, read_checks(problems_in(folder)))
    while training.version < run.updates:
        training.batch()
    held_out = read_checks(held_out_in(folder))
    last = -max(1, run.updates // 5)
    effective = [share for share in training.effective_samples[last:] if share is not None]
    return Outcome(
        run=run,
        greedy=training.accuracy(held_out, None),
        sampled=training.accuracy(held_out, torch.Generator().manual_seed(run.seed)),
        behaviour_success=fmean(training.success[last:]),
        mean_staleness=fmean(training.staleness),
        largest_staleness=training.largest_staleness,
        effective_samples=fmean(effective) if effective else None,
        seconds=time.monotonic() - started,
        formula=ARMS[run.correction].formula(run.k),
        versions=versions,
    )


class StaleTraining:
    """A learner and the policy of K steps before, which draws what it learns from. Lists hold a value a step."""

    def __init__(
        self, run: StaleRun, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, problems: Sequence[Question]
    ) -> None:
        self._run = run
        self._settings = ARMS[run.correction].settings
        self._behaviour = LaggedPolicy(model, run.k)
        self._learner = Learner(model, self._settings)
        self._tokenizer = tokenizer
        self._problems = problems
        generator = torch.Generator().manual_seed(run.seed)
        self._rollouts = Rollouts(tokenizer, ROLLOUT.group_size, ROLLOUT.max_tokens, generator)
        self.success: list[float] = []
        self.staleness: list[float] = []
        self.effective_samples: list[float | None] = []
        self.largest_staleness = 0

    @property
    def version(self) -> int:
        return self._learner.version

    def batch(self) -> None:
        """The optimizer steps of one batch, each on groups of its own that the policy of K steps before that step draws."""
        steps = min(ARMS[self._run.correction].updates(self._run.k), self._run.updates - self.version)
        parts = [self._part(version) for version in range(self.version, self.version + steps)]
        for statistics in self._learner.steps(parts):
            self._behaviour.keep(self.version, self._learner.model)
            self.effective_samples.append(statistics.effective_samples)

    def _part(self, version: int) -> PackedBatch:
        first = version * ROLLOUT.groups_per_step
        drawn_by, policy = self._behaviour.before(version)
        groups = self._rollouts.play(policy, drawn_by, self._problems[first : first + ROLLOUT.groups_per_step], first)
        rows, tally = rows_of(groups, version, self._run.k)
        self.success.append(fmean(member.payload.reward for group in groups for member in group.members))
        self.staleness.append(tally.mean)
        self.largest_staleness = max(self.largest_staleness, tally.largest)
        return pack(rows, tally, self._settings.micro_batch_tokens)

    def accuracy(self, questions: Sequence[Question], generator: torch.Generator | None) -> float:
        """Of the trainer's own policy, one answer each: sampled, or greedy without a `generator`."""
        return sampled_accuracy(self._learner.model, self._tokenizer, questions, ROLLOUT.max_tokens, generator)

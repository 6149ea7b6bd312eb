"""One run of the staleness table: the trainer's own step on tokens that are K optimizer steps old.

    weights of the last K + 1 versions ──oldest──► 16 groups of 8 answers ──► train_batch: credit, window, packing, steps
             ▲                                                                            │
             └───────────────────────────── version + 1 ──────────────────────────────────┘

Where a batch has several steps, all its parts are sampled first, each by the policy of K steps before its own step.

Nothing is random but the warm start and the samples, both by the run's seed: all runs of a seed meet the same problems
in the same order. Recipe: `RunSettings` as they are by default, but for K and the loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.staleness.results import ARMS, Outcome, StaleRun, held_out_in, model_in, problems_in
from services.config.settings import RolloutSettings, RunSettings
from services.policies.batching import Group, Member
from services.wire.packed import pack_logprobs, pack_mask, pack_tokens
from services.wire.sampling import SamplingParams
from services.wire.tasks.demonstrations import Question
from services.wire.trajectory import Segment, Trajectory, VersionSpan
from trainer.checkpoint.model_folder import load_policy
from trainer.model.roles import make_roles
from trainer.model.train_batch import train_batch
from trainer.sft.accuracy import Sampled, is_right, sample_answers, sampled_accuracy
from trainer.sft.data import read_checks

ROLLOUT = RolloutSettings()


def train_stale(run: StaleRun, folder: Path, versions: dict[str, str]) -> Outcome:
    """Train `run` to its end and judge the trainer's policy.

    Raises UsageError for a `folder` that is not as `benchmarks.staleness.results` makes it.
    """
    started = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(model_in(folder))
    training = StaleTraining(run, lambda: load_policy(model_in(folder)), tokenizer, read_checks(problems_in(folder)))
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
    """A trainer and the policy of K steps before, which generates what it learns from. Lists hold a value a step."""

    def __init__(
        self,
        run: StaleRun,
        load: Callable[[], PreTrainedModel],
        tokenizer: PreTrainedTokenizerBase,
        problems: Sequence[Question],
    ) -> None:
        """`load`: a fresh copy of the warm-started policy."""
        self._settings = RunSettings(
            seed=run.seed, steps=run.updates, k=run.k, rollout=ROLLOUT, trainer=ARMS[run.correction].settings(run.k)
        )
        self._roles = make_roles(load, self._settings, 0)
        self._behaviour = LaggedPolicy(load(), run.k)
        # Inside a batch nobody else sees a version: it is taken where the optimizer makes it.
        self._roles.learner.optimizer.register_step_post_hook(self._keep)
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
        return self._roles.learner.version

    def batch(self) -> None:
        """The optimizer steps of one batch, each on groups of its own, by the policy of K steps before that step."""
        updates = min(self._settings.trainer.updates_per_batch, self._settings.steps - self.version)
        groups = [group for step in range(updates) for group in self._part(self.version + step)]
        for trained in train_batch(self._roles, self._settings, groups, updates):
            self.staleness.append(trained.tally.mean)
            self.largest_staleness = max(self.largest_staleness, trained.tally.largest)
            self.effective_samples.append(trained.statistics.effective_samples)

    def _part(self, version: int) -> list[Group[Trajectory]]:
        first = version * ROLLOUT.groups_per_step
        sampled_by, policy = self._behaviour.before(version)
        groups = self._rollouts.play(policy, sampled_by, self._problems[first : first + ROLLOUT.groups_per_step], first)
        self.success.append(fmean(member.payload.reward for group in groups for member in group.members))
        return groups

    def _keep(self, *_: object) -> None:
        self._behaviour.keep(self.version, self._roles.learner.model)

    def accuracy(self, questions: Sequence[Question], generator: torch.Generator | None) -> float:
        """Of the trainer's own policy, one answer each: sampled, or greedy without a `generator`."""
        return sampled_accuracy(self._roles.learner.model, self._tokenizer, questions, ROLLOUT.max_tokens, generator)


_RUN = "staleness"


class Rollouts:
    """Samples answers in process, as trajectories like those of a rollout server: `group_size` to a problem."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, group_size: int, max_tokens: int, generator: torch.Generator
    ) -> None:
        self._tokenizer = tokenizer
        self._group_size = group_size
        self._sampling = SamplingParams(max_tokens=max_tokens)
        self._generator = generator

    def play(
        self, model: PreTrainedModel, version: int, questions: Sequence[Question], first_ordinal: int
    ) -> list[Group[Trajectory]]:
        """A group a question, sampled by `model`, which is policy `version`. Prompts are of one length."""
        prompts = [self._tokenizer.encode(question.prompt, add_special_tokens=False) for question in questions]
        repeated = torch.tensor(prompts).repeat_interleave(self._group_size, dim=0)
        end = int(self._tokenizer.eos_token_id)
        answers = sample_answers(model, repeated, end, self._sampling.max_tokens, self._generator)
        groups = []
        for number, (question, prompt) in enumerate(zip(questions, prompts, strict=True)):
            ordinal = first_ordinal + number
            siblings = answers[number * self._group_size : (number + 1) * self._group_size]
            members = [
                self._member(
                    ordinal, index, _segment(prompt, answer, version), is_right(self._tokenizer, question, answer)
                )
                for index, answer in enumerate(siblings)
            ]
            groups.append(Group(str(ordinal), ordinal, members))
        return groups

    def _member(self, ordinal: int, index: int, segment: Segment, right: bool) -> Member[Trajectory]:
        trajectory = Trajectory(
            run_id=_RUN,
            trajectory_id=f"{ordinal}/{index}",
            group_id=str(ordinal),
            group_ordinal=ordinal,
            group_size=self._group_size,
            member=index,
            task="running-sums",
            segments=[segment],
            reward=float(right),
            samplings=[self._sampling],
            server_id="in process",
            opened_at=0.0,
            finished_at=0.0,
        )
        return Member(trajectory.trajectory_id, str(ordinal), ordinal, self._group_size, index, trajectory)


def _segment(prompt: Sequence[int], answer: Sampled, version: int) -> Segment:
    length = len(answer.tokens)
    return Segment(
        token_ids=pack_tokens([*prompt, *answer.tokens]),
        loss_mask=pack_mask([0] * len(prompt) + [1] * length),
        logprobs=pack_logprobs([0.0] * len(prompt) + answer.logprobs),
        version_spans=[VersionSpan(len(prompt), length, version)],
    )


class LaggedPolicy:
    """The behaviour policy: that under training as it was `k` steps ago. Keeps the last `k` + 1 versions; owns `model`."""

    def __init__(self, model: PreTrainedModel, k: int) -> None:
        self._model = model.eval()
        self._k = k
        self._weights: dict[int, dict[str, Tensor]] = {}
        self.keep(0, model)

    def keep(self, version: int, model: PreTrainedModel) -> None:
        """`model` is version `version` now."""
        self._weights[version] = {name: weight.detach().clone() for name, weight in model.state_dict().items()}
        self._weights.pop(version - self._k - 1, None)

    def before(self, version: int) -> tuple[int, PreTrainedModel]:
        """The policy `k` steps before `version`, or the first one; its version and itself, until the next call."""
        lagged = max(0, version - self._k)
        self._model.load_state_dict(self._weights[lagged])
        return lagged, self._model

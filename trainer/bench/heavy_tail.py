"""The batch that the trainer's step is measured on: groups of answers whose lengths are log-normal, cut at the longest.

Most answers are short and a few are long, as those of a reasoning policy are: padded to the longest, most of a batch is
padding. Nothing else of it matters: tokens and logprobs are random, and half of each group is right.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from services.policies.batching import Group, Member
from services.wire.packed import pack_logprobs, pack_mask, pack_tokens
from services.wire.sampling import SamplingParams
from services.wire.trajectory import Segment, Trajectory, VersionSpan

PROMPT_TOKENS = 32
_FIRST_TOKEN = 2
"""Behind padding and the end."""


class Answer(msgspec.Struct, frozen=True):
    """A prompt and what was drawn after it; `advantage`: of all its tokens."""

    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    advantage: float


@dataclass(frozen=True)
class HeavyTail:
    """`median`, `sigma`, `longest`: of the answers' lengths in tokens. `vocabulary`: how many tokens there are."""

    groups: int = 8
    group_size: int = 8
    median: float = 128.0
    sigma: float = 0.8
    longest: int = 1024
    vocabulary: int = 60

    def answers(self, seed: int) -> list[Answer]:
        """Group by group; the same seed gives the same ones."""
        numbers = np.random.default_rng(seed)
        answers = []
        for _ in range(self.groups):
            prompt = self._tokens(numbers, PROMPT_TOKENS)
            for member in range(self.group_size):
                length = int(np.clip(numbers.lognormal(math.log(self.median), self.sigma), 1, self.longest))
                # Near those of a policy that knows nothing, which a fresh one is.
                logprobs = -math.log(self.vocabulary) + 0.1 * numbers.standard_normal(length)
                advantage = 1.0 if member % 2 else -1.0
                answers.append(Answer(prompt, self._tokens(numbers, length), logprobs.tolist(), advantage))
        return answers

    def _tokens(self, numbers: np.random.Generator, count: int) -> list[int]:
        drawn: list[int] = numbers.integers(_FIRST_TOKEN, self.vocabulary, count).tolist()
        return drawn


def as_groups(answers: Sequence[Answer], group_size: int) -> list[Group[Trajectory]]:
    """What the trainer's intake would hand out, drawn by version 0."""
    return [
        Group(
            f"g{ordinal}",
            ordinal,
            [
                _member(answer, ordinal, index, group_size)
                for index, answer in enumerate(answers[start : start + group_size])
            ],
        )
        for ordinal, start in enumerate(range(0, len(answers), group_size))
    ]


def _member(answer: Answer, ordinal: int, index: int, size: int) -> Member[Trajectory]:
    group, asked, drawn = f"g{ordinal}", len(answer.prompt), len(answer.completion)
    segment = Segment(
        token_ids=pack_tokens([*answer.prompt, *answer.completion]),
        loss_mask=pack_mask([0] * asked + [1] * drawn),
        logprobs=pack_logprobs([0.0] * asked + answer.logprobs),
        version_spans=[VersionSpan(asked, drawn, 0)],
    )
    trajectory = Trajectory(
        run_id="bench",
        trajectory_id=f"{group}/{index}",
        group_id=group,
        group_ordinal=ordinal,
        group_size=size,
        member=index,
        task="bench",
        segments=[segment],
        reward=float(answer.advantage > 0),
        reward_components={},
        samplings=[SamplingParams(max_tokens=drawn)],
        server_id="bench",
        opened_at=0.0,
        finished_at=0.0,
    )
    return Member(f"{ordinal}-{index}", group, ordinal, size, index, trajectory)

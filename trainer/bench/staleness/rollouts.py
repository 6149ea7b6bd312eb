"""Rollouts of the staleness table: answers as the trajectories that a rollout server would have written of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from services.policies.batching import Group, Member
from services.wire.demonstrations import Question
from services.wire.packed import pack_logprobs, pack_mask, pack_tokens
from services.wire.sampling import SamplingParams
from services.wire.trajectory import Segment, Trajectory, VersionSpan
from trainer.drawing import Drawn, draw
from trainer.sampling_check import is_right

_RUN = "staleness"


class Rollouts:
    """Plays problems, a group of `group_size` answers of at most `max_tokens` tokens to each."""

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
        """A group a question, drawn by `model`, which is policy `version`. Prompts are of one length."""
        prompts = [self._tokenizer.encode(question.prompt, add_special_tokens=False) for question in questions]
        repeated = torch.tensor(prompts).repeat_interleave(self._group_size, dim=0)
        end = int(self._tokenizer.eos_token_id)
        answers = draw(model, repeated, end, self._sampling.max_tokens, self._generator)
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


def _segment(prompt: Sequence[int], answer: Drawn, version: int) -> Segment:
    length = len(answer.tokens)
    return Segment(
        token_ids=pack_tokens([*prompt, *answer.tokens]),
        loss_mask=pack_mask([0] * len(prompt) + [1] * length),
        logprobs=pack_logprobs([0.0] * len(prompt) + answer.logprobs),
        version_spans=[VersionSpan(len(prompt), length, version)],
    )

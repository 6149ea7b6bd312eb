"""A task of one token, played by the policy itself: ten of 64 tokens are right answers."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from services.wire.sampling import SamplingParams
from services.wire.trajectory import Trajectory
from tests.support.trajectories import a_rollout, a_segment

WANTED = range(2, 12)


def play(
    model: PreTrainedModel, step: int, version: int, generator: torch.Generator, *, greedy_baseline: bool = False
) -> list[Trajectory]:
    """Four prompts, eight one-token answers to each; the reward says whether the answer is a wanted one.

    `greedy_baseline`: the first answer to each prompt is the likeliest.
    """
    rollouts = []
    for number in range(4):
        prompt = [20 + number, 30 + step % 4]
        with torch.inference_mode():
            logprobs = model(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        sampled = torch.multinomial(logprobs.exp(), 8, replacement=True, generator=generator).tolist()
        if greedy_baseline:
            sampled[0] = int(logprobs.argmax())
        for member, token in enumerate(sampled):
            rollouts.append(
                a_rollout(
                    [a_segment(prompt, [token], [float(logprobs[token])], [version])],
                    float(token in WANTED),
                    group=f"{step}/{number}",
                    ordinal=4 * step + number,
                    size=8,
                    member=member,
                    sampling=SamplingParams(max_tokens=1, temperature=float(member > 0 or not greedy_baseline)),
                )
            )
    return rollouts

"""Trajectories made by hand: what the trainer's tests feed in."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from services.policies.batching import Group, Member
from services.wire.packed import pack_logprobs, pack_mask, pack_tokens
from services.wire.sampling import SamplingParams
from services.wire.trajectory import Segment, Trajectory, VersionSpan


def a_segment(
    prompt: Sequence[int], sampled: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]
) -> Segment:
    """`sampled` after `prompt`; `versions` gives each sampled token's."""
    spans: list[VersionSpan] = []
    for offset, version in enumerate(versions):
        start = len(prompt) + offset
        if spans and spans[-1].version == version:
            spans[-1] = VersionSpan(spans[-1].start, spans[-1].length + 1, version)
        else:
            spans.append(VersionSpan(start, 1, version))
    return Segment(
        token_ids=pack_tokens([*prompt, *sampled]),
        loss_mask=pack_mask([0] * len(prompt) + [1] * len(sampled)),
        logprobs=pack_logprobs([0.0] * len(prompt) + list(logprobs)),
        version_spans=spans,
    )


def a_rollout(
    segments: Sequence[Segment],
    reward: float,
    *,
    run_id: str = "r",
    group: str = "g0",
    ordinal: int = 0,
    size: int = 4,
    member: int = 0,
    sampling: SamplingParams | None = None,
) -> Trajectory:
    return Trajectory(
        run_id=run_id,
        trajectory_id=f"{group}/{member}",
        group_id=group,
        group_ordinal=ordinal,
        group_size=size,
        member=member,
        task="test",
        segments=list(segments),
        reward=reward,
        reward_components={"success": float(reward > 0)},
        samplings=[sampling or SamplingParams(max_tokens=16)],
        server_id="s0",
        opened_at=1.0,
        finished_at=2.0,
    )


def group_of(trajectories: Sequence[Trajectory]) -> Group[Trajectory]:
    first = trajectories[0]
    members = [
        Member(f"{one.group_id}-{one.member}", one.group_id, one.group_ordinal, one.group_size, one.member, one)
        for one in trajectories
    ]
    return Group(first.group_id, first.group_ordinal, members)


def random_trajectories(
    seed: int,
    *,
    groups: int,
    size: int,
    version: int = 0,
    run_id: str = "r",
    first_ordinal: int = 0,
    vocabulary: int = 60,
) -> list[Trajectory]:
    """Random prompts, answers and rewards; behaviour logprobs near those of a uniform policy. Same seed, same bytes."""
    numbers = np.random.default_rng(seed)
    made = []
    for ordinal in range(first_ordinal, first_ordinal + groups):
        prompt = numbers.integers(2, vocabulary, 5).tolist()
        for member in range(size):
            answer = numbers.integers(2, vocabulary, int(numbers.integers(2, 8))).tolist()
            logprobs = (-4.1 + 0.2 * numbers.standard_normal(len(answer))).tolist()
            segment = a_segment(prompt, answer, logprobs, [version] * len(answer))
            reward = float(numbers.integers(0, 2))
            name = f"g{seed}-{ordinal}"
            made.append(
                a_rollout([segment], reward, run_id=run_id, group=name, ordinal=ordinal, size=size, member=member)
            )
    return made


def grouped(trajectories: Sequence[Trajectory]) -> list[Group[Trajectory]]:
    by_group: dict[str, list[Trajectory]] = {}
    for one in trajectories:
        by_group.setdefault(one.group_id, []).append(one)
    return [group_of(members) for members in by_group.values()]

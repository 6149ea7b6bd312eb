"""Kept rollouts made at random: agents of several turns and segments, tokens of several versions, some of no gradient."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np

from services.host.run_folder import RunFolder
from services.policies.batching import Group
from services.run_store.rollouts.record import KeptRollout, SegmentColumns
from services.run_store.rollouts.samples import samples_of_step
from services.run_store.rollouts.search import MOST_A_PAGE, RolloutReader
from services.run_store.rollouts.writer import Entry, RolloutWriter
from services.wire.packed import pack_logprobs, pack_mask, pack_tokens
from services.wire.run_metrics import Sample
from services.wire.trajectory import CallTime, RewardSpan, Segment, Trajectory, VersionSpan, check_trajectory
from tests.support.trajectories import a_rollout, a_segment, grouped

REASONS = ("template", "compaction", "retokenization", "tools_changed", "truncated", "branch")
VOCABULARY = 60
PIECES = {token: chr(ord("0") + token).encode() for token in range(VOCABULARY)}
"""Digits, letters and what stands between them."""


def random_agent(numbers: np.random.Generator, *, version: int, **identity: int | str) -> Trajectory:
    """A session of one to four segments, whose tokens were sampled by policies up to `version`."""
    segments: list[Segment] = []
    ids: list[int] = []
    for number in range(int(numbers.integers(1, 5))):
        reason = None
        if number:
            ids = ids[: int(numbers.integers(1, len(ids)))]
            reason = REASONS[int(numbers.integers(len(REASONS)))]
        mask, logprobs, spans = [0] * len(ids), [0.0] * len(ids), list[VersionSpan]()
        for _ in range(int(numbers.integers(1, 4))):
            given = numbers.integers(0, VOCABULARY, int(numbers.integers(1, 8))).tolist()
            ids, mask, logprobs = ids + given, mask + [0] * len(given), logprobs + [0.0] * len(given)
            for of in sorted(numbers.integers(max(0, version - 4), version + 1, int(numbers.integers(1, 3))).tolist()):
                said = numbers.integers(0, VOCABULARY, int(numbers.integers(1, 12))).tolist()
                spans.append(VersionSpan(len(ids), len(said), of))
                ids, mask = ids + said, mask + [1] * len(said)
                logprobs = logprobs + (-3.0 * numbers.random(len(said))).tolist()
        segments.append(Segment(pack_tokens(ids), pack_mask(mask), pack_logprobs(logprobs), spans, reason))
    made = a_rollout(segments, float(numbers.integers(0, 3)) / 2, **identity)  # type: ignore[arg-type]
    span = segments[0].version_spans[0]
    made = msgspec.structs.replace(
        made, reward_spans=[RewardSpan(0, span.start, span.length, 0.25)], metadata={"a": "b"}
    )
    check_trajectory(made)
    return made


def random_groups(seed: int, *, groups: int, size: int, version: int) -> list[Group[Trajectory]]:
    numbers = np.random.default_rng(seed)
    return grouped(
        [
            random_agent(
                numbers, version=version, group=f"g{seed}-{ordinal}", ordinal=ordinal, size=size, member=member
            )
            for ordinal in range(groups)
            for member in range(size)
        ]
    )


def entry_of(step: int, one: Trajectory, numbers: np.random.Generator, k: int = 2) -> Entry:
    columns = []
    for segment in one.segments:
        sampled = sum(span.length for span in segment.version_spans)
        current = pack_logprobs(-3.0 * numbers.random(sampled)) if numbers.random() < 0.7 else b""
        same = numbers.random() < 0.5
        advantages = np.repeat(numbers.standard_normal(1), sampled) if same else numbers.standard_normal(sampled)
        columns.append(SegmentColumns.of(current, pack_logprobs(advantages)))
    kept = KeptRollout(
        step=step, version=step - 1, k=k, trained=bool(numbers.random() < 0.9), trajectory=one, columns=columns
    )
    return Entry(kept, f"prompt {step} of {one.group_id}", f"answer {step * 7}-{one.member}", 0.5)


def keep_text(
    folder: Path,
    step: int,
    text: str,
    *,
    sampled: int = 1,
    reward: float = 1.0,
    task: str = "test",
    times: tuple[float, float] | None = None,
) -> None:
    """One rollout of a step, open from 1 to 2 s: a character of `text` a token, of which the last were sampled by the
    policy before it, between `times`."""
    ids = [ord(character) for character in text]
    one = a_rollout(
        [a_segment(ids[:-sampled], ids[-sampled:], [-1.0] * sampled, [step - 1] * sampled)], reward, ordinal=step
    )
    called = [] if times is None else [CallTime(0, len(ids) - sampled, *times)]
    one = msgspec.structs.replace(one, task=task, call_times=called)
    kept = KeptRollout(
        step=step, version=step - 1, k=2, trained=True, trajectory=one,
        columns=[SegmentColumns.of(b"", pack_logprobs([0.5] * sampled))],
    )  # fmt: skip
    writer = RolloutWriter(folder, 1 << 30)
    pieces = {ord(character): character.encode() for character in text}
    writer.append(step, step - 1, 100.0 + step, 1, [Entry(kept, text[:-sampled], text[-sampled:], 0.5)], pieces)
    writer.close()


def keep_sums(folder: Path, steps: Sequence[int] = range(57, 61), siblings: int = 8) -> None:
    """Running sums as a policy answers them that has nearly learnt it: most think first, some guess."""
    numbers, writer = np.random.default_rng(3), RolloutWriter(folder, 1 << 30)
    for step in steps:
        digits = numbers.integers(0, 5, 8)
        prompt, sums = "".join(map(str, digits)) + "=", np.cumsum(digits) % 5
        thought = "<" + "".join(map(str, sums)) + ">"
        said = [
            f"{numbers.integers(0, 5)}$" if numbers.random() < 0.3 else f"{thought}{sums[-1]}$" for _ in range(siblings)
        ]
        rewards = np.array([float(each[-2] == str(sums[-1])) for each in said])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        entries = []
        for member, (answer, reward, advantage) in enumerate(
            zip(said, rewards.tolist(), advantages.tolist(), strict=True)
        ):
            ids, count = [ord(each) for each in prompt + answer], len(answer)
            logprobs = (-0.05 * numbers.exponential(size=count)).astype(np.float32)
            current = logprobs + 0.1 * numbers.standard_normal(count).astype(np.float32)
            versions = sorted(numbers.integers(step - 3, step, count).tolist())
            segment = a_segment(ids[:-count], ids[-count:], logprobs.tolist(), versions)
            one = a_rollout([segment], reward, group=f"g{step}", ordinal=step, size=siblings, member=member)
            columns = SegmentColumns.of(pack_logprobs(current), pack_logprobs([advantage] * count))
            called = [CallTime(0, len(prompt), 1.125, 1.125 + count / 32)]
            one = msgspec.structs.replace(one, task="running-sums", call_times=called)
            kept = KeptRollout(step=step, version=step - 1, k=2, trained=True, trajectory=one, columns=[columns])
            entries.append(Entry(kept, prompt, answer, advantage))
        pieces = {code: chr(code).encode() for code in range(33, 127)}
        writer.append(step, step - 1, 1_795_000_000.0 + step, siblings, entries, pieces)
    writer.close()


def write_steps(
    folder: Path, steps: Sequence[int], *, rollouts: int = 10, max_bytes: int = 1 << 30
) -> list[Trajectory]:
    """Steps of one group each; the trajectories that were given."""
    writer, given = RolloutWriter(folder, max_bytes), list[Trajectory]()
    for step in steps:
        numbers = np.random.default_rng(step)
        group = f"g{step}"
        made = [
            random_agent(numbers, version=step - 1, group=group, ordinal=step, size=rollouts, member=member)
            for member in range(rollouts)
        ]
        writer.append(step, step - 1, 100.0 + step, rollouts, [entry_of(step, one, numbers) for one in made], PIECES)
        given += made
    writer.close()
    return given


def read_samples(run_dir: Path) -> list[Sample]:
    """All that a run kept, in order."""
    reader = RolloutReader(RunFolder(run_dir).rollouts)
    extent = reader.extent()
    steps = [] if extent is None else range(extent.first, extent.last + 1)
    return [sample for step in steps for sample in samples_of_step(reader, step, MOST_A_PAGE)]

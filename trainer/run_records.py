"""What people read of a run while it goes: metrics.jsonl and samples.jsonl. A torn tail is cut off, no step is repeated."""

from __future__ import annotations

from collections.abc import Sequence
from io import BufferedRandom
from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from services.host.files import writing
from services.policies.batching import Group
from services.wire.packed import unpack_tokens
from services.wire.trajectory import Segment, Trajectory
from trainer.metrics import StepMetrics

SAMPLES_A_STEP = 2


class SampledSpan(msgspec.Struct, frozen=True):
    """Text that one policy version drew."""

    version: int
    text: str


class SampledSegment(msgspec.Struct, frozen=True):
    """`text`: all of it, special tokens included. `spans`: the parts the policy drew."""

    text: str
    spans: list[SampledSpan]
    break_reason: str | None


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """A decoded rollout: one line of samples.jsonl."""

    step: int
    group: str
    ordinal: int
    member: int
    task: str
    server: str
    reward: float
    versions: list[int]
    segments: list[SampledSegment]


_metrics = msgspec.json.Decoder(StepMetrics)
_encoder = msgspec.json.Encoder()


def read_metrics(path: Path) -> list[StepMetrics]:
    """The lines of metrics.jsonl in order; a torn last one is left out."""
    content = path.read_bytes() if path.exists() else b""
    return [_metrics.decode(line) for line in content[: content.rfind(b"\n") + 1].splitlines() if line]


class RunRecords:
    """Appends to both files. `steps`: those that metrics.jsonl holds; they are not written again by a restarted trainer."""

    def __init__(self, metrics: Path, samples: Path, tokenizer: Tokenizer) -> None:
        self.steps = {line.step for line in read_metrics(metrics)}
        self._path = metrics
        self._tokenizer = tokenizer
        self._metrics = _open_at_last_line(metrics)
        self._samples = _open_at_last_line(samples)

    def write(self, metrics: StepMetrics, groups: Sequence[Group[Trajectory]]) -> None:
        """One step's line and samples. A step that is there already is left alone. Raises UsageError on a full disk."""
        if metrics.step in self.steps:
            return
        self.steps.add(metrics.step)
        with writing(self._path):
            for sample in self._choose(metrics.step, groups):
                self._samples.write(_encoder.encode(sample) + b"\n")
            self._samples.flush()
            self._metrics.write(_encoder.encode(metrics) + b"\n")
            self._metrics.flush()

    def flush(self) -> None:
        """Everything written so far is in the files when this returns."""
        self._samples.flush()
        self._metrics.flush()

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()

    def _choose(self, step: int, groups: Sequence[Group[Trajectory]]) -> list[Sample]:
        """The first trajectory, and the first that a weight commit met half-way (else the last one)."""
        trajectories = [member.payload for group in groups for member in group.members]
        crossed = next((one for one in trajectories[1:] if len(_versions(one)) > 1), trajectories[-1])
        return [self._decode(step, one) for one in [trajectories[0], crossed][:SAMPLES_A_STEP]]

    def _decode(self, step: int, trajectory: Trajectory) -> Sample:
        return Sample(
            step=step,
            group=trajectory.group_id,
            ordinal=trajectory.group_ordinal,
            member=trajectory.member,
            task=trajectory.task,
            server=trajectory.server_id,
            reward=trajectory.reward,
            versions=sorted(_versions(trajectory)),
            segments=[self._segment(segment) for segment in trajectory.segments],
        )

    def _segment(self, segment: Segment) -> SampledSegment:
        tokens = unpack_tokens(segment.token_ids).tolist()
        spans = [
            SampledSpan(span.version, self._text(tokens[span.start : span.start + span.length]))
            for span in segment.version_spans
        ]
        return SampledSegment(self._text(tokens), spans, segment.break_reason)

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=False))


def _versions(trajectory: Trajectory) -> set[int]:
    return {span.version for segment in trajectory.segments for span in segment.version_spans}


def _open_at_last_line(path: Path) -> BufferedRandom:
    path.touch()
    file = path.open("r+b")
    content = file.read()
    file.truncate(content.rfind(b"\n") + 1)
    file.seek(0, 2)
    return file

"""Keeps the rollouts of each step to be read: which ones, and what the trainer knows of their tokens.

    Trained ──budget──► some groups ──► texts, arrays of their sampled tokens ──► RolloutWriter       on the files' thread

The training thread only hands the step over. What is kept is cut out of arrays that the step had; only text is made new.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog
from tokenizers import Tokenizer

from services.config.samples import SampleSettings
from services.policies.training.recording import RecordingBudget
from services.run_store.rollouts.record import KeptRollout, SegmentColumns
from services.run_store.rollouts.tokens import new_tokens
from services.run_store.rollouts.writer import Entry, RolloutWriter
from services.wire.errors import UsageError
from services.wire.packed import Float32Array, Int32Array, unpack_tokens
from services.wire.trajectory import Segment, Trajectory
from trainer.algorithms.advantages.batch import Int64Array
from trainer.algorithms.advantages.flat import ranges
from trainer.metrics.pieces import Pieces
from trainer.model.train_batch import Trained

_log = structlog.get_logger()


class RolloutRecorder:
    """`k`: the bound on staleness; `clock`, `spent`: seconds, of the world and of this thread's core."""

    def __init__(
        self,
        folder: Path,
        settings: SampleSettings,
        k: int,
        tokenizer: Tokenizer,
        clock: Callable[[], float] = time.monotonic,
        spent: Callable[[], float] = time.thread_time,
    ) -> None:
        """Raises UsageError where the folder cannot be written."""
        self._writer = RolloutWriter(folder, settings.max_bytes)
        self._budget = RecordingBudget(settings.share, settings.cpu_share, clock())
        self._k, self._tokenizer, self._pieces = k, tokenizer, Pieces(tokenizer)
        self._clock, self._spent = clock, spent
        self._failing = False

    def keep(self, step: Trained, at: float) -> None:
        """`at`: Unix seconds. Nothing of a step that was kept before, or of trajectories that an earlier epoch kept.

        A disk that is full is told of once, and training goes on.
        """
        if step.epoch > 1 or step.step <= self._writer.newest_step:
            return
        began = self._spent()
        chosen = self._budget.choose(len(step.groups), self._clock())
        if chosen:
            try:
                self._write(step, chosen, at)
                self._failing = False
            except sqlite3.Error as error:
                if not self._failing:
                    _log.warning("rollouts are not kept", step=step.step, why=str(error))
                self._failing = True
        self._budget.spent(len(chosen), self._spent() - began)

    def close(self) -> None:
        self._writer.close()

    def _write(self, step: Trained, chosen: Sequence[int], at: float) -> None:
        entries = self._entries(step, chosen)
        tokens = np.unique(np.concatenate([unpack_tokens(b"".join(_ids(each.kept.trajectory))) for each in entries]))
        pieces = self._pieces.of([token for token in tokens.tolist() if token not in self._writer.known_tokens])
        self._writer.append(step.step, step.version - 1, at, len(step.batch.trajectories), entries, pieces)

    def _entries(self, step: Trained, chosen: Sequence[int]) -> list[Entry]:
        batch, credits = step.batch, step.credits
        counts = batch.segments.sampled_tokens()
        current, known = current_logprobs(counts, step.logprobs, step.sources)
        advantages = credits.by_token.advantages
        sampled_from = np.concatenate([[0], np.cumsum(counts)])
        segment_from = np.searchsorted(batch.owner, np.arange(len(batch.trajectories) + 1))
        numbers = np.flatnonzero(np.isin(batch.group, chosen)).tolist()
        texts = self._texts([batch.trajectories[number] for number in numbers])
        entries = []
        for number, (prompt, answer) in zip(numbers, texts, strict=True):
            first, end = int(segment_from[number]), int(segment_from[number + 1])
            columns = []
            for segment in range(first, end):
                own = slice(int(sampled_from[segment]), int(sampled_from[segment + 1]))
                of_trainer = current[own].tobytes() if known[segment] else b""
                columns.append(SegmentColumns.of(of_trainer, advantages[own].tobytes()))
            kept = KeptRollout(
                step=step.step,
                version=step.version - 1,
                k=self._k,
                trained=bool(credits.trained[number]),
                trajectory=batch.trajectories[number],
                columns=columns,
            )
            mine = advantages[int(sampled_from[first]) : int(sampled_from[end])]
            entries.append(Entry(kept, prompt, answer, float(mine.mean()) if len(mine) else 0.0))
        return entries

    def _texts(self, trajectories: Sequence[Trajectory]) -> list[tuple[str, str]]:
        """Prompt and answer of each: what stands before the first sampled token, and all that came since, once."""
        parts = [part for one in trajectories for part in _parts(one.segments)]
        decoded = iter(self._tokenizer.decode_batch([part.tolist() for part in parts], skip_special_tokens=False))
        told = []
        for one in trajectories:
            # One prompt, and what each segment brought.
            prompt, *answers = (next(decoded) for _ in range(1 + len(one.segments)))
            told.append((prompt, "\n".join(answers)))
        return told


def open_recorder(folder: Path, settings: SampleSettings, k: int, tokenizer: Tokenizer) -> RolloutRecorder | None:
    """None where none are kept, or the folder cannot hold them, which is said: a run does without.

    Some network file systems have not the locks that SQLite needs.
    """
    if settings.share == 0.0:
        return None
    try:
        return RolloutRecorder(folder, settings, k, tokenizer)
    except (UsageError, sqlite3.Error, OSError) as error:
        _log.warning("rollouts are not kept", folder=str(folder), why=str(error))
        return None


def _parts(segments: Sequence[Segment]) -> list[Int32Array]:
    if len(segments) == 1:
        # As most are: nothing to compare.
        ids = unpack_tokens(segments[0].token_ids)
        begins = segments[0].version_spans[0].start if segments[0].version_spans else len(ids)
        return [ids[:begins], ids[begins:]]
    begins = segments[0].version_spans[0].start if segments and segments[0].version_spans else 0
    new = [ids[known:] for ids, known in new_tokens(segments)]
    return [new[0][:begins], new[0][begins:], *new[1:]] if new else [np.zeros(0, dtype=np.int32)]


def _ids(trajectory: Trajectory) -> list[bytes]:
    return [segment.token_ids for segment in trajectory.segments]


def current_logprobs(
    counts: Int64Array, logprobs: Sequence[Float32Array], sources: Sequence[Int64Array]
) -> tuple[Float32Array, npt.NDArray[np.bool_]]:
    """The trainer's logprobs of all sampled tokens of a step, `[N]`, and of which segments, `[S]`, there are any.

    `counts` `[S]`: sampled tokens of each segment.
    """
    current, known = np.zeros(int(counts.sum()), dtype=np.float32), np.zeros(len(counts), dtype=np.bool_)
    starts = np.cumsum(counts) - counts
    for of_share, rows in zip(logprobs, sources, strict=False):
        current[ranges(starts[rows], counts[rows])] = of_share
        known[rows] = True
    return current, known

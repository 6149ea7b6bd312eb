"""The steps of runs, kept from one call to the next: a file of 10,000 lines is read once, and then where it grows.

Of each step only the figures that are drawn are kept.
"""

from __future__ import annotations

import math
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from services.host.files import LineTail
from services.host.run_folder import RunFolder

MOST_RUNS = 16
"""Whose steps are kept: the one that was asked for longest ago is forgotten."""


class StepFigures(msgspec.Struct, frozen=True, gc=False):
    """Of a line of metrics.jsonl, by its names (`services.wire.run_metrics.StepMetrics`); None where it is not known."""

    step: int
    version: int
    time: float
    tokens: int
    success: float
    reward: float
    response_length: float
    tokens_per_s: float
    staleness_mean: float
    staleness_max: float
    masked_fraction: float
    wait_ms: float
    pack_ms: float
    train_ms: float
    publish_ms: float
    step_ms: float
    commit_ms: float
    stage_ms: float
    flip_ms: float
    reward_spread: float | None = None
    truncated: float | None = None
    equal_groups: float | None = None
    entropy: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    kl: float | None = None
    clip_fraction: float | None = None
    logprob_gap_mean: float | None = None
    effective_samples: float | None = None
    arrived: int | None = None
    arrived_length: float | None = None
    lost_siblings: int | None = None
    mixed_segments: int | None = None
    memory_bytes: int | None = None
    staleness_generation: float | None = None
    staleness_queue: float | None = None
    staleness_training: float | None = None
    mfu: float | None = None
    learning_rate: float | None = None


NAMES: tuple[str, ...] = StepFigures.__struct_fields__
_decoder = msgspec.json.Decoder(StepFigures)


class Columns(msgspec.Struct, frozen=True):
    """`columns[i][j]`: figure `names[i]` of place j. A place stands for `each` steps: their mean, at the last of them.

    `total`: steps so far. `last`: the last of them; 0 before the first.
    """

    names: list[str]
    columns: list[list[float | None]]
    each: int
    total: int
    last: int


_AT_LAST = ("step", "version", "time")


class Steps:
    """The steps of a run: as lines, and each figure by itself, in which NaN stands for what is not known."""

    def __init__(self) -> None:
        self.lines: list[StepFigures] = []
        self._figures = {name: array("d") for name in NAMES}

    def add(self, line: StepFigures) -> None:
        """The next one."""
        self.lines.append(line)
        for name, figures in self._figures.items():
            value = getattr(line, name)
            figures.append(math.nan if value is None else value)

    def columns(self, names: Sequence[str], *, after: int = 0, most: int = 400) -> Columns:
        """Figures of the steps behind `after`, in at most `most` places. Raises KeyError for an unknown name."""
        import numpy

        steps = numpy.array(self._figures["step"])
        first = int(numpy.searchsorted(steps, after, side="right")) if after else 0
        count = len(steps) - first
        each = max(1, -(-count // most))
        places = -(-count // each)
        columns = []
        for name in names:
            padded = numpy.full(places * each, math.nan)
            padded[:count] = self._figures[name][first : first + count]
            parts = padded.reshape(places, each)
            if name in _AT_LAST:
                values = padded[numpy.minimum(numpy.arange(1, places + 1) * each, count) - 1]
            else:
                known = ~numpy.isnan(parts)
                sums, counts = numpy.where(known, parts, 0.0).sum(axis=1), known.sum(axis=1)
                values = numpy.where(counts > 0, sums / numpy.maximum(counts, 1), math.nan)
            columns.append([None if math.isnan(value) else value for value in values.tolist()])
        return Columns(
            names=list(names),
            columns=columns,
            each=each,
            total=len(self.lines),
            last=self.lines[-1].step if self.lines else 0,
        )


class _Growing:
    """The steps of one file. One that is shorter than before is another run's, and is read anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self._tail = LineTail(self._path)
        self._steps = Steps()
        self._size = 0

    def read(self) -> Steps:
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._size:
            self._begin()
        if size != self._size:
            self._size = size
            for line in self._tail.new_lines():
                try:
                    self._steps.add(_decoder.decode(line))
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue  # as every reader of this file does
        return self._steps


class StepFiles:
    """The steps of each run folder. Every call may read a file, and belongs on a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Path, _Growing] = OrderedDict()

    def lines_of(self, folder: RunFolder) -> Sequence[StepFigures]:
        """All steps so far."""
        with self._lock:
            return tuple(self._read(folder).lines)

    def columns_of(self, folder: RunFolder, names: Sequence[str], *, after: int, most: int) -> Columns:
        """As `Steps.columns`."""
        with self._lock:
            return self._read(folder).columns(names, after=after, most=most)

    def _read(self, folder: RunFolder) -> Steps:
        growing = self._kept.pop(folder.metrics, None) or _Growing(folder.metrics)
        self._kept[folder.metrics] = growing
        while len(self._kept) > MOST_RUNS:
            self._kept.popitem(last=False)
        return growing.read()

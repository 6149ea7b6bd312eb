"""The steps of runs, kept from one call to the next: a file of 10,000 lines is read once, and then where it grows.

Of each step only the figures that are drawn are kept.
"""

from __future__ import annotations

import threading
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
    mfu: float | None = None
    learning_rate: float | None = None


NAMES: tuple[str, ...] = StepFigures.__struct_fields__
_decoder = msgspec.json.Decoder(StepFigures)


class _Growing:
    """The steps of one file. One that is shorter than before is another run's, and is read anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin()

    def _begin(self) -> None:
        self._tail = LineTail(self._path)
        self._lines: list[StepFigures] = []
        self._size = 0

    def read(self) -> Sequence[StepFigures]:
        size = self._path.stat().st_size if self._path.exists() else 0
        if size < self._size:
            self._begin()
        if size != self._size:
            self._size = size
            for line in self._tail.new_lines():
                try:
                    self._lines.append(_decoder.decode(line))
                except (msgspec.DecodeError, UnicodeDecodeError):
                    continue  # as every reader of this file does
        return tuple(self._lines)


class StepFiles:
    """The steps of each run folder. Every call may read a file, and belongs on a thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: OrderedDict[Path, _Growing] = OrderedDict()

    def of(self, folder: RunFolder) -> Sequence[StepFigures]:
        """All steps so far."""
        with self._lock:
            growing = self._kept.pop(folder.metrics, None) or _Growing(folder.metrics)
            self._kept[folder.metrics] = growing
            while len(self._kept) > MOST_RUNS:
                self._kept.popitem(last=False)
            return growing.read()


class Columns(msgspec.Struct, frozen=True):
    """`columns[i][j]`: figure `names[i]` of place j. A place stands for `each` steps: their mean, at the last of them.

    `total`: steps so far. `last`: the last of them; 0 before the first.
    """

    names: list[str]
    columns: list[list[float | None]]
    each: int
    total: int
    last: int


def columns_of(lines: Sequence[StepFigures], names: Sequence[str], *, after: int = 0, most: int = 400) -> Columns:
    """Figures of the steps behind `after`, in at most `most` places. Pure. Raises AttributeError for an unknown name."""
    chosen = [line for line in lines if line.step > after] if after else list(lines)
    each = max(1, -(-len(chosen) // most))
    parts = [chosen[i : i + each] for i in range(0, len(chosen), each)]
    return Columns(
        names=list(names),
        columns=[[_mean(part, name) for part in parts] for name in names],
        each=each,
        total=len(lines),
        last=lines[-1].step if lines else 0,
    )


_AT_LAST = ("step", "version", "time")


def _mean(part: Sequence[StepFigures], name: str) -> float | None:
    if name in _AT_LAST or len(part) == 1:
        value: float | None = getattr(part[-1], name)
        return value
    known = [value for line in part if (value := getattr(line, name)) is not None]
    return sum(known) / len(known) if known else None

"""The samples of a run that `rollmesh samples` shows: those of its kept rollouts, and of an older run's samples.jsonl."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from services.host.files import LineTail
from services.host.run_folder import RunFolder
from services.run_store.rollouts.samples import samples_of
from services.run_store.rollouts.search import MOST_A_PAGE, Found, Order, Range, RolloutReader, Search
from services.wire.errors import UNDECODABLE
from services.wire.run_metrics import Sample

_KEYS = {
    "step": lambda sample: sample.step,
    "reward": lambda sample: (sample.reward, sample.step),
    "length": lambda sample: (sample.tokens or 0, sample.step),
}


@dataclass(frozen=True)
class Wanted:
    """None: any."""

    step: Range | None = None
    reward: Range | None = None
    length: Range | None = None
    text: str | None = None
    task: str | None = None
    order: Order = "step"

    def takes(self, sample: Sample) -> bool:
        if self.task is not None and sample.task != self.task:
            return False
        if self.text is not None and not any(self.text in segment.text for segment in sample.segments):
            return False
        measured = ((self.step, sample.step), (self.reward, sample.reward), (self.length, sample.tokens))
        return all(
            wanted is None or (value is not None and wanted[0] <= value <= wanted[1]) for wanted, value in measured
        )


@dataclass(frozen=True)
class Chosen:
    """The last of those that were asked for, in their order; `count`: how many there are in all, `counted`: all of them."""

    shown: list[Sample]
    count: int
    counted: bool
    kept: tuple[int, int] | None
    """The steps that samples are kept of; None where there are none."""


def choose(folder: RunFolder, wanted: Wanted, last: int) -> Chosen:
    """The last `last` samples of a run. Raises UsageError where its file cannot be read."""
    reader = RolloutReader(folder.rollouts)
    extent = reader.extent()
    steps = [] if extent is None else [extent.first, extent.last]
    # A run that an older rollmesh began has samples of its first steps there.
    old = [sample for sample in _old_samples(folder) if extent is None or sample.step < extent.first]
    steps += [sample.step for sample in old]
    chosen = sorted(filter(wanted.takes, old), key=_KEYS[wanted.order])
    count, counted, found = len(chosen), True, list[Sample]()
    if extent is not None:
        search = Search(
            step=wanted.step, reward=wanted.reward, length=wanted.length, task=wanted.task, text=wanted.text,
            order=wanted.order, limit=min(last, MOST_A_PAGE),
        )  # fmt: skip
        lines = list[Found]()
        while len(lines) < last:
            page = reader.search(search)
            lines += page.rollouts
            search = msgspec.structs.replace(search, offset=search.offset + len(page.rollouts), up_to=page.up_to)
            if not page.more:
                break
        lines = lines[:last]
        found = samples_of(reader, reversed(lines))
        counted = page.total is not None
        count += len(lines) if page.total is None else page.total
    shown = sorted([*chosen, *found], key=_KEYS[wanted.order])[-last:]
    return Chosen(shown, count, counted, (min(steps), max(steps)) if steps else None)


def _old_samples(folder: RunFolder) -> Iterator[Sample]:
    """The samples in order; lines that cannot be read are left out."""
    for line in LineTail(folder.samples).new_lines():
        sample = read_sample(line)
        if sample is not None:
            yield sample


def read_sample(line: bytes) -> Sample | None:
    """A line of samples.jsonl; None for one that cannot be read."""
    try:
        return msgspec.json.decode(line, type=Sample)
    except UNDECODABLE:
        return None

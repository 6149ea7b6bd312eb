"""Follows a run folder and feeds logging backends: a thread each, so that one that is slow or dead holds up no other.

metrics.jsonl ──new lines──► those that the backend does not hold ──► logged        every second, until told to end
                                  failed? said once; opened again after a while, and asked what it holds

The run folder is the source: what a killed process, or a backend that was away, has not written is written later, and
nothing is written twice. The run itself never waits for any of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import structlog
from pydantic import ValidationError

from services.host.files import LineTail
from services.host.run_folder import RunFolder
from services.policies.backoff import growing_delay
from services.run_store.rollouts.samples import samples_of_step
from services.run_store.rollouts.search import RolloutReader
from services.wire.errors import UNDECODABLE, RollmeshError
from services.wire.rollout_api import Evaluation, Evaluations
from services.wire.run_metrics import Sample
from trainer.tracking.base import Figures, Tracker, flattened

READ_EVERY_S = 1.0
LONGEST_PAUSE_S = 60.0
CLOSE_WITHIN_S = 15.0
_LOOK_EVERY_S = 0.05
SAMPLES_A_STEP = 2

_log = structlog.get_logger()


@dataclass
class FolderReader:
    """New steps of a run folder, each with its samples and the evaluations told since the step before."""

    folder: RunFolder
    _evaluated: int = -1

    def __post_init__(self) -> None:
        self._metrics_tail, self._rollouts = LineTail(self.folder.metrics), RolloutReader(self.folder.rollouts)

    def read(self) -> list[Figures]:
        """Those whose lines were added since the last call. What cannot be read is left out."""
        # Rollouts of a step are written before its figures.
        lines = self._metrics_tail.new_lines()
        figures = []
        for line in lines:
            with suppress(*UNDECODABLE, KeyError, TypeError, ValueError):
                tree = msgspec.json.decode(line)
                step, at = int(tree["step"]), float(tree["time"])
                figures.append(Figures(step, at, flattened(tree), self._samples_of(step)))
        self._add_evaluations(figures)
        return figures

    def _samples_of(self, step: int) -> str:
        """Empty where none of the step are kept, or they cannot be read."""
        with suppress(RollmeshError):
            return "\n\n".join(map(_as_text, samples_of_step(self._rollouts, step, SAMPLES_A_STEP)))
        return ""

    def summary(self) -> dict[str, float] | None:
        """Figures of a run that has ended well; None of one that has not."""
        try:
            return flattened(msgspec.json.decode(self.folder.summary.read_bytes()))
        except (OSError, *UNDECODABLE):
            return None

    def _add_evaluations(self, figures: Sequence[Figures]) -> None:
        """Each to the first step that was made after it; one that has none yet waits."""
        try:
            told = Evaluations.model_validate_json(self.folder.evaluations.read_bytes()).evaluations
        except (OSError, ValidationError):
            return
        for evaluation in told:
            step = next((each for each in figures if each.at >= evaluation.at), None)
            if evaluation.due > self._evaluated and step is not None:
                step.values.update(_as_figures(evaluation))
                self._evaluated = evaluation.due


def _as_figures(evaluation: Evaluation) -> dict[str, float]:
    names = ("success", "low", "high", "mean_length")
    figures = {f"held_out/{name}": float(getattr(evaluation, name)) for name in ("due", *names)}
    for task, each in evaluation.tasks.items():
        figures |= {f"held_out/{task}/{name}": float(getattr(each, name)) for name in names}
    return figures


def _as_text(sample: Sample) -> str:
    text = "\n".join(segment.text for segment in sample.segments)
    versions = ", ".join(map(str, sample.versions))
    return f"reward {sample.reward:g}, versions {versions}\n\n{text}"


@dataclass
class Feed:
    """One backend's thread. `open`: makes its tracker, and is called again after a failure."""

    name: str
    reader: FolderReader
    open: Callable[[], Tracker]
    stop: threading.Event
    once: bool = False
    failed: bool = False
    """Whether something could not be written when it ended."""
    _waiting: list[Figures] = field(default_factory=list)

    def run(self) -> None:
        failures = 0
        while True:
            ending = self.once or self.stop.is_set()
            try:
                tracker = self.open()
                try:
                    self._feed(tracker)
                finally:
                    tracker.close()
                self.failed = False
                return
            except Exception as error:  # noqa: BLE001 - whatever a library raises: the run and the others go on
                self.failed = True
                failures += 1
                again = "" if ending else ": it is opened again"
                _log.warning(f"a logging backend failed{again}", backend=self.name, why=repr(error))
            if ending:
                return
            self.stop.wait(growing_delay(failures, 1.0, LONGEST_PAUSE_S))

    def _feed(self, tracker: Tracker) -> None:
        """Until told to end, and then what there still is."""
        held = tracker.held()
        while True:
            ending = self.once or self.stop.is_set()
            self._waiting += self.reader.read()
            new = [figures for figures in self._waiting if figures.step not in held]
            if new:
                tracker.log(new)
                held |= {figures.step for figures in new}
            # Only now: what could not be logged is tried again with the tracker that is opened next.
            self._waiting.clear()
            if ending:
                summary = self.reader.summary()
                if summary is not None:
                    tracker.finish(summary)
                return
            self.stop.wait(READ_EVERY_S)


def follow(
    folder: RunFolder, backends: Mapping[str, Callable[[], Tracker]], stop: threading.Event, *, once: bool
) -> list[str]:
    """Feed all of them until `stop` is set, or, with `once`, with what there is now. Returns those that failed at the end.

    One that is still busy CLOSE_WITHIN_S after `stop` is left alone, and counts as failed.
    """
    feeds = [Feed(name, FolderReader(folder), opened, stop, once) for name, opened in backends.items()]
    threads = [threading.Thread(target=feed.run, name=f"tracking {feed.name}", daemon=True) for feed in feeds]
    for thread in threads:
        thread.start()
    ends = None
    while any(thread.is_alive() for thread in threads):
        if stop.is_set():
            ends = time.monotonic() + CLOSE_WITHIN_S if ends is None else ends
            if time.monotonic() > ends:
                break
        # Short waits, so that signals are seen.
        time.sleep(_LOOK_EVERY_S)
    return [feed.name for feed, thread in zip(feeds, threads, strict=True) if feed.failed or thread.is_alive()]

"""The lines of metrics.jsonl added up: what Prometheus scrapes of the trainer, and what it tells in Redis."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence

import msgspec

from services.observability import catalog
from services.observability.metrics import Reading
from services.run_store.status import TrainerReport

RECENT_STEPS = 20
"""How many steps the busy share is of."""


class StepLine(msgspec.Struct, frozen=True):
    """The part of a line (`trainer.metrics.StepMetrics`) that is told."""

    step: int
    version: int
    time: float
    wait_ms: float
    pack_ms: float
    train_ms: float
    publish_ms: float
    step_ms: float
    tokens_per_s: float
    staleness_mean: float
    staleness_max: int
    staleness_histogram: dict[str, int]
    masked_tokens: int
    masked_fraction: float
    dropped: dict[str, int]
    commits: int
    reward: float
    success: float
    effective_samples: float | None


_line = msgspec.json.Decoder(StepLine)


class StepTotals:
    """`steps`, `k`: the run's. Pure but for what it remembers of the lines."""

    def __init__(self, steps: int, k: int) -> None:
        self._steps, self._k = steps, k
        self._last: StepLine | None = None
        self._recent: deque[StepLine] = deque(maxlen=RECENT_STEPS)
        self._count = 0
        self._masked = 0
        self._seconds: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()

    @property
    def any(self) -> bool:
        return self._last is not None

    def add(self, lines: Sequence[bytes]) -> None:
        """Lines as they stand in the file, in order."""
        for packed in lines:
            line = self._last = _line.decode(packed)
            self._recent.append(line)
            self._count += 1
            self._masked += line.masked_tokens
            self._tokens.update(line.staleness_histogram)
            self._dropped.update(line.dropped)
            for activity in ("wait", "pack", "train", "publish"):
                self._seconds[activity] += getattr(line, f"{activity}_ms") / 1e3

    def report(self) -> TrainerReport | None:
        """None before the first step."""
        line = self._last
        if line is None:
            return None
        whole = sum(each.step_ms for each in self._recent)
        waited = sum(each.wait_ms for each in self._recent)
        return TrainerReport(
            step=line.step,
            steps=self._steps,
            k=self._k,
            at=line.time,
            busy_share=1.0 - waited / whole if whole > 0 else 0.0,
            over_steps=len(self._recent),
            tokens_per_s=line.tokens_per_s,
            staleness_mean=line.staleness_mean,
            staleness_max=line.staleness_max,
            staleness_histogram=line.staleness_histogram,
            masked_fraction=line.masked_fraction,
            effective_samples=line.effective_samples,
            dropped=dict(sorted(self._dropped.items())),
        )

    def readings(self) -> Iterator[Reading]:
        """None before the first step."""
        line = self._last
        if line is None:
            return
        yield Reading(catalog.TRAINER_VERSION, line.version)
        yield Reading(catalog.TRAINER_STEPS, self._count)
        for activity, seconds in self._seconds.items():
            yield Reading(catalog.TRAINER_SECONDS, seconds, (activity,))
        for staleness, tokens in sorted(self._tokens.items()):
            yield Reading(catalog.TRAINER_TOKENS, tokens, (staleness,))
        yield Reading(catalog.TRAINER_MASKED, self._masked)
        for cause, count in sorted(self._dropped.items()):
            yield Reading(catalog.TRAINER_DROPPED, count, (cause,))
        yield Reading(catalog.TRAINER_COMMITS, line.commits)
        yield Reading(catalog.TRAINER_RATE, line.tokens_per_s)
        yield Reading(catalog.TRAINER_STALENESS, line.staleness_mean)
        yield Reading(catalog.TRAINER_STALEST, line.staleness_max)
        if line.effective_samples is not None:
            yield Reading(catalog.TRAINER_ESS, line.effective_samples)
        yield Reading(catalog.TRAINER_REWARD, line.reward)
        yield Reading(catalog.TRAINER_SUCCESS, line.success)

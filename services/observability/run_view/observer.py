"""Observer: takes snapshots of a run from the files of its folder, the wait board and each engine."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
from pydantic import ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.host.files import LineTail
from services.host.run_folder import RunFolder
from services.observability.run_view.snapshot import History, Snapshot
from services.policies.progress.bottleneck import Bound, Load, find_bound
from services.policies.progress.phase import LOOKED_BACK, Part, phase_of
from services.run_store.rollouts.samples import newest_sample
from services.run_store.rollouts.search import RolloutReader
from services.run_store.status import EvaluationStore, Wait, read_waits
from services.wire.errors import UNDECODABLE, RollmeshError
from services.wire.rollout_api import EngineReport, Evaluation
from services.wire.run_metrics import (
    AFTER,
    BEFORE,
    WARM_START,
    Sample,
    StepMetrics,
    WorkProgress,
    decode_step_metrics,
)

LOOKS = 40
"""At engines, that what bounds a run is judged by: the last 20 s."""


Told = tuple[dict[str, Wait], Evaluation | None]
"""Component → what it waits for, and the newest evaluation beside training."""


class MetricsTail:
    """Reads a growing `metrics.jsonl` from where it stopped last time."""

    def __init__(self, path: Path) -> None:
        self._tail = LineTail(path)
        self.latest: StepMetrics | None = None
        self.recent: deque[StepMetrics] = deque(maxlen=LOOKED_BACK)
        self.history = History()

    def read(self) -> StepMetrics | None:
        """The newest whole line, or None before the first."""
        for line in map(decode_step_metrics, self._tail.new_lines()):
            if line is not None:
                self.latest = line
                self.recent.append(line)
                self.history.add(line)
        return self.latest


class _NewestSample:
    """The newest rollout that is kept; read again where the file has grown."""

    def __init__(self, folder: Path) -> None:
        self._reader = RolloutReader(folder)
        self._seen: object = None
        self._latest: Sample | None = None

    async def read(self) -> Sample | None:
        written = self._reader.written()
        if written != self._seen:
            with suppress(RollmeshError):
                self._latest = await asyncio.to_thread(newest_sample, self._reader) or self._latest
                self._seen = written
        return self._latest


class Observer:
    """Takes snapshots. A part that cannot be read at the moment is left out, for the view must not end a run."""

    def __init__(
        self,
        *,
        began_at: float,
        steps: int,
        k: int,
        folder: RunFolder | None,
        run_id: str,
        redis: Redis,
        http: httpx.AsyncClient,
        urls: Sequence[str] = (),
        engines_every_s: float = 0.0,
    ) -> None:
        """`began_at` in Unix seconds; `urls`: of the rollout servers. `folder`: None where this machine has none.
        `engines_every_s`: for so long what engines said stands, while they are the same ones."""
        self._began_at, self._steps, self._k = began_at, steps, k
        self._folder = folder
        self._metrics = None if folder is None else MetricsTail(folder.metrics)
        self._samples = None if folder is None else _NewestSample(folder.rollouts)
        self._run_id, self._redis, self._http = run_id, redis, http
        self.urls = urls
        self._engines_every_s = engines_every_s
        self._asked: Sequence[str] = ()
        self._reports: list[EngineReport] = []
        self.engines_at = 0.0
        """When engines were last asked (monotonic clock)."""
        self._looks: deque[tuple[bool, bool]] = deque(maxlen=LOOKS)

    async def collect(self, starting: Sequence[Part] = (), told: Told | None = None) -> Snapshot:
        """`starting`: what the run consists of when it starts. `told`: what Redis has said to the caller already."""
        asked_at = self.engines_at
        engines, (waits, evaluation), sample = await asyncio.gather(
            self._engines(), self._told() if told is None else _at_once(told), self._sample()
        )
        tail, folder, now = self._metrics, self._folder, time.time()
        metrics = None if tail is None else tail.read()
        progress = None if folder is None else _read_progress(folder.progress)
        answers = None
        if progress is not None and progress.what in (BEFORE, AFTER):
            # They begin together and end together: a count alone would stand still, and then be done.
            running = sum(engine.running for engine in engines)
            answers = Part(
                progress.what, progress.done, progress.total, f"{running} being generated" if running else ""
            )
        phase = phase_of(
            [_warming(part, progress) for part in starting],
            step=0 if metrics is None else metrics.step,
            steps=self._steps,
            evaluated_before=folder is not None and folder.evaluation_before.exists(),
            answers=answers,
            trainer_waits="trainer" in waits,
        )
        if phase.name == "training" and metrics is not None and engines and self.engines_at != asked_at:
            generating = any(engine.running for engine in engines)
            self._looks.append((generating, any(engine.admission_waiting for engine in engines)))
        return Snapshot(
            steps=self._steps,
            k=self._k,
            at=now,
            elapsed_s=now - self._began_at,
            phase=phase,
            metrics=metrics,
            history=History() if tail is None else tail.history,
            engines=engines,
            waits=waits,
            evaluation=evaluation,
            sample=sample,
            bound=bound_of(tail.recent, self._looks, self._k) if tail and phase.name == "training" else None,
        )

    async def _sample(self) -> Sample | None:
        return None if self._samples is None else await self._samples.read()

    async def _engines(self) -> list[EngineReport]:
        now, urls = time.monotonic(), list(self.urls)
        if not self.engines_at or now - self.engines_at >= self._engines_every_s or urls != self._asked:
            reports = await asyncio.gather(*(read_engine(self._http, url) for url in urls))
            self._reports = [report for report in reports if report is not None]
            self._asked, self.engines_at = urls, now
        return self._reports

    async def _told(self) -> Told:
        waits, evaluation = await asyncio.gather(self._waits(), self._evaluation())
        return waits, evaluation

    async def _waits(self) -> dict[str, Wait]:
        try:
            async with asyncio.timeout(1.0):
                return await read_waits(self._redis, self._run_id)
        except (RedisError, OSError, TimeoutError):
            return {}

    async def _evaluation(self) -> Evaluation | None:
        try:
            async with asyncio.timeout(1.0):
                return next(reversed(await EvaluationStore(self._redis, self._run_id).read()), None)
        except (RedisError, OSError, TimeoutError):
            return None


async def _at_once(told: Told) -> Told:
    return told


def bound_of(recent: Collection[StepMetrics], looks: Collection[tuple[bool, bool]], k: int) -> Bound | None:
    """What bounds a run, by its last steps and looks at its engines: whether any generated, whether groups waited."""
    took = sum(line.step_ms for line in recent)
    if not took or not looks:
        return None
    return find_bound(
        Load(
            steps=len(recent),
            waited=sum(line.wait_ms for line in recent) / took,
            published=sum(line.publish_ms for line in recent) / took,
            looks=len(looks),
            generating=sum(generating for generating, _ in looks) / len(looks),
            held_back=sum(held for _, held in looks) / len(looks),
            k=k,
        )
    )


def _read_progress(path: Path) -> WorkProgress | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=WorkProgress)
    except (OSError, *UNDECODABLE):
        return None


def _warming(part: Part, progress: WorkProgress | None) -> Part:
    """The warm start with what its last job has done so far."""
    if part.name != WARM_START or part.ended or progress is None or progress.what != WARM_START:
        return part
    return replace(part, done=part.done + min(1.0, progress.done / max(1, progress.total)))


async def read_engine(http: httpx.AsyncClient, url: str) -> EngineReport | None:
    """`GET /engine`, or None while the server cannot answer it."""
    try:
        response = await http.get(f"{url}/engine", timeout=2.0)
        return EngineReport.model_validate_json(response.content) if response.status_code == 200 else None
    except (httpx.HTTPError, ValidationError):
        return None

"""What the live view shows, gathered cheaply: new lines of the metrics, the wait board, each engine's report."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import msgspec
from pydantic import ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.line_tail import LineTail
from services.waits import Wait, read_waits
from services.wire.rollout_api import EngineReport


class StepMetrics(msgspec.Struct, frozen=True):
    """The part of a line of `metrics.jsonl` that is shown. Lengths in sampled tokens, staleness in optimizer steps."""

    step: int
    success: float = 0.0
    response_length: float = 0.0
    tokens_per_s: float = 0.0
    staleness_mean: float = 0.0
    staleness_max: int = 0


@dataclass(frozen=True)
class Snapshot:
    """One look at the mesh. `metrics` is None before the first step; `engines` holds those that answered.

    `starting`: what the start of the run still waits for.
    """

    elapsed_s: float
    metrics: StepMetrics | None = None
    engines: Sequence[EngineReport] = ()
    waits: dict[str, Wait] = field(default_factory=dict)
    starting: Sequence[str] = ()

    @property
    def stall_ms(self) -> float | None:
        """The last commit's stall, on the engine where it was longest."""
        return max((engine.stalls_ms[-1] for engine in self.engines if engine.stalls_ms), default=None)


class MetricsTail:
    """Reads a growing `metrics.jsonl` from where it stopped last time."""

    def __init__(self, path: Path) -> None:
        self._tail = LineTail(path)
        self._decoder = msgspec.json.Decoder(StepMetrics)
        self.latest: StepMetrics | None = None

    def look(self) -> StepMetrics | None:
        """The newest whole line, or None before the first."""
        if lines := self._tail.new_lines():
            self.latest = self._decoder.decode(lines[-1])
        return self.latest


class Observer:
    """Takes snapshots; a part that cannot be had at the moment is left out, for the view must not end a run."""

    def __init__(
        self, *, began_at: float, metrics: Path, run_id: str, redis: Redis, http: httpx.AsyncClient, urls: Sequence[str]
    ) -> None:
        """`began_at` in Unix seconds."""
        self._began_at = began_at
        self._tail = MetricsTail(metrics)
        self._run_id = run_id
        self._redis = redis
        self._http = http
        self._urls = urls

    async def look(self, starting: Sequence[str] = ()) -> Snapshot:
        engines, waits = await asyncio.gather(self._engines(), self._waits())
        return Snapshot(time.time() - self._began_at, self._tail.look(), engines, waits, starting)

    async def _engines(self) -> list[EngineReport]:
        reports = await asyncio.gather(*(read_engine(self._http, url) for url in self._urls))
        return [report for report in reports if report is not None]

    async def _waits(self) -> dict[str, Wait]:
        try:
            async with asyncio.timeout(1.0):
                return await read_waits(self._redis, self._run_id)
        except (RedisError, OSError, TimeoutError):
            return {}


async def read_engine(http: httpx.AsyncClient, url: str) -> EngineReport | None:
    """`GET /engine`, or None while the server cannot answer it."""
    try:
        response = await http.get(f"{url}/engine", timeout=2.0)
        return EngineReport.model_validate_json(response.content) if response.status_code == 200 else None
    except (httpx.HTTPError, ValidationError):
        return None

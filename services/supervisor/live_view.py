"""Live view of a run: a table on a terminal, plain lines where there is none."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import httpx
from pydantic import ValidationError
from redis.asyncio import Redis
from redis.exceptions import RedisError
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from services.host.files import LineTail
from services.run_store.evaluations import EvaluationStore
from services.run_store.status import Wait, read_waits
from services.wire.rollout_api import EngineReport, Evaluation
from services.wire.run_metrics import StepMetrics, decode_step_metrics

PLAIN_EVERY_S = 5.0
BAR = 24


class View(Protocol):
    """Where a run shows itself. `say` is for events, `show` for the state, at most a few times a second."""

    def __enter__(self) -> View: ...

    def __exit__(self, *_: object) -> None: ...

    def say(self, line: str) -> None: ...

    def show(self, snapshot: Snapshot) -> None: ...


def make_view(console: Console, steps: int, k: int, *, plain: bool) -> View:
    """A live view on a terminal, plain lines elsewhere or on request."""
    return PlainView(console, steps, k) if plain or not console.is_terminal else LiveView(console, steps, k)


class PlainView:
    """A line an event, and one every few seconds while training."""

    def __init__(self, console: Console, steps: int, k: int) -> None:
        self._console, self._steps, self._k = console, steps, k
        self._began = self._said_at = time.monotonic()
        self._said_step = 0
        self._warned: set[str] = set()

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None: ...

    def say(self, line: str) -> None:
        self._console.print(f"{time.monotonic() - self._began:6.1f} s  {line}", markup=False, highlight=False)

    def show(self, snapshot: Snapshot) -> None:
        step = 0 if snapshot.metrics is None else snapshot.metrics.step
        due = time.monotonic() - self._said_at >= PLAIN_EVERY_S or (step == self._steps and step != self._said_step)
        if not due:
            return
        self._said_at, self._said_step = time.monotonic(), step
        facts = [f"{name} {value}" for name, value in _facts(snapshot, self._steps, self._k)]
        waits = [f"{component} waits for {what}" for component, what in _waits(snapshot)]
        self.say(" · ".join(facts + waits))
        for sign, words in _warnings(snapshot):
            if sign not in self._warned:
                self.say(f"this run may not learn ({sign}): {words}")
        self._warned = {sign for sign, _ in _warnings(snapshot)}


class LiveView:
    """One table that is redrawn in place; events scroll above it."""

    def __init__(self, console: Console, steps: int, k: int) -> None:
        self._steps, self._k = steps, k
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        self._live.console.print(line, markup=False, highlight=False)

    def show(self, snapshot: Snapshot) -> None:
        table = Table.grid(padding=(0, 2))
        table.add_row(Text("step", style="bold"), _bar(snapshot, self._steps))
        for name, value in _facts(snapshot, self._steps, self._k)[1:]:
            table.add_row(Text(name, style="bold"), value)
        for component, what in _waits(snapshot):
            table.add_row(Text(component, style="yellow"), Text(f"waits for {what}", style="yellow"))
        for sign, words in _warnings(snapshot):
            table.add_row(Text("may not learn", style="red"), Text(f"{sign}: {words}", style="red"))
        self._live.update(table, refresh=True)


def _bar(snapshot: Snapshot, steps: int) -> Text:
    step = 0 if snapshot.metrics is None else snapshot.metrics.step
    full = BAR * step // max(steps, 1)
    return Text(f"{'█' * full}{'░' * (BAR - full)} {step}/{steps}  {snapshot.elapsed_s:.0f} s", style="green")


def _facts(snapshot: Snapshot, steps: int, k: int) -> list[tuple[str, str]]:
    metrics = snapshot.metrics
    if metrics is None:
        starting = [("starting", ", ".join(snapshot.starting))] if snapshot.starting else []
        return [("step", f"0/{steps}"), *starting, *_evaluating(snapshot, "before")]
    stall, found = snapshot.stall_ms, snapshot.evaluation
    held_out = []
    if found is not None:
        held_out = [("held out", f"{found.success:.2f} ({found.low:.2f} to {found.high:.2f}) at v{found.due}")]
    return [
        ("step", f"{metrics.step}/{steps}"),
        ("success", f"{metrics.success:.2f}"),
        *_by_task({name: one.success for name, one in metrics.tasks.items()}),
        *held_out,
        ("length", f"{metrics.response_length:.1f}"),
        ("tokens/s", f"{metrics.tokens_per_s:,.0f}"),
        ("staleness", f"{metrics.staleness_mean:.2f} (max {metrics.staleness_max} of {k})"),
        ("commit", f"{metrics.flip_ms:.1f} ms" + ("" if stall is None else f", gap {stall:.1f} ms")),
        ("served", " ".join(f"{engine.server_id}:v{engine.policy_version}" for engine in snapshot.engines) or "–"),
        *(_evaluating(snapshot, "after") if metrics.step >= steps and "trainer" not in snapshot.waits else []),
    ]


def _evaluating(snapshot: Snapshot, when: str) -> list[tuple[str, str]]:
    if when == "before" and not snapshot.evaluates_before:
        return []
    generated = sum(engine.tokens_generated for engine in snapshot.engines)
    return [("evaluation", f"of held-out problems, {when} training: {generated:,} tokens generated")]


def _by_task(success: Mapping[str, float]) -> list[tuple[str, str]]:
    """Nothing of a single task: it is the whole."""
    shown = ", ".join(f"{name} {value:.2f}" for name, value in success.items())
    return [("by task", shown)] if len(success) > 1 else []


def _waits(snapshot: Snapshot) -> list[tuple[str, str]]:
    now = time.time()
    return [
        (component, f"{wait.waiting_for} ({max(0.0, now - wait.since):.1f} s)")
        for component, wait in sorted(snapshot.waits.items())
        # Its first batch comes after the evaluation, which is told of itself.
        if not (snapshot.evaluates_before and component == "trainer")
    ]


def _warnings(snapshot: Snapshot) -> list[tuple[str, str]]:
    return [] if snapshot.metrics is None else sorted(snapshot.metrics.warnings.items())


@dataclass(frozen=True)
class Snapshot:
    """What the live view shows at one moment. `metrics` is None before the first step; `engines` holds those that answered.

    `starting`: what the start of the run still waits for.
    """

    elapsed_s: float
    metrics: StepMetrics | None = None
    engines: Sequence[EngineReport] = ()
    waits: dict[str, Wait] = field(default_factory=dict)
    starting: Sequence[str] = ()
    evaluation: Evaluation | None = None
    """The newest one beside training."""
    evaluates_before: bool = False
    """Everything has started, and held-out problems are answered before the first group is opened."""

    @property
    def stall_ms(self) -> float | None:
        """The last commit's stall, on the engine where it was longest."""
        return max((engine.stalls_ms[-1] for engine in self.engines if engine.stalls_ms), default=None)


class MetricsTail:
    """Reads a growing `metrics.jsonl` from where it stopped last time."""

    def __init__(self, path: Path) -> None:
        self._tail = LineTail(path)
        self.latest: StepMetrics | None = None

    def read(self) -> StepMetrics | None:
        """The newest whole line, or None before the first."""
        if lines := self._tail.new_lines():
            self.latest = decode_step_metrics(lines[-1]) or self.latest
        return self.latest


class Observer:
    """Takes snapshots from metrics.jsonl, the wait board and each engine.

    A part that cannot be read at the moment is left out, for the view must not end a run.
    """

    def __init__(
        self,
        *,
        began_at: float,
        metrics: Path,
        evaluated: Path,
        run_id: str,
        redis: Redis,
        http: httpx.AsyncClient,
        urls: Sequence[str],
    ) -> None:
        """`began_at` in Unix seconds. `evaluated`: there once the evaluation before training has been made."""
        self._began_at = began_at
        self._tail = MetricsTail(metrics)
        self._evaluated = evaluated
        self._run_id = run_id
        self._redis = redis
        self._http = http
        self._urls = urls

    async def collect(self, starting: Sequence[str] = ()) -> Snapshot:
        engines, waits, evaluation = await asyncio.gather(self._engines(), self._waits(), self._evaluation())
        elapsed_s, metrics = time.time() - self._began_at, self._tail.read()
        evaluates_before = metrics is None and not starting and not self._evaluated.exists()
        return Snapshot(elapsed_s, metrics, engines, waits, starting, evaluation, evaluates_before)

    async def _engines(self) -> list[EngineReport]:
        reports = await asyncio.gather(*(read_engine(self._http, url) for url in self._urls))
        return [report for report in reports if report is not None]

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


async def read_engine(http: httpx.AsyncClient, url: str) -> EngineReport | None:
    """`GET /engine`, or None while the server cannot answer it."""
    try:
        response = await http.get(f"{url}/engine", timeout=2.0)
        return EngineReport.model_validate_json(response.content) if response.status_code == 200 else None
    except (httpx.HTTPError, ValidationError):
        return None

"""Trainer telemetry: health probes and /metrics on a port of its own, and the status of its last steps in Redis.

    training thread ──► metrics.jsonl ──a second later──► totals ──► /metrics, the status in Redis (`rollmesh status`)

It costs the training thread nothing: metrics.jsonl, which is written anyway, is read on the background loop. A trainer
that was restarted goes on with the totals of the whole run.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import msgspec
import structlog
from fastapi import FastAPI
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.config.settings import RunSettings
from services.host.files import LineTail
from services.http.app import Stop, make_app, make_server, open_port
from services.http.auth import AuthMiddleware, Authorizer
from services.observability import catalog
from services.observability.metrics import Metrics, Reading
from services.run_store.discovery import Heartbeat, ServiceRecord, StoreState, announced, weight_bus_record
from services.run_store.ledger import Accounts, Ledger
from services.run_store.status import EvaluationStore, TrainerStatus, Wait, post_trainer_status, read_waits
from services.security.permissions import NO_KEYS, Keys, lacking
from services.security.tls import PLAIN, Identity, Tls
from services.wire.errors import DeadlineError, UsageError
from services.wire.rollout_api import Evaluation
from services.wire.run_metrics import StepMetrics, decode_step_metrics
from trainer.io_loop import Background
from trainer.metrics.step import over_steps

READ_EVERY_S = 1.0
CLOSE_WITHIN_S = 10.0
NAME = "trainer"

_log = structlog.get_logger()


def open_telemetry(
    redis: Redis,
    run_id: str,
    bus_url: str,
    metrics: Path,
    settings: RunSettings,
    background: Background,
    stack: ExitStack,
    keys: Keys = NO_KEYS,
    tls: Tls = PLAIN,
) -> Telemetry:
    """Serve the trainer's telemetry until `stack` is closed. `keys`: what opens /metrics; `tls`: what its port shows.

    Raises UsageError for a port that is taken, for an address other than loopback without a key, and for a certificate that
    is not for that address.
    """
    host = settings.telemetry.trainer_host
    listener = open_port(host, settings.telemetry.trainer_port, lacking=lacking(keys, "trainer"))
    try:
        url = tls.own_url(host, listener.getsockname()[1])
    except UsageError:
        listener.close()
        raise
    records = (
        ServiceRecord(name=NAME, kind="trainer", url=url),
        weight_bus_record(bus_url, told_by=NAME),
    )
    telemetry = Telemetry(
        redis,
        run_id,
        metrics,
        StepTotals(settings.steps, settings.k),
        Authorizer(keys),
        tls.identity,
        evaluates=settings.evaluation.every > 0,
    )
    background.spawn(telemetry.run(listener, records), "telemetry", essential=False)

    def close() -> None:
        try:
            background.call(telemetry.close(), "closing telemetry", CLOSE_WITHIN_S)
        except DeadlineError as error:
            _log.warning("telemetry is not closed cleanly", why=str(error))

    stack.callback(close)
    return telemetry


class Telemetry:
    """Lives on the background loop."""

    def __init__(
        self,
        redis: Redis,
        run_id: str,
        metrics: Path,
        totals: StepTotals,
        authorizer: Authorizer,
        identity: Identity | None = None,
        *,
        evaluates: bool = False,
    ) -> None:
        """`evaluates`: whether the run is evaluated beside training."""
        self._redis, self._run_id, self._identity = redis, run_id, identity
        self._evaluates = evaluates
        self._tail, self._totals = LineTail(metrics), totals
        self._authorizer = authorizer
        self._wait: Wait | None = None
        self._ending, self._ended = asyncio.Event(), asyncio.Event()
        self._failing = False
        self._ledger, self._accounts = Ledger(redis, run_id), Accounts()
        self._heartbeat: Heartbeat | None = None
        self._evaluations = EvaluationStore(redis, run_id)
        self.evaluations: Sequence[Evaluation] = ()
        """Those that were told so far. For any thread."""
        self._unpublished = False
        """Steps were made that the status in Redis does not hold yet."""

    async def run(self, listener: socket.socket, records: tuple[ServiceRecord, ...]) -> None:
        """Serve and publish until `close`."""
        metrics = Metrics()
        metrics.read(self._readings)
        scraping = self._authorizer.of("metrics")
        app = make_app("trainer", version("rollmesh"), _nothing, self._not_ready, metrics, metrics_access=scraping)
        app.add_middleware(AuthMiddleware, authorizer=self._authorizer)
        server = make_server(app, Stop(), shutdown_s=1, identity=self._identity)
        serving = asyncio.create_task(server.serve(sockets=[listener]), name="telemetry")
        try:
            async with announced(self._redis, self._run_id, *records) as self._heartbeat:
                while not self._ending.is_set():
                    await self._read()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(READ_EVERY_S):
                            await self._ending.wait()
                await self._read()
        finally:
            server.should_exit = True
            await serving
            self._ended.set()

    @property
    def store(self) -> StoreState | None:
        """What Redis said of itself at the last heartbeat. For any thread."""
        return None if self._heartbeat is None else self._heartbeat.store

    async def close(self) -> None:
        """Publish the last steps, then end."""
        self._ending.set()
        await self._ended.wait()

    async def _read(self) -> None:
        lines = self._tail.new_lines()
        self._totals.add(lines)
        self._unpublished = self._unpublished or bool(lines)
        try:
            self._wait = (await read_waits(self._redis, self._run_id)).get(NAME)
            self._accounts = await self._ledger.accounts()
            if self._evaluates:
                self.evaluations = await self._evaluations.read()
            status = self._totals.status()
            if self._unpublished and status is not None:
                await post_trainer_status(self._redis, self._run_id, status)
                self._unpublished = False
            self._failing = False
        except (RedisError, OSError, msgspec.MsgspecError) as error:
            if not self._failing:
                _log.warning("cannot publish the trainer's status", why=repr(error))
            self._failing = True

    def _readings(self) -> Iterator[Reading]:
        yield from self._totals.readings()
        yield Reading(catalog.TRAINER_UNACCOUNTED, self._accounts.unaccounted)
        yield Reading(catalog.TRAINER_CORRECTED, self._accounts.corrected)
        yield Reading(catalog.TRAINER_WAITING, 0.0 if self._wait is None else max(0.0, time.time() - self._wait.since))

    def _not_ready(self) -> list[str]:
        """Ready from the first step on: waiting for a batch is what a trainer normally does."""
        if self._totals.any:
            return []
        return ["no optimizer step yet", *([] if self._wait is None else [f"waits for {self._wait.waiting_for}"])]


@asynccontextmanager
async def _nothing(_: FastAPI) -> AsyncIterator[None]:
    yield


RECENT_STEPS = 20
"""How many steps the busy share is of."""


class StepTotals:
    """Totals over the lines of metrics.jsonl, for Prometheus and the status in Redis. `steps`, `k`: the run's."""

    def __init__(self, steps: int, k: int) -> None:
        self._steps, self._k = steps, k
        self._last: StepMetrics | None = None
        self._recent: deque[StepMetrics] = deque(maxlen=RECENT_STEPS)
        self._count = 0
        self._masked = 0
        self._seconds: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()

    @property
    def any(self) -> bool:
        return self._last is not None

    def add(self, lines: Sequence[bytes]) -> None:
        """Lines as they stand in the file, in order; those that cannot be read count for nothing."""
        for line in filter(None, map(decode_step_metrics, lines)):
            self._last = line
            self._recent.append(line)
            self._count += 1
            self._masked += line.masked_tokens
            self._tokens.update(line.staleness_histogram)
            self._dropped.update(line.dropped)
            for activity in ("wait", "pack", "train", "publish"):
                self._seconds[activity] += getattr(line, f"{activity}_ms") / 1e3

    def status(self) -> TrainerStatus | None:
        """None before the first step."""
        line = self._last
        if line is None:
            return None
        whole = sum(each.step_ms for each in self._recent)
        waited = sum(each.wait_ms for each in self._recent)
        return TrainerStatus(
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
            warnings=line.warnings,
            tasks=over_steps([each for each in self._recent if each.epoch == 1]),
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
        for task, one in line.tasks.items():
            yield Reading(catalog.TRAINER_TASK_SUCCESS, one.success, (task,))
            yield Reading(catalog.TRAINER_TASK_REWARD, one.reward, (task,))
            yield Reading(catalog.TRAINER_TASK_LENGTH, one.response_length, (task,))

"""Start, serving, drain and shutdown of one rollout server, and the tasks that run meanwhile.

starting ── model folder ─► engine ─► ledger ─► bus, registry ──► serving ──► draining ──► closed
    └── anything fails ──► the process ends and says why
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import structlog
from fastapi import FastAPI
from redis.asyncio import Redis
from redis.exceptions import RedisError

from rollout_server.chat.tokenizer import Renderer
from rollout_server.completions.base import AnswerDeps, AnswerService, Recorded
from rollout_server.completions.service import CompletionServices
from rollout_server.completions.turns import TurnTaker
from rollout_server.engines.base import Engine
from rollout_server.journal.journal import Journal
from rollout_server.lifecycle.admission import AdmissionGate
from rollout_server.lifecycle.drain import Drainer, EngineWatch
from rollout_server.lifecycle.expire import expire_idle
from rollout_server.lifecycle.finish import Finisher
from rollout_server.lifecycle.open import SessionOpener
from rollout_server.lifecycle.publish import Publisher
from rollout_server.lifecycle.runners import RunnerWatch
from rollout_server.lifecycle.takeover import Takeover, incarnation_of
from rollout_server.lifecycle.trajectory import Origin
from rollout_server.sessions.access import Access
from rollout_server.sessions.group import GroupRegistry
from services.config.settings import RunSettings
from services.host.aio import first_failure, telling
from services.host.run_folder import wait_for_model
from services.http.app import Stop
from services.http.auth import Authorizer
from services.observability.tracing import NO_TRACING, Tracing
from services.policies.admission import StoreUse, store_use
from services.run_store.client import connect
from services.run_store.discovery import Heartbeat, ServerRecord, ServiceRegistry, weight_bus_record
from services.run_store.ledger import Ledger
from services.run_store.publishing import TrajectoryWriter
from services.run_store.runners import RunnerRegistry
from services.run_store.status import EvaluationStore, WaitBoard
from services.run_store.stream import TrajectoryLog
from services.security.keys import SessionKeys, secret_of_run
from services.security.permissions import NO_KEYS, Keys
from services.security.tls import PUBLIC, Trust
from services.wire.errors import ConflictError, DrainingError, NotReadyError, RollmeshError
from weight_bus.client.membership import Bus, Membership

CLOSE_WITHIN_S = 5.0
DRAIN_WITHIN_S = 3.0
"""After which calls that still go on are ended; their clients send them again."""
_PAUSE_POLL_S = 0.02

_log = structlog.get_logger()
T = TypeVar("T")


@dataclass(frozen=True)
class ServerPlan:
    """What a rollout server is told at its start. `url`: where agents and the weight bus reach it.

    `keys`: what callers must show (`services.security.permissions`). Without a session key of its own the run's is kept
    in Redis.
    """

    run_id: str
    server_id: str
    url: str
    redis_url: str
    model: Path
    settings: RunSettings
    keys: Keys = NO_KEYS
    trust: Trust = PUBLIC
    """Which certificates of other servers it takes."""
    bus_url: str | None = None
    """Told to the service registry, with the server: the bus speaks to no Redis."""
    tracing: Tracing = NO_TRACING


@dataclass(frozen=True)
class Parts:
    """What there is once the engine is up."""

    engine: Engine
    ledger: Ledger
    gate: AdmissionGate
    registry: GroupRegistry
    access: Access
    opener: SessionOpener
    journal: Journal
    takeover: Takeover
    drainer: Drainer
    heartbeat: Heartbeat
    renderer: Renderer
    turns: TurnTaker
    answer_service: AnswerService
    completions: CompletionServices
    publisher: Publisher
    finisher: Finisher
    runners: RunnerWatch
    evaluations: EvaluationStore
    log: TrajectoryLog


class RolloutServer:
    """Owns the parts and their tasks. `stop` ends the process when a part fails for good."""

    def __init__(self, plan: ServerPlan, engine: Engine, bus: Bus | None, stop: Stop) -> None:
        self.plan = plan
        self.authorizer = Authorizer(plan.keys)
        self._engine = engine
        self._stop = stop
        self._membership = (
            None
            if bus is None
            else Membership(
                bus,
                plan.server_id,
                plan.url,
                lambda: engine.policy_version,
                lambda: engine.status().staged_version,
                lambda: engine.status().ranks,
            )
        )
        self._parts: Parts | None = None
        self._phase = "starting"
        self._incarnation = secrets.token_hex(8)
        self._draining: asyncio.Task[bool] | None = None
        self._heartbeat: Heartbeat | None = None
        self._cpu_when_ready = 0.0
        stop.on_stop = self._drain

    def ready(self, part: Callable[[Parts], T]) -> Callable[[], T]:
        """A getter of one part, for code that needs that one alone. It raises NotReadyError before the engine is up."""
        return lambda: part(self._ready_parts())

    def _ready_parts(self) -> Parts:
        if self._parts is None:
            raise NotReadyError(f"rollout server {self.plan.server_id} is {self._phase}", "try again")
        return self._parts

    def check_taking_calls(self) -> None:
        """Raise DrainingError once the server drains: another one takes over what it holds."""
        if self._phase == "draining":
            raise DrainingError(f"rollout server {self.plan.server_id} is shutting down", "use another server")

    async def until_accepting(self) -> None:
        """Return once the engine takes requests. Raises DrainingError once the server drains."""
        self.check_taking_calls()
        while self._engine.status().paused:
            await asyncio.sleep(_PAUSE_POLL_S)
            self.check_taking_calls()

    async def drain(self) -> None:
        """Begin to drain, in the background. Raises ConflictError where no other server could take the groups over."""
        if self._draining is None:
            if not await self._ready_parts().drainer.others():
                raise ConflictError("no other rollout server is serving", "start one, or end this one with SIGTERM")
            self._start_draining()

    def fail(self, error: RollmeshError) -> None:
        """End the process: a part has failed for good."""
        self._stop.fail(error)

    def http_cpu_s(self) -> float:
        """CPU seconds of the event loop's thread since the server was ready. For the event loop."""
        return time.thread_time() - self._cpu_when_ready

    def not_ready(self) -> list[str]:
        """Why the server is not ready; nothing when it is."""
        if self._parts is None or self._phase == "draining":
            return [self._phase]
        reasons = [self._engine.status().failure, self._membership.not_ready() if self._membership else None]
        return [reason for reason in reasons if reason is not None]

    @asynccontextmanager
    async def lifespan(self, _: FastAPI) -> AsyncIterator[None]:
        """The application's lifespan: the port answers at once, the rest starts behind it."""
        redis = connect(self.plan.redis_url)
        life = asyncio.create_task(self._live(redis), name="rollout server")
        try:
            yield
        finally:
            life.cancel()
            with suppress(asyncio.CancelledError):
                await life
            await self._close(redis)

    async def _live(self, redis: Redis) -> None:
        try:
            self._parts = parts = await self._start(redis)
            self._phase = "serving"
            self._cpu_when_ready = time.thread_time()
            timeout_s = self.plan.settings.rollout.group_timeout_s
            with first_failure():
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(parts.journal.run(), name="journal")
                    tasks.create_task(parts.heartbeat.run(), name="heartbeat")
                    tasks.create_task(parts.takeover.run(), name="takeover")
                    watch = EngineWatch(self._engine, parts.takeover, parts.drainer, parts.heartbeat)
                    tasks.create_task(watch.run(), name="engine watch")
                    tasks.create_task(parts.gate.run(), name="admission")
                    tasks.create_task(parts.publisher.run(), name="publisher")
                    tasks.create_task(expire_idle(parts.registry, parts.finisher, timeout_s), name="expiry")
                    tasks.create_task(parts.runners.run(), name="runners")
                    tasks.create_task(parts.answer_service.watch(parts.registry, timeout_s), name="call watcher")
                    if self._membership is not None:
                        tasks.create_task(self._membership.run(), name="membership")
        except RollmeshError as error:
            self._stop.fail(error)
        except RedisError as error:
            self._stop.fail(RollmeshError(f"Redis failed while the server started ({error})", "see that it runs"))
        except Exception as error:  # noqa: BLE001 - a bug: said with its traceback, and the process must end
            _log.exception("rollout server failed")
            self._stop.fail(RollmeshError(f"rollout server {self.plan.server_id} failed ({error!r})", "see its log"))

    async def _start(self, redis: Redis) -> Parts:
        plan, started = self.plan, time.monotonic()
        self._phase = f"waiting for the model folder {plan.model}"
        await wait_for_model(plan.model, plan.settings.model.wait_timeout_s)
        self._phase = "starting its engine"
        at_most_s = plan.settings.rollout.start_timeout_s
        # `start` before anything that might start a thread: vLLM forks.
        await telling(
            self._engine.start(),
            lambda passed: _log.info("waiting", waiting_for="its engine", after_s=round(passed), at_most_s=at_most_s),
        )
        renderer = Renderer.from_folder(plan.model, lambda: self._engine.max_model_len)
        self._phase = "waiting for Redis"
        ledger, registry = Ledger(redis, plan.run_id), GroupRegistry()
        base_version = await ledger.begin(self._engine.policy_version)
        given = plan.keys.session
        secret = await ledger.session_secret() if given is None else secret_of_run(given, plan.run_id)
        access = Access(SessionKeys(secret), self.authorizer)
        servers = ServiceRegistry(redis, plan.run_id)
        journal = Journal(
            redis, plan.run_id, incarnation_of(self._record(registry)), plan.server_id, registry.forget_open
        )
        takeover = Takeover(registry, journal, ledger, servers, plan.server_id, plan.trust)
        bus = [] if plan.bus_url is None else [weight_bus_record(plan.bus_url, told_by=plan.server_id)]
        self._heartbeat = heartbeat = Heartbeat(servers, lambda: [self._record(registry), *bus])
        log, origin = (
            TrajectoryLog(redis, plan.run_id),
            Origin(plan.run_id, plan.server_id, renderer.vocabulary_digest()),
        )
        writer = TrajectoryWriter(redis, plan.run_id, journal.owner, blob_bytes=plan.settings.rollout.blob_mib << 20)
        publisher = Publisher(writer, ledger)
        finisher = Finisher(registry, publisher, ledger, journal, log, origin)
        gate = AdmissionGate(
            ledger,
            WaitBoard(redis, plan.run_id, plan.server_id),
            server_id=plan.server_id,
            rules=plan.settings.admission_rules(base_version),
            engine_version=lambda: self._engine.policy_version,
            store=self._store_use,
        )
        # Before it holds anything: what an unknown server holds is taken for an orphan.
        await heartbeat.announce()
        _log.info(
            "serving", url=plan.url, version=self._engine.policy_version, after_s=round(time.monotonic() - started, 2)
        )
        return Parts(
            engine=self._engine,
            ledger=ledger,
            gate=gate,
            registry=registry,
            access=access,
            opener=SessionOpener(
                registry, gate, ledger, journal, takeover, plan.settings.rollout.group_timeout_s, plan.tracing
            ),
            journal=journal,
            takeover=takeover,
            drainer=Drainer(
                self._engine, registry, journal, servers, plan.server_id, lambda: self._begin_draining(heartbeat)
            ),
            heartbeat=heartbeat,
            renderer=renderer,
            turns=TurnTaker(
                self._engine,
                renderer,
                journal,
                self.until_accepting,
                plan.tracing,
                records=self._recorded(),
            ),
            answer_service=AnswerService(
                AnswerDeps(
                    engine=self._engine,
                    journal=journal,
                    until_accepting=self.until_accepting,
                    partial_every=plan.settings.rollout.draft_every_tokens,
                    tracing=plan.tracing,
                    records=self._recorded(),
                ),
                self.fail,
            ),
            completions=CompletionServices(self._engine, renderer, plan.model, plan.settings.rollout),
            publisher=publisher,
            finisher=finisher,
            runners=RunnerWatch(
                registry, finisher, RunnerRegistry(redis, plan.run_id), servers, plan.settings.rollout.runner_lease_s
            ),
            evaluations=EvaluationStore(redis, plan.run_id),
            log=log,
        )

    def _recorded(self) -> Recorded:
        rollout = self.plan.settings.rollout
        return Recorded(masks=rollout.sampling_masks, experts=rollout.routing_replay)

    def _store_use(self) -> StoreUse | None:
        """What Redis held at the last heartbeat; None where that bounds nothing."""
        store = None if self._heartbeat is None else self._heartbeat.store
        if store is None:
            return None
        return store_use(store.used_bytes, store.most_bytes, self.plan.settings.run_store.max_bytes)

    def _record(self, groups: GroupRegistry) -> ServerRecord:
        """What the service registry is told."""
        status, plan, store = self._engine.status(), self.plan, self._store_use()
        return ServerRecord(
            name=plan.server_id,
            incarnation=self._incarnation,
            url=plan.url,
            state="serving" if self._phase not in ("draining", "closed") and status.failure is None else "draining",
            model=plan.model.name,
            policy_version=status.policy_version,
            kv_policy=plan.settings.rollout.kv_policy,
            running=status.running,
            waiting=status.waiting,
            max_running=plan.settings.rollout.max_running,
            kv_use=status.kv_use,
            open_sessions=groups.live_sessions,
            sampled_tokens=status.tokens_generated,
            store_used=0 if store is None else store.used,
            store_most=0 if store is None else store.most,
        )

    def _drain(self) -> None:
        """Begin to drain, or only say so where nothing has started yet."""
        if self._parts is None:
            self._phase = "draining"
        else:
            self._start_draining()

    def _start_draining(self) -> None:
        if self._draining is None:
            self._phase = "draining"
            self._draining = asyncio.create_task(self._ready_parts().drainer.drain(DRAIN_WITHIN_S), name="draining")

    async def _begin_draining(self, heartbeat: Heartbeat) -> None:
        parts = self._ready_parts()
        parts.gate.close()
        parts.takeover.taking = False
        await heartbeat.announce()

    async def _close(self, redis: Redis) -> None:
        """Leave the bus, drop open groups, close the engine and Redis: each, also where another fails."""
        self._phase = "closed"
        parts = self._parts
        try:
            async with asyncio.timeout(CLOSE_WITHIN_S):
                handed_over = self._draining is not None and await self._draining
                if self._membership is not None:
                    await self._membership.leave()
                if parts is not None:
                    if not handed_over:
                        await parts.finisher.drop_all("shutdown")
                    await parts.heartbeat.withdraw()
        except (RollmeshError, RedisError, TimeoutError) as error:
            _log.warning("not closed cleanly", server=self.plan.server_id, why=repr(error))
        finally:
            if self._draining is not None:
                self._draining.cancel()
            if parts is not None:
                await parts.takeover.aclose()
            await self._engine.close()
            await redis.aclose()
        _log.info("stopped", server=self.plan.server_id)

"""One rollout server's life: from nothing to serving, and back to nothing.

starting ── model folder ─► engine ─► ledger ─► bus ──► serving ──► draining ──► closed
    └── anything fails ──► the process ends and says why
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import structlog
from fastapi import FastAPI
from redis.asyncio import Redis
from redis.exceptions import RedisError

from rollout_server.access import Access
from rollout_server.admission_gate import AdmissionGate
from rollout_server.dialect.caller import Caller
from rollout_server.dialect.dialect import Dialect
from rollout_server.engines.base import Engine
from rollout_server.finishing import Finisher, Origin
from rollout_server.groups import GroupRegistry
from rollout_server.membership import Bus, Membership
from rollout_server.publishing import Publisher
from rollout_server.rendering import Renderer
from rollout_server.session_opening import SessionOpener
from rollout_server.sweeping import sweep
from rollout_server.turns import TurnTaker
from services.app import Stop
from services.ledger import Ledger
from services.model_folder import wait_for_model
from services.redis_client import connect
from services.session_keys import SessionKeys
from services.settings import RunSettings
from services.stream import TrajectoryLog, TrajectoryWriter
from services.waits import WaitBoard
from services.wire.errors import NotReadyError, RollmeshError

MODEL_DEADLINE_S = 600.0
CLOSE_WITHIN_S = 5.0

_log = structlog.get_logger()


@dataclass(frozen=True)
class ServerPlan:
    """What a rollout server is told at its start. `url`: where agents and the weight bus reach it.

    `agent_key`: what environments must show; None where whoever reaches it may speak (loopback).
    """

    run_id: str
    server_id: str
    url: str
    redis_url: str
    model: Path
    settings: RunSettings
    agent_key: str | None = None


@dataclass(frozen=True)
class Parts:
    """What routes work with once the engine is up."""

    engine: Engine
    ledger: Ledger
    gate: AdmissionGate
    registry: GroupRegistry
    access: Access
    opener: SessionOpener
    renderer: Renderer
    turns: TurnTaker
    caller: Caller
    dialect: Dialect
    publisher: Publisher
    finisher: Finisher
    log: TrajectoryLog


class RolloutServer:
    """Owns the parts and their tasks. `stop` ends the process when a part fails for good."""

    def __init__(self, plan: ServerPlan, engine: Engine, bus: Bus | None, stop: Stop) -> None:
        self.plan = plan
        self._engine = engine
        self._stop = stop
        self._membership = (
            None if bus is None else Membership(bus, plan.server_id, plan.url, lambda: engine.policy_version)
        )
        self._parts: Parts | None = None
        self._phase = "starting"
        self._draining: asyncio.Future[int] | None = None
        self._cpu_when_ready = 0.0
        stop.on_stop = self._drain

    def parts(self) -> Parts:
        """The parts. Raises NotReadyError before the engine is up."""
        if self._parts is None:
            raise NotReadyError(f"rollout server {self.plan.server_id} is {self._phase}", "try again")
        return self._parts

    def check_taking_calls(self) -> None:
        """Raise NotReadyError once the end has begun: what is drawn now would be lost. Finishing still works."""
        if self._phase == "draining":
            raise NotReadyError(f"rollout server {self.plan.server_id} is shutting down", "use another server")

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
        reason = self._membership.not_ready() if self._membership else None
        return [] if reason is None else [reason]

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
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(parts.gate.run(), name="admission")
                tasks.create_task(parts.publisher.run(), name="publisher")
                tasks.create_task(sweep(parts.registry, parts.finisher, timeout_s), name="sweeper")
                tasks.create_task(parts.caller.watch(parts.registry, timeout_s), name="call watcher")
                if self._membership is not None:
                    tasks.create_task(self._membership.run(), name="membership")
        except RollmeshError as error:
            self._stop.fail(error)
        except RedisError as error:
            self._stop.fail(RollmeshError(f"Redis failed while the server started ({error})", "see that it runs"))
        except Exception as error:  # noqa: BLE001 - a bug: said with its traceback, and the process must not linger
            _log.exception("rollout server failed")
            self._stop.fail(RollmeshError(f"rollout server {self.plan.server_id} failed ({error!r})", "see its log"))

    async def _start(self, redis: Redis) -> Parts:
        plan, started = self.plan, time.monotonic()
        self._phase = f"waiting for the model folder {plan.model}"
        await wait_for_model(plan.model, MODEL_DEADLINE_S)
        self._phase = "starting its engine"
        await self._engine.start()  # before anything that might start a thread: vLLM forks
        renderer = Renderer.from_folder(plan.model)
        self._phase = "waiting for Redis"
        ledger, registry = Ledger(redis, plan.run_id), GroupRegistry()
        base_version = await ledger.begin(self._engine.policy_version)
        access = Access(SessionKeys(await ledger.session_secret()), plan.agent_key)
        await self._give_up_orphans(ledger)
        publisher = Publisher(TrajectoryWriter(redis, plan.run_id), ledger)
        gate = AdmissionGate(
            ledger,
            WaitBoard(redis, plan.run_id, plan.server_id),
            server_id=plan.server_id,
            base_version=base_version,
            k=plan.settings.k,
            batch=plan.settings.rollout.groups_per_step,
            lookahead=plan.settings.rollout.lookahead,
            engine_version=lambda: self._engine.policy_version,
        )
        _log.info(
            "serving", url=plan.url, version=self._engine.policy_version, after_s=round(time.monotonic() - started, 2)
        )
        return Parts(
            engine=self._engine,
            ledger=ledger,
            gate=gate,
            registry=registry,
            access=access,
            opener=SessionOpener(registry, gate, ledger, plan.settings.rollout.group_timeout_s),
            renderer=renderer,
            turns=TurnTaker(self._engine, renderer),
            caller=Caller(self._engine, self.fail),
            dialect=Dialect(self._engine, renderer, plan.model, plan.settings.rollout.renderer),
            publisher=publisher,
            finisher=Finisher(registry, publisher, ledger, Origin(plan.run_id, plan.server_id)),
            log=TrajectoryLog(redis, plan.run_id),
        )

    async def _give_up_orphans(self, ledger: Ledger) -> None:
        """Take groups off the account that this server holds there and does not know (an earlier life of it did).

        Of one that is in the stream, in part or whole, the ledger knows: it does not count it as dropped.
        """
        for group_id, record in (await ledger.open_groups()).items():
            if record.server_id == self.plan.server_id:
                await ledger.close_group(group_id, dropped=True)
                _log.warning("group of an earlier life closed", group=group_id, ordinal=record.ordinal)

    def _drain(self) -> None:
        """The end has begun: answer who waits, end what is being drawn."""
        self._phase = "draining"
        if self._parts is not None:
            self._parts.gate.close()
            self._draining = asyncio.ensure_future(self._engine.abort())

    async def _close(self, redis: Redis) -> None:
        """Leave the bus, give open groups up, close the engine and Redis: each, whatever becomes of the others."""
        self._phase = "closed"
        parts = self._parts
        try:
            async with asyncio.timeout(CLOSE_WITHIN_S):
                if self._draining is not None:
                    await asyncio.gather(self._draining, return_exceptions=True)
                if self._membership is not None:
                    await self._membership.leave()
                if parts is not None:
                    await parts.finisher.drop_all("shutdown")
        except (RollmeshError, RedisError, TimeoutError) as error:
            _log.warning("closed untidily", server=self.plan.server_id, why=repr(error))
        finally:
            await self._engine.close()
            await redis.aclose()

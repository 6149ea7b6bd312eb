"""Looks at one run: what `rollmesh status` says of it, its last step, its phase, and what its engines and the bus say.

    registry, accounts, waits, probes ──StatusCollector──► sections of the status report, one by one
    metrics.jsonl, progress, engines ──Observer──► line, phase, bound, left_s, stall_ms, engines
    weight bus ──► versions, update                       a run that has ended: its files alone

Sections are the very structs that `rollmesh status --json` and metrics.jsonl hold: the page shows no number of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import msgspec
from redis.asyncio import Redis
from redis.exceptions import RedisError

from services.dashboard.look.bus_look import BusLook
from services.dashboard.look.ended import About, PartView, PhaseView, about, ended_sections
from services.dashboard.look.events import Look, Sections
from services.dashboard.look.light_http import LightTransport
from services.dashboard.look.pace import pause_after
from services.dashboard.look.restarts import Restarts
from services.dashboard.open_runs import OpenRun, as_it_is_now
from services.dashboard.plan import DashboardPlan
from services.observability.mesh_status.collector import StatusCollector
from services.observability.mesh_status.report import MeshReport
from services.observability.run_view.observer import Observer
from services.observability.run_view.snapshot import Snapshot
from services.policies.progress.phase import Part
from services.run_store.client import connect, reached_by
from services.run_store.runners import RunnerRegistry
from services.run_store.status import Wait
from services.security.permissions import Keys

_PART_WITHIN_S = 0.8
_SELDOM_S = 3.0
"""Between two readings of what changes seldom."""
ENDED_PAUSE_S = 2.0
_encode = msgspec.json.encode


class BoundView(msgspec.Struct, frozen=True):
    """`services.policies.progress.bottleneck.Bound`."""

    kind: str
    why: str
    remedy: str


class RunnerLine(msgspec.Struct, frozen=True):
    """An environment runner. `heard_at`: Unix seconds; `left`: it has ended in good order."""

    name: str
    incarnation: str
    heard_at: float
    left: bool


class RunnersLook:
    """The environment runners of a run, read every few seconds."""

    def __init__(self, registry: RunnerRegistry) -> None:
        self._registry = registry
        self._found: Sequence[RunnerLine] = ()
        self._read_at = -_SELDOM_S

    async def read(self) -> Sequence[RunnerLine]:
        """As of the last reading; none where Redis is away."""
        if time.monotonic() - self._read_at >= _SELDOM_S:
            self._read_at = time.monotonic()
            try:
                async with asyncio.timeout(_PART_WITHIN_S):
                    heard = await self._registry.heard()
            except (RedisError, OSError, TimeoutError):
                heard = {}
            self._found = [
                RunnerLine(name, each.incarnation, each.mark / 1e3, each.left) for name, each in sorted(heard.items())
            ]
        return self._found


class StoreLook:
    """Redis as a service: its incarnation is the run id that it gives itself. Read every few seconds."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._found: dict[str, str] = {}
        self._read_at = -_SELDOM_S

    async def read(self) -> Mapping[str, str]:
        """Its name and incarnation, as of the last reading; empty where it does not say."""
        if time.monotonic() - self._read_at >= _SELDOM_S:
            self._read_at = time.monotonic()
            try:
                async with asyncio.timeout(_PART_WITHIN_S):
                    process = (await self._redis.info("server")).get("run_id")
            except (RedisError, OSError, TimeoutError):
                return {}
            self._found = {} if process is None else {"redis": str(process)}
        return self._found


class _Mesh:
    """The connections to a run that runs."""

    def __init__(self, run: OpenRun, about: About, redis: Redis, http: httpx.AsyncClient, plan: DashboardPlan) -> None:
        self.status = StatusCollector(redis, run.run_id, http, trust=plan.trust, part_within_s=_PART_WITHIN_S)
        self.observer = Observer(
            began_at=about.began_at or time.time(),
            steps=about.steps,
            k=about.k,
            folder=run.folder,
            run_id=run.run_id,
            redis=redis,
            http=http,
            engines_every_s=_SELDOM_S,
        )
        self.store = StoreLook(redis)
        self.runners = RunnersLook(RunnerRegistry(redis, run.run_id))
        self.bus = BusLook(http)
        self.restarts = Restarts()
        self.sampled: Sampled | None = None
        self.rate: float | None = None
        self.sections: Sections = {"live": b"true", "about": _encode(about)}
        """Of the last whole look."""


class Sampled(msgspec.Struct, frozen=True):
    """What engines had generated at a moment (monotonic seconds): by server, in tokens."""

    at: float
    tokens: Mapping[str, int]


class RunLook:
    """See `services.dashboard.look.events.Look`."""

    def __init__(self, run: OpenRun, plan: DashboardPlan, stack: AsyncExitStack) -> None:
        self._run, self._plan, self._stack = run, plan, stack
        self._about = about(run)
        self._mesh: _Mesh | None = None
        self._ended: Sections | None = None
        self.pause_s = 1.0

    async def look(self) -> Sections:
        """See `Look`."""
        began = time.thread_time()
        self._run = as_it_is_now(self._run)
        if self._run.redis_url is None:
            if self._mesh is not None:
                await self._leave()
            sections = await asyncio.to_thread(ended_sections, self._run, self._about)
            self.pause_s = ENDED_PAUSE_S
            return sections
        if self._mesh is None:
            # Its steps and K may have been unknown before it began.
            self._about = about(self._run)
            self._mesh = await self._enter(self._run.redis_url)
        sections = await self._look(self._mesh)
        self.pause_s = pause_after(time.thread_time() - began)
        return sections

    async def _look(self, mesh: _Mesh) -> Sections:
        # First, for it knows which engines there are; what it names is asked by the others at once.
        report = await mesh.status.collect(again=False)
        if report.lost:
            # Said at once: all else would only wait for Redis once more.
            return {**mesh.sections, **_of_report(report)}
        mesh.observer.urls = [
            each.url for each in report.services if each.kind == "rollout-server" and each.probe == "ready"
        ]
        bus = next((each.url for each in report.services if each.kind == "weight-bus"), None)
        snapshot, on_bus, runners, store = await asyncio.gather(
            mesh.observer.collect(_starting(report), (_waits(report), None)),
            mesh.bus.read(bus),
            mesh.runners.read(),
            mesh.store.read(),
        )
        begun = {each.name: each.incarnation for each in report.services if each.incarnation is not None}
        restarts = mesh.restarts.look({**begun, **store, "weight-bus": str(mesh.bus.begun)}, report.at)
        at = mesh.observer.engines_at
        if mesh.sampled is None or mesh.sampled.at != at:
            sampled = Sampled(at, {each.server_id: each.tokens_generated for each in snapshot.engines})
            mesh.rate, mesh.sampled = generated_per_s(mesh.sampled, sampled), sampled
        mesh.sections = {
            "live": b"true",
            "about": _encode(self._about),
            **_of_report(report),
            **_of_snapshot(snapshot),
            "generated_per_s": _encode(mesh.rate),
            "runners": _encode(runners),
            "restarts": _encode(restarts),
            **on_bus,
        }
        return mesh.sections

    async def _enter(self, redis_url: str) -> _Mesh:
        keys = self._plan.keys
        redis = connect(reached_by(redis_url, keys.redis, self._plan.trust))
        self._stack.push_async_callback(redis.aclose)
        http = await self._stack.enter_async_context(
            httpx.AsyncClient(trust_env=False, headers=_shown(keys), transport=LightTransport(self._plan.trust))
        )
        return _Mesh(self._run, self._about, redis, http, self._plan)

    async def _leave(self) -> None:
        self._mesh = None
        await self._stack.aclose()


@asynccontextmanager
async def looking(run: OpenRun, plan: DashboardPlan) -> AsyncIterator[Look]:
    """A look at the run."""
    async with AsyncExitStack() as stack:
        yield RunLook(run, plan, stack)


def _waits(report: MeshReport) -> dict[str, Wait]:
    return {each.component: Wait(waiting_for=each.waiting_for, since=each.since) for each in report.waits}


def _starting(report: MeshReport) -> list[Part]:
    """What a run consists of while it starts, as far as its directory of services knows it."""
    missing = [each for each in report.services if each.probe != "ready"]
    now = "; ".join(": ".join([each.name, *each.reasons[:1]]) for each in missing)
    return [Part("services", len(report.services) - len(missing), len(report.services), now)]


def _of_report(report: MeshReport) -> dict[str, bytes]:
    return {name: _encode(getattr(report, name)) for name in MeshReport.__struct_fields__ if name != "run_id"}


def _of_snapshot(snapshot: Snapshot) -> dict[str, bytes]:
    phase, bound = snapshot.phase, snapshot.bound
    return {
        "line": _encode(snapshot.metrics),
        "phase": _encode(
            PhaseView(
                name=phase.name,
                share=phase.share,
                of_start=phase.of_start,
                parts=[PartView(part.name, part.done, part.total, part.now) for part in phase.parts],
                left_s=snapshot.left_s,
            )
        ),
        "bound": _encode(None if bound is None else BoundView(bound.kind, bound.why, bound.remedy)),
        "stall_ms": _encode(snapshot.stall_ms),
        "engines": b"[" + b",".join(each.model_dump_json().encode() for each in snapshot.engines) + b"]",
    }


def generated_per_s(before: Sampled | None, now: Sampled) -> float | None:
    """Tokens a second over the engines that answered both times; None where none did."""
    if before is None or now.at <= before.at:
        return None
    known = [count - before.tokens[name] for name, count in now.tokens.items() if name in before.tokens]
    # One that began again counts from nothing.
    return sum(count for count in known if count >= 0) / (now.at - before.at) if known else None


def _shown(keys: Keys) -> dict[str, str]:
    """What the dashboard itself shows to services when it reads."""
    key = keys.peer or keys.admin or keys.agent
    return {} if key is None else {"authorization": f"Bearer {key}"}

"""Supervisor of a mesh on one machine: starts its processes, watches them, stops them, writes the summary.

reserve ports ─► reaper ─► Valkey ─► everything else at once ─► ready ─► … training … ─► trainer and environment done
                                              │                                                      │
                         a process dies: its supervisor starts it again                        collect, write summary
                                              ▼                                                      ▼
                    gives up, or Ctrl-C, or the disk is full ─────────────────────► stop all (Valkey last), clean up
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import MappingProxyType

import httpx
import msgspec
from redis.asyncio import Redis

from services.config.fitting import annotated
from services.config.load import dump_settings
from services.config.settings import RunSettings
from services.host.aio import to_its_end
from services.host.files import remove_shm_files, shm_directory, shm_prefix, write_whole
from services.host.process import missing_tunables
from services.host.run_folder import RunFolder, free_bytes, held, note_redis
from services.observability.run_view.observer import Observer, read_engine
from services.policies.placement.place import Placement
from services.policies.progress.phase import Part
from services.run_store.client import connect, reached_by, without_password
from services.run_store.ledger import Ledger
from services.run_store.status import EvaluationStore, write_evaluations
from services.security.keys import NO_PLACES, KeyPlaces
from services.security.tls import read_trust
from services.supervisor.devices import NOWHERE, environments_here
from services.supervisor.launch_plan import LaunchPlan, PortReservation, plan_launch, write_users
from services.supervisor.on_demand import run_on_demand
from services.supervisor.processes import ManagedProcess, ProcessSpec, Reaper, ServiceFailedError
from services.supervisor.readiness import (
    REDIS_DEADLINE_S,
    first_cause,
    named_urls,
    wait_for_answer,
    wait_for_http,
    wait_for_redis,
)
from services.supervisor.stopping import stop_trainer
from services.supervisor.summary import (
    Summary,
    components_of,
    flips_of,
    read_report,
    success_before,
    summarise,
    write_summary,
)
from services.supervisor.view.views import View
from services.wire.errors import RollmeshError
from services.wire.run_metrics import WARM_START, EvaluationReport, TrainerReport

STOP_DEADLINE_S = 8.0
TRACKING_STOP_DEADLINE_S = 20.0
"""It writes the last steps and the summary."""
IMPORTS_WITHIN_S = 300.0
"""For a server to do its imports; the trainer starts then at the latest."""
SHOW_EVERY_S = 0.5
PAGE_AFTER_S = 5.0
"""A run that is over sooner does not pay for a page that nobody opens."""
DISK_EVERY_S = 1.0
MIN_FREE_BYTES = 32 << 20
"""With less room than this a run is ended: Valkey and the step log must never meet a full disk."""


@dataclass(frozen=True)
class MeshProcesses:
    """A managed process for each process spec of a launch plan."""

    valkey: ManagedProcess | None
    bus: ManagedProcess
    servers: tuple[ManagedProcess, ...]
    gateway: ManagedProcess | None
    rewards: ManagedProcess | None
    teacher: ManagedProcess | None
    trainer: ManagedProcess
    environment: ManagedProcess
    tracking: ManagedProcess | None
    dashboard: ManagedProcess | None
    warm_start: tuple[ManagedProcess, ...]

    @property
    def services(self) -> tuple[ManagedProcess, ...]:
        """What stands on Valkey and lasts as long as the run."""
        return (self.bus, *self.servers, *self._at_the_edge)

    @property
    def _at_the_edge(self) -> tuple[ManagedProcess, ...]:
        return tuple(managed for managed in (self.gateway, self.rewards, self.teacher) if managed is not None)

    @property
    def in_order_of_stopping(self) -> tuple[tuple[ManagedProcess, ...], ...]:
        """Each rank may still have something to say to the next while it stops."""
        return (
            (*self.warm_start, self.environment, self.trainer, *self.servers),
            (self.bus, *self._at_the_edge, *(one for one in (self.tracking, self.dashboard) if one is not None)),
            () if self.valkey is None else (self.valkey,),
        )

    @property
    def everyone(self) -> tuple[ManagedProcess, ...]:
        return tuple(managed for rank in self.in_order_of_stopping for managed in rank)


class Mesh:
    """One run. Use `run` once; cancelling it stops everything before it returns."""

    def __init__(
        self,
        settings: RunSettings,
        folder: RunFolder,
        run_id: str,
        view: View,
        keys: KeyPlaces = NO_PLACES,
        origins: Mapping[str, str] = MappingProxyType({}),
        placement: Placement = NOWHERE,
        *,
        began_at: float,
    ) -> None:
        """`settings` are resolved; `folder` was made by preflight. `keys`: what every process is told. `began_at`: when the
        command began, Unix seconds.

        `origins`: dotted name → where the setting comes from, for config.toml. A folder that has one is of a run that was
        interrupted, which goes on. `placement`: the GPUs of each process.
        """
        self._settings = settings
        self._folder = folder
        self._run_id = run_id
        self._view = view
        self._key_places = keys
        self._origins = origins
        self._placement = placement
        self._keys = keys.read("supervisor")
        self._trust = read_trust(keys.tls)
        self._processes: MeshProcesses | None = None
        self._missing: dict[str, str] = {}
        self._warm = asyncio.Event()
        """Set once there is a model folder."""
        self._under_way = asyncio.Event()
        """Set once steps have been made for PAGE_AFTER_S."""
        self._began_at = began_at
        if folder.config.exists():
            self._began_at = folder.config.stat().st_mtime

    async def run(self) -> Summary:
        """Raises RollmeshError, of which the message is for the user, when the run fails."""
        with held(self._folder):
            # Of the run that was interrupted: this one's Redis may be at another port.
            self._folder.redis_url.unlink(missing_ok=True)
            return await self._run()

    async def _run(self) -> Summary:
        self._folder.redis.mkdir(exist_ok=True)
        if not self._folder.config.exists():
            self._folder.run_id.write_text(f"{self._run_id}\n", encoding="utf-8")
            text = annotated(dump_settings(self._settings), self._origins)
            write_whole(self._folder.config, text.encode())
        if self._placement.places:
            write_whole(self._folder.placement, msgspec.json.encode(self._placement))
        if self._settings.redis_url is None and self._keys.redis is not None:
            write_users(self._folder.redis, self._keys.redis)
        with PortReservation() as ports:
            reserved = ports.of_mesh(self._settings.servers, dashboard=self._settings.dashboard.port)
            plan = plan_launch(
                self._settings,
                self._folder,
                self._run_id,
                reserved,
                self._key_places,
                missing_tunables(),
                devices=environments_here(self._settings, self._placement),
            )
            async with Reaper(shm_directory() / shm_prefix(self._run_id)) as reaper:
                self._processes = self._make_processes(plan, reaper)
                try:
                    summary = await self._train(plan, self._processes)
                finally:
                    # A signal that comes meanwhile must not leave half of them running.
                    await to_its_end(self._stop(self._processes))
        # Kept after a failure, for whoever examines it; after a success the summary holds all of it.
        shutil.rmtree(self._folder.redis, ignore_errors=True)
        return summary

    def kill(self) -> None:
        """End every process at once (the second Ctrl-C)."""
        if self._processes is not None:
            for managed in self._processes.everyone:
                if managed.child is not None:
                    managed.child.kill()

    def _make_processes(self, plan: LaunchPlan, reaper: Reaper) -> MeshProcesses:
        def manage(spec: ProcessSpec) -> ManagedProcess:
            return ManagedProcess(spec, self._folder.logs, reaper, self._view.say)

        return MeshProcesses(
            valkey=None if plan.valkey is None else manage(plan.valkey),
            bus=manage(plan.bus),
            servers=tuple(manage(spec) for spec in plan.servers),
            gateway=None if plan.gateway is None else manage(plan.gateway),
            rewards=None if plan.rewards is None else manage(plan.rewards),
            teacher=None if plan.teacher is None else manage(plan.teacher),
            trainer=manage(plan.trainer),
            environment=manage(plan.environment),
            tracking=None if plan.tracking is None else manage(plan.tracking),
            dashboard=None if plan.dashboard is None else manage(plan.dashboard),
            warm_start=tuple(manage(spec) for spec in plan.warm_start),
        )

    async def _train(self, plan: LaunchPlan, processes: MeshProcesses) -> Summary:
        async with AsyncExitStack() as stack:
            redis = connect(reached_by(plan.redis_url, self._keys.redis, self._trust))
            stack.push_async_callback(redis.aclose)
            peer = self._keys.peer
            headers = {} if peer is None else {"authorization": f"Bearer {peer}"}
            http = await stack.enter_async_context(
                httpx.AsyncClient(trust_env=False, headers=headers, verify=self._trust.verify)
            )
            try:
                async with asyncio.TaskGroup() as tasks:
                    lasting = [tasks.create_task(self._watch_disk())]
                    # First, for all others wait for it, and it for nobody.
                    warming = tasks.create_task(self._warm_start(processes))
                    if processes.valkey is not None:
                        lasting.append(tasks.create_task(processes.valkey.run()))
                    await wait_for_redis(redis, REDIS_DEADLINE_S)
                    redis_url = without_password(plan.redis_url)
                    note_redis(self._folder, redis_url)
                    self._view.say(f"see how it is: rollmesh status --redis-url {redis_url}")
                    if processes.dashboard is not None:
                        self._view.say(f"dashboard: {plan.dashboard_url}")
                        page = run_on_demand(processes.dashboard, plan.dashboard_port, self._view.say, self._under_way)
                        lasting.append(tasks.create_task(page))
                    lasting += [tasks.create_task(managed.run()) for managed in processes.services]
                    lasting += [tasks.create_task(self._announce(*named, http)) for named in named_urls(plan)]
                    lasting.append(tasks.create_task(self._show(plan, redis, http)))
                    if processes.tracking is not None:
                        lasting.append(tasks.create_task(self._track(processes.tracking)))
                    jobs = [
                        warming,
                        tasks.create_task(self._run_trainer(plan, processes, warming, http)),
                        tasks.create_task(processes.environment.run()),
                    ]
                    await asyncio.wait(jobs)
                    if all(not job.cancelled() and job.exception() is None for job in jobs):
                        summary = await self._collect(plan, processes, redis, http)
                    for task in lasting:
                        task.cancel()
            except BaseExceptionGroup as failed:
                raise first_cause(failed) from failed
        return summary

    async def _warm_start(self, processes: MeshProcesses) -> None:
        """All its jobs at once: each waits for what the one before it writes."""
        async with asyncio.TaskGroup() as jobs:
            for managed in processes.warm_start:
                jobs.create_task(self._run_job(managed))
        self._warm.set()

    async def _run_job(self, managed: ManagedProcess) -> None:
        began = time.monotonic()
        self._missing[managed.name] = ""
        await managed.run()
        del self._missing[managed.name]
        self._view.say(f"{managed.name} done in {time.monotonic() - began:.1f} s")

    async def _run_trainer(
        self, plan: LaunchPlan, processes: MeshProcesses, warming: asyncio.Task[None], http: httpx.AsyncClient
    ) -> None:
        """Start the trainer once a server has done its imports, or the model is there, whichever comes first.

        Importing torch three times over on two cores would only hold up the warm start, which everyone waits for.
        """
        answering = [asyncio.create_task(wait_for_answer(url, http)) for url in plan.server_urls]
        try:
            await asyncio.wait([warming, *answering], timeout=IMPORTS_WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiting in answering:
                waiting.cancel()
            await asyncio.gather(*answering, return_exceptions=True)
        await processes.trainer.run()

    async def _track(self, tracking: ManagedProcess) -> None:
        """The run goes on without it."""
        try:
            await tracking.run()
        except RollmeshError as error:
            self._view.say(f"{error}: the run goes on; `rollmesh track {self._folder.root}` writes what is missing")

    async def _announce(self, name: str, url: str, http: httpx.AsyncClient) -> None:
        def missing(what: str) -> None:
            self._missing[name] = what

        missing("")
        within_s = self._settings.rollout.start_timeout_s
        # Before there is a model nothing can load it: a warm start's time is not the server's.
        await wait_for_http(name, url, within_s, http, self._view.say, begun=self._warm.is_set, missing=missing)
        del self._missing[name]
        self._view.say(f"{name} is ready at {url}")

    async def _show(self, plan: LaunchPlan, redis: Redis, http: httpx.AsyncClient) -> None:
        observer = Observer(
            began_at=self._began_at,
            steps=self._settings.steps,
            k=self._settings.k,
            folder=self._folder,
            run_id=self._run_id,
            redis=redis,
            http=http,
            urls=plan.server_urls,
        )
        before = stepping = None
        while True:
            snapshot = await observer.collect(self._start(plan))
            self._view.show(snapshot)
            if snapshot.step and stepping is None:
                stepping = time.monotonic()
            if stepping is not None and time.monotonic() - stepping >= PAGE_AFTER_S:
                self._under_way.set()
            if before is None and (before := success_before(self._folder)) is not None:
                self._view.say(f"held out before training: {before}")
            await asyncio.sleep(SHOW_EVERY_S)

    def _start(self, plan: LaunchPlan) -> list[Part]:
        """What the start of the run consists of, and what is missing of each."""
        servers = [spec.name for spec in plan.servers]
        named = {
            WARM_START: [spec.name for spec in plan.warm_start],
            "servers": servers,
            "services": [name for name, _ in named_urls(plan) if name not in servers],
        }
        parts = []
        for part, names in named.items():
            missing = [name for name in names if name in self._missing]
            now = "; ".join(f"{name}: {self._missing[name]}" if self._missing[name] else name for name in missing)
            if names:
                parts.append(Part(part, len(names) - len(missing), len(names), now))
        return parts

    async def _watch_disk(self) -> None:
        while True:
            free = free_bytes(self._folder.root)
            if free < MIN_FREE_BYTES:
                what = f"the disk of {self._folder.root} has only {free >> 20} MiB left: the run was ended"
                raise ServiceFailedError(what, "make room, then start again with another --run-dir")
            await asyncio.sleep(DISK_EVERY_S)

    async def _collect(
        self, plan: LaunchPlan, processes: MeshProcesses, redis: Redis, http: httpx.AsyncClient
    ) -> Summary:
        reports = await asyncio.gather(*(read_engine(http, url) for url in plan.server_urls))
        evaluations = await EvaluationStore(redis, self._run_id).read()
        if evaluations:
            # One may have been told behind the trainer's last look.
            write_evaluations(self._folder.evaluations, evaluations)
        summary = summarise(
            self._settings,
            self._run_id,
            trainer=read_report(self._folder.trainer_report, TrainerReport),
            evaluation=read_report(self._folder.evaluation, EvaluationReport),
            evaluations=evaluations,
            accounts=await Ledger(redis, self._run_id).accounts(),
            engines=[report for report in reports if report is not None],
            began_at=self._began_at,
            ended_at=time.time(),
            restarts=sum(managed.restarts for managed in processes.everyone),
            flips_ms=flips_of(self._folder.metrics),
            components=components_of(self._folder.metrics),
        )
        write_summary(self._folder, summary)
        return summary

    async def _stop(self, processes: MeshProcesses) -> None:
        for rank in processes.in_order_of_stopping:
            await asyncio.gather(*(self._stop_one(managed, processes) for managed in rank))
        remove_shm_files(self._run_id)

    async def _stop_one(self, managed: ManagedProcess, processes: MeshProcesses) -> None:
        if managed is not processes.trainer:
            await managed.stop(TRACKING_STOP_DEADLINE_S if managed is processes.tracking else STOP_DEADLINE_S)
            return
        settings = self._settings
        await stop_trainer(managed, settings.trainer.stop_timeout_s, self._folder, settings.model.path, self._view.say)

"""The weight update coordinator: engine leases, and two-phase commit (stage, then commit) of each version over HTTP.

    announce / register / answer / operate ──► CommitMachine ──► asks ──► one owned task each ──► engine ──► answer …

All of it runs on one event loop; every call to an engine has a deadline, so every update settles. Of all this only the
newest version's number is kept (`version_floor`): after a restart, heartbeats tell what each engine serves, and the
publisher announces its newest version again as soon as the bus does not know it; an engine that has it staged answers at
once.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import structlog

from services.host.aio import telling
from services.observability.metrics import Metrics
from services.observability.tracing import NO_TRACE, NO_TRACING, Tracing
from services.policies.fleet.commit import CommitMachine
from services.policies.fleet.policy import BARRIER, FleetPolicy
from services.policies.fleet.update import Ask, Update
from services.policies.training.deadlines import Pace, within
from services.wire import weights_api
from services.wire.errors import ConflictError, NotFoundError, RollmeshError
from weight_bus.coordinator.engine_client import EngineClient, why_not_prepared
from weight_bus.coordinator.events import BusMetrics, BusState, EventLog
from weight_bus.coordinator.records import Record
from weight_bus.coordinator.version_floor import VersionFloor
from weight_bus.manifest.manifest import Manifest, check_signature

_log = structlog.get_logger()
_KEPT_UPDATES = 64
_TOLD: dict[weights_api.EngineState, weights_api.EventKind] = {
    "staging": "staging",
    "prepared": "prepared",
    "committed": "committed",
    "rolled_back": "rolled_back",
    "failed": "failed",
}


@dataclass
class _Engine:
    url: str
    ranks: int
    staged_version: int | None
    lease_ends: float


class Coordinator:
    """Drives `CommitMachine`. An engine without a heartbeat for `lease_s` is dropped. `weights_key`: manifests must
    bear its signature. `floor`: what was announced before this process started. `close` it.
    """

    def __init__(
        self,
        run_id: str,
        client: EngineClient,
        *,
        lease_s: float = 5.0,
        policy: FleetPolicy = BARRIER,
        weights_key: str | None = None,
        metrics: Metrics | None = None,
        tracing: Tracing = NO_TRACING,
        floor: VersionFloor | None = None,
    ) -> None:
        self.events = EventLog()
        self.floor = floor or VersionFloor(run_id)
        self._tracing = tracing
        self._run_id = run_id
        self._client = client
        self._lease_s = lease_s
        self._weights_key = weights_key
        self._machine = CommitMachine(policy=policy)
        self._pace = Pace()
        """Of whole stages: all bytes of a version, by the time that an engine took for it."""
        self._engines: dict[str, _Engine] = {}
        self._records: dict[int, Record] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._metrics = BusMetrics(metrics or Metrics(), self._state)

    async def watch_leases(self) -> None:
        """Forget engines whose lease has lapsed, until cancelled."""
        while True:
            await asyncio.sleep(self._lease_s / 5)
            now = time.monotonic()
            for engine_id in [name for name, engine in self._engines.items() if engine.lease_ends < now]:
                _log.warning("engine lost", engine=engine_id, lease_s=self._lease_s)
                self._metrics.engine_lost()
                self._drop(engine_id, f"no heartbeat for {self._lease_s} s")

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    def release_waiters(self) -> None:
        """Answer all long polls and end all streams now: the service is ending."""
        self.events.close()
        for record in self._records.values():
            record.resting.set()

    @property
    def urls(self) -> dict[str, str]:
        """Where each live engine is."""
        return {engine_id: engine.url for engine_id, engine in self._engines.items()}

    @property
    def goal(self) -> tuple[int, str] | None:
        """The version that every engine should serve, and its digest (empty where the bus never saw its manifest)."""
        goal = self._machine.goal
        return None if goal is None else (goal, self._record(goal).root_digest)

    def hashed_within(self, nbytes: int) -> float:
        """Seconds that an engine has to read, or to hash, so many bytes of weights."""
        return within(self._client.timeout_s, nbytes, self._pace.slowest)

    @property
    def digested_within(self) -> float:
        """Seconds that an engine has to hash the weights that all should serve."""
        goal = self._machine.goal
        return self.hashed_within(0 if goal is None else self._record(goal).nbytes)

    @property
    def next_version(self) -> int:
        """One more than the newest version that the bus has heard of."""
        return 1 + self._newest

    @property
    def _newest(self) -> int:
        return self.floor.known(self._machine.highest, self._machine.members.values()).newest

    def register(self, engine: weights_api.RegisterEngine) -> weights_api.EngineRegistered:
        """A new engine, or the heartbeat of a known one. Raises ConflictError for an engine of another run."""
        self._check_run(engine.run_id, f"engine {engine.engine_id}")
        url = engine.url.rstrip("/")
        known = self._engines.get(engine.engine_id)
        restarted = known is not None and known.url != url
        if known is None or restarted:
            _log.info("engine joined", engine=engine.engine_id, url=url, policy_version=engine.policy_version)
            self.events.add("joined", engine_id=engine.engine_id, version=engine.policy_version)
        lease_ends = time.monotonic() + self._lease_s
        self._engines[engine.engine_id] = _Engine(url, engine.ranks, engine.staged_version, lease_ends)
        self._machine.join(engine.engine_id, engine.policy_version, restarted=restarted)
        self._pump()
        latest = self._machine.latest
        return weights_api.EngineRegistered(
            lease_s=self._lease_s, latest_version=None if latest is None else latest.version
        )

    def deregister(self, engine_id: str) -> None:
        if engine_id in self._engines:
            _log.info("engine left", engine=engine_id)
            self._drop(engine_id, "the engine left")

    def engines(self) -> weights_api.EnginesView:
        now, versions = time.monotonic(), self._machine.members
        return weights_api.EnginesView(
            engines=[
                weights_api.EngineView(
                    engine_id=engine_id,
                    url=engine.url,
                    policy_version=versions[engine_id],
                    lease_left_s=max(0.0, engine.lease_ends - now),
                    staged_version=engine.staged_version,
                    ranks=engine.ranks,
                )
                for engine_id, engine in self._engines.items()
            ]
        )

    def announce(self, manifest: Manifest, payload: bytes, *, hold: bool = False, final: bool = False) -> bool:
        """Start an update; False for one that is known by the same bytes, whose sources are refreshed.

        `payload`: the encoded manifest, passed on to the engines. `final`: see `CommitMachine.announce`. Raises
        SignatureError, and ConflictError for another run, an unknown version that is not newer than all before, or a known
        one with other bytes.
        """
        self._check_run(manifest.run_id, f"manifest of version {manifest.version}")
        check_signature(manifest, self._weights_key)
        highest = self._machine.highest
        if highest is not None and manifest.version <= highest:
            self._repeat(manifest, payload, highest, hold=hold)
            return False
        self.floor.check(manifest.version, manifest.root_digest, highest, self._machine.members.values())
        update = self._machine.announce(manifest.version, hold=hold, final=final)
        record = Record(update, time.monotonic(), manifest, payload, trace=self._tracing.current())
        self._records[manifest.version] = record
        self.events.add("announced", version=manifest.version)
        self._metrics.announced()
        while len(self._records) > _KEPT_UPDATES:
            self._records.pop(next(iter(self._records)))
        self._pump()
        return True

    def release(self, version: int) -> weights_api.UpdateView:
        """An operator's commit. Raises NotFoundError, and ConflictError for a version that is past."""
        self._record(version)
        try:
            self._register_again(self._machine.release(version))
        except ValueError as error:
            raise ConflictError(f"version {version} cannot be committed: {error}") from error
        self._pump()
        return self.view(version)

    def cancel(self, version: int) -> weights_api.UpdateView:
        """Withdraw a version before its flips. Raises NotFoundError, and ConflictError when it is too late."""
        self._record(version)
        try:
            self._machine.cancel(version)
        except ValueError as error:
            raise ConflictError(f"version {version} cannot be cancelled: {error}") from error
        if (current := self._machine.current) is not None:
            self._register_again(current)
        self._pump()
        return self.view(version)

    def rollback(self, target: int | None) -> weights_api.RollbackView:
        """Withdraw the latest version. Raises ConflictError when there is nothing to go back to."""
        try:
            update = self._machine.rollback(target)
        except ValueError as error:
            raise ConflictError(f"nothing is rolled back: {error}") from error
        withdrawn = update.withdraws
        assert withdrawn is not None
        self._register_again(self._machine.withdrawn[withdrawn])
        self._register_again(update)
        self._pump()
        return weights_api.RollbackView(withdrawn=withdrawn, update=self.view(update.version))

    async def wait_resting(self, version: int, wait_s: float) -> weights_api.UpdateView:
        """The update, once nothing but an operator is waited for, or `wait_s` have passed. Raises NotFoundError."""
        record = self._record(version)
        if wait_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await record.resting.wait()
        return self.view(version)

    def view(self, version: int) -> weights_api.UpdateView:
        return self._record(version).view(self._machine.policy.name)

    def versions(self) -> weights_api.VersionsView:
        latest, serving, newest = self._machine.latest, self._machine.members, self._newest
        record = self._records.get(newest)
        return weights_api.VersionsView(
            newest=newest,
            newest_digest=("" if record is None else record.root_digest) or self.floor.digest_of(newest),
            latest=None if latest is None else latest.version,
            versions=[
                record.summary(
                    [engine_id for engine_id, served in serving.items() if served == version],
                    withdrawn=version in self._machine.withdrawn,
                )
                for version, record in sorted(self._records.items(), reverse=True)
            ],
        )

    def _state(self) -> BusState:
        latest, current = self._machine.latest, self._machine.current
        progress = {} if current is None else current.progress
        return BusState(
            latest=None if latest is None else latest.version,
            served=self._machine.members,
            progress=[progress[engine_id].state for engine_id in self._engines if engine_id in progress],
        )

    def _check_run(self, run_id: str, what: str) -> None:
        if run_id != self._run_id:
            raise ConflictError(f"{what} belongs to run {run_id!r}, this bus serves {self._run_id!r}")

    def _repeat(self, manifest: Manifest, payload: bytes, highest: int, *, hold: bool) -> None:
        record = self._records.get(manifest.version)
        if record is None:
            raise ConflictError(f"version {manifest.version} is older than {highest}, which is published")
        if record.manifest is not None and record.root_digest != manifest.root_digest:
            raise ConflictError(
                f"version {manifest.version} is published with other bytes", "a version is one set of bytes for ever"
            )
        record.manifest, record.payload = manifest, payload
        record.trace = self._tracing.current() or record.trace
        latest = self._machine.latest
        if latest is not None and latest.version == manifest.version:
            self._machine.offer_again()
            self._pump()
        elif record.update.given_up and manifest.version == highest:
            # Who pushes a version again that failed asks for it again.
            try:
                self._register_again(self._machine.release(manifest.version, hold=hold))
            except ValueError as error:
                raise ConflictError(f"version {manifest.version} cannot be offered again: {error}") from error
            self._pump()

    def _register_again(self, update: Update) -> None:
        """Record an update that the machine made by itself, under its version."""
        record = self._records.get(update.version)
        if record is None:
            self._records[update.version] = Record(update, time.monotonic())
        elif record.update is not update:
            record.begin_again(update, time.monotonic())

    def _record(self, version: int) -> Record:
        record = self._records.get(version)
        if record is None:
            raise NotFoundError(f"the weight bus knows no update {version}")
        return record

    def _drop(self, engine_id: str, why: str) -> None:
        del self._engines[engine_id]
        self.events.add("left", engine_id=engine_id, why=why)
        self._machine.leave(engine_id, why)
        self._pump()

    def _pump(self) -> None:
        """Send the calls that the machine asks for; notify event streams and long polls."""
        # Also before: an engine is `prepared` only until its commit call is sent.
        self._tell()
        for ask in self._machine.take_asks():
            engine = self._engines[ask.engine_id]
            task = asyncio.create_task(self._carry_out(ask, engine), name=f"{ask.phase} {ask.version}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._tell()

    def _tell(self) -> None:
        current = self._machine.current
        if current is not None and current.restores:
            # The machine may have begun it by itself: a pushed version failed.
            self._register_again(current)
        withdrawn = self._machine.withdrawn
        concerned = [
            (version, record)
            for version, record in self._records.items()
            if record.update is current or version in withdrawn or record.told_state != record.update.state
        ]
        # Events of the version that engines leave come before those of the new one.
        for version, record in sorted(concerned, key=lambda item: item[1].update is current):
            if record.update is current or version in withdrawn:
                self._tell_engines(record)
            if record.told_state != record.update.state:
                self._tell_state(record)

    def _tell_engines(self, record: Record) -> None:
        for engine_id, progress in record.update.progress.items():
            if record.told.get(engine_id) == progress.state:
                continue
            record.told[engine_id] = progress.state
            if (kind := _TOLD.get(progress.state)) is not None:
                self.events.add(kind, version=record.update.version, engine_id=engine_id, why=progress.why)

    def _tell_state(self, record: Record) -> None:
        update = record.update
        record.told_state = update.state
        if update.state in ("staging", "prepared"):
            record.resting.clear()
            return
        milliseconds = (time.monotonic() - record.announced) * 1e3
        if update.state == "committed" and record.commit_ms is None:
            record.commit_ms = milliseconds
            self._metrics.committed(milliseconds / 1e3)
        if update.state in weights_api.SETTLED:
            self._metrics.settled(update.state)
        record.resting.set()
        self.events.add(update.state, version=update.version, why=update.why)
        # Before the first engine has registered, and after the last has left, nothing is wrong with the weights.
        log = _log.warning if update.state == "failed" and self._engines else _log.info
        # A heartbeat, or the call that announced the next version, may have settled it.
        with self._tracing.logged_under(record.trace):
            log("weight update", version=update.version, state=update.state, ms=round(milliseconds, 1), why=update.why)

    async def _carry_out(self, ask: Ask, engine: _Engine) -> None:
        record = self._records[ask.version]
        # Whatever call made it due, the work belongs to the publisher's trace.
        with self._tracing.logged_under(record.trace):
            failure = await self._failure_of(ask, engine, record)
            mattered = self._machine.answer(ask, failure)
            if mattered and failure is not None:
                self._metrics.call_failed(ask.phase)
                _log.warning("engine failed", engine=ask.engine_id, phase=ask.phase, version=ask.version, why=failure)
            elif mattered and ask.engine_id in self._engines:
                self._engines[ask.engine_id].lease_ends = time.monotonic() + self._lease_s
        self._pump()

    async def _failure_of(self, ask: Ask, engine: _Engine, record: Record) -> str | None:
        """Carry an ask out in a span of its publisher's trace; why it failed, for any error."""
        names: dict[str, str | int] = {"version": ask.version, "engine": ask.engine_id}
        tracing = self._tracing.span(f"bus.{ask.phase}", parent=record.trace or NO_TRACE)
        try:
            with structlog.contextvars.bound_contextvars(**names), tracing as span:
                span.note(**names)
                return await self._ask(ask, engine, record)
        except RollmeshError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 - see below
            # A bug, but the update must settle all the same: the other engines wait for this answer.
            _log.exception("call to an engine broke", engine=ask.engine_id, phase=ask.phase, version=ask.version)
            return f"the bus broke: {error!r}"

    async def _ask(self, ask: Ask, engine: _Engine, record: Record) -> str | None:
        """Carry an ask out; why it failed where the engine did not say so itself."""
        now = asyncio.get_running_loop().time
        results, started = record.results_of(ask.engine_id), now()
        if ask.phase == "commit":
            results.committed = await self._client.commit(engine.url, ask.version)
            self._metrics.flipped(results.committed.flip_ms / 1e3)
        elif ask.phase == "rollback":
            results.committed = await self._client.rollback(engine.url, ask.version)
        elif record.payload is None:
            return f"the bus never saw the manifest of version {ask.version}: have its publisher announce it again"
        else:
            within_s = self.hashed_within(record.nbytes)
            waiting = partial(_log.info, "waiting", waiting_for=f"{ask.engine_id} to stage", at_most_s=round(within_s))
            staging = self._client.stage(engine.url, record.payload, within_s)
            results.staged = staged = await telling(staging, lambda passed: waiting(after_s=round(passed)))
            took_s = now() - started
            results.stage_ms = took_s * 1e3
            if staged.bytes_read * 2 >= record.nbytes:
                # Not of a delta, nor of bytes that lay there already.
                self._pace.note(record.nbytes, took_s)
            self._metrics.staged(results.stage_ms / 1e3, staged.bytes_read)
            return why_not_prepared(staged, ask.version, record.root_digest, engine.ranks)
        return None

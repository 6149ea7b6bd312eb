"""The coordinator: drives the pure commit machine over HTTP, and keeps engines' leases.

    announce / register / answer ──► CommitMachine ──► asks ──► one owned task each ──► engine ──► answer …

All of it runs on one event loop; every call to an engine is bounded, so every update settles.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

import structlog

from services.policies.commit import Ask, CommitMachine, Progress, Update
from services.wire.errors import ConflictError, NotFoundError, RollmeshError
from weight_bus.bus_api import (
    EngineDigest,
    EngineProgress,
    EngineRegistered,
    EnginesView,
    EngineView,
    RegisterEngine,
    UpdateView,
    VerifyView,
)
from weight_bus.engine_client import EngineClient
from weight_bus.manifest import Manifest

_log = structlog.get_logger()
_KEPT_UPDATES = 64


@dataclass
class _Engine:
    url: str
    lease_ends: float


@dataclass
class _Figures:
    bytes_read: int = 0
    stage_ms: float = 0.0
    flip_ms: float = 0.0


@dataclass
class _Record:
    """One update with what the machine does not need: its bytes' names, the clock, the figures."""

    update: Update
    root_digest: str
    payload: bytes
    announced: float
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    commit_ms: float | None = None
    figures: dict[str, _Figures] = field(default_factory=dict)


class Coordinator:
    """`timeout_s` bounds each call to an engine; an engine unheard of for `lease_s` is forgotten. `close` it."""

    def __init__(self, run_id: str, *, timeout_s: float, lease_s: float = 5.0) -> None:
        self._run_id = run_id
        self._lease_s = lease_s
        self._machine = CommitMachine()
        self._client = EngineClient(timeout_s)
        self._engines: dict[str, _Engine] = {}
        self._records: dict[int, _Record] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def watch_leases(self) -> None:
        """Forget engines whose lease has lapsed, until cancelled."""
        while True:
            await asyncio.sleep(self._lease_s / 5)
            now = time.monotonic()
            for engine_id in [name for name, engine in self._engines.items() if engine.lease_ends < now]:
                _log.warning("engine lost", engine=engine_id, lease_s=self._lease_s)
                self._drop(engine_id, f"no heartbeat for {self._lease_s} s")

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    def release_waiters(self) -> None:
        """Answer all long polls now: the service is ending."""
        for record in self._records.values():
            record.settled.set()

    def register(self, engine: RegisterEngine) -> EngineRegistered:
        """A new engine, or the heartbeat of a known one. Raises ConflictError for an engine of another run."""
        self._check_run(engine.run_id, f"engine {engine.engine_id}")
        url = engine.url.rstrip("/")
        known = self._engines.get(engine.engine_id)
        if known is None:
            _log.info("engine joined", engine=engine.engine_id, url=url, policy_version=engine.policy_version)
        self._engines[engine.engine_id] = _Engine(url, time.monotonic() + self._lease_s)
        restarted = known is not None and known.url != url
        self._machine.join(engine.engine_id, engine.policy_version, restarted=restarted)
        self._pump()
        latest = self._machine.latest
        return EngineRegistered(lease_s=self._lease_s, latest_version=None if latest is None else latest.version)

    def deregister(self, engine_id: str) -> None:
        if engine_id in self._engines:
            _log.info("engine left", engine=engine_id)
            self._drop(engine_id, "the engine left")

    def engines(self) -> EnginesView:
        now = time.monotonic()
        versions = self._machine.members
        return EnginesView(
            engines=[
                EngineView(
                    engine_id=engine_id,
                    url=engine.url,
                    policy_version=versions[engine_id],
                    lease_left_s=max(0.0, engine.lease_ends - now),
                )
                for engine_id, engine in self._engines.items()
            ]
        )

    def announce(self, manifest: Manifest, payload: bytes) -> bool:
        """Start an update; False for one that is known by the same bytes, whose sources are refreshed.

        `payload`: the encoded manifest, passed on to the engines. Raises ConflictError for another run, a version older
        than the latest, or the latest with other bytes.
        """
        self._check_run(manifest.run_id, f"manifest of version {manifest.version}")
        latest = self._machine.latest
        if latest is not None and manifest.version <= latest.version:
            return self._repeat(manifest, payload, latest)
        update = self._machine.announce(manifest.version)
        self._records[manifest.version] = _Record(update, manifest.root_digest, payload, time.monotonic())
        while len(self._records) > _KEPT_UPDATES:
            self._records.pop(next(iter(self._records)))
        self._pump()
        return True

    async def wait_settled(self, version: int, wait_s: float) -> None:
        """Return when the update has settled or `wait_s` have passed. Raises NotFoundError for an unknown version."""
        record = self._record(version)
        try:
            async with asyncio.timeout(wait_s):
                await record.settled.wait()
        except TimeoutError:
            return

    def view(self, version: int) -> UpdateView:
        record = self._record(version)
        return UpdateView(
            version=version,
            state=record.update.state,
            root_digest=record.root_digest,
            engines=[_progress(record, *item) for item in record.update.progress.items()],
            publish_to_commit_ms=record.commit_ms,
        )

    async def verify(self) -> VerifyView:
        """Ask every live engine for the digest of what it serves."""
        latest = self._machine.latest
        digests = await asyncio.gather(*(self._digest(engine_id) for engine_id in list(self._engines)))
        if latest is None:
            return VerifyView(version=None, root_digest=None, engines=digests, match=False)
        expected = (latest.version, self._record(latest.version).root_digest)
        match = bool(digests) and all((found.version, found.root_digest) == expected for found in digests)
        return VerifyView(version=expected[0], root_digest=expected[1], engines=digests, match=match)

    def _check_run(self, run_id: str, what: str) -> None:
        if run_id != self._run_id:
            raise ConflictError(f"{what} belongs to run {run_id!r}, this bus serves {self._run_id!r}")

    def _repeat(self, manifest: Manifest, payload: bytes, latest: Update) -> bool:
        if manifest.version < latest.version:
            raise ConflictError(f"version {manifest.version} is older than {latest.version}, which is published")
        record = self._record(manifest.version)
        if record.root_digest != manifest.root_digest:
            raise ConflictError(
                f"version {manifest.version} is published with other bytes", "a version is one set of bytes for ever"
            )
        record.payload = payload
        self._machine.offer_again()
        self._pump()
        return False

    def _record(self, version: int) -> _Record:
        record = self._records.get(version)
        if record is None:
            raise NotFoundError(f"the weight bus knows no update {version}")
        return record

    def _drop(self, engine_id: str, why: str) -> None:
        del self._engines[engine_id]
        self._machine.leave(engine_id, why)
        self._pump()

    def _pump(self) -> None:
        """Carry out what the machine wants next; note what has settled."""
        for ask in self._machine.take_asks():
            engine = self._engines[ask.engine_id]
            task = asyncio.create_task(self._carry_out(ask, engine.url), name=f"{ask.phase} {ask.version}")
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        for record in self._records.values():
            if record.update.settled and not record.settled.is_set():
                self._note_settled(record)

    def _note_settled(self, record: _Record) -> None:
        milliseconds = (time.monotonic() - record.announced) * 1e3
        if record.update.state == "committed":
            record.commit_ms = milliseconds
        record.settled.set()
        log = _log.warning if record.update.state == "failed" else _log.info
        log("weight update", version=record.update.version, state=record.update.state, ms=round(milliseconds, 1))

    async def _carry_out(self, ask: Ask, url: str) -> None:
        record = self._records[ask.version]
        figures = record.figures.setdefault(ask.engine_id, _Figures())
        started = time.monotonic()
        failure: str | None = None
        try:
            if ask.phase == "stage":
                staged = await self._client.stage(url, record.payload)
                figures.bytes_read = staged.bytes_read
                figures.stage_ms = (time.monotonic() - started) * 1e3
                if (staged.version, staged.root_digest) != (ask.version, record.root_digest):
                    failure = f"{url} staged version {staged.version}, digest {staged.root_digest[:16]}…"
            else:
                figures.flip_ms = (await self._client.commit(url, ask.version)).flip_ms
        except RollmeshError as error:
            failure = str(error)
        except Exception as error:  # noqa: BLE001 - see below
            # A bug, but the update must settle all the same: the others wait for this answer.
            _log.exception("call to an engine broke", engine=ask.engine_id, phase=ask.phase, version=ask.version)
            failure = f"the bus broke: {error!r}"
        mattered = self._machine.answer(ask, failure)
        if mattered and failure is not None:
            _log.warning("engine failed", engine=ask.engine_id, phase=ask.phase, version=ask.version, why=failure)
        elif mattered and ask.engine_id in self._engines:
            self._engines[ask.engine_id].lease_ends = time.monotonic() + self._lease_s
        self._pump()

    async def _digest(self, engine_id: str) -> EngineDigest:
        try:
            found = await self._client.digest(self._engines[engine_id].url)
        except RollmeshError as error:
            return EngineDigest(engine_id=engine_id, version=-1, root_digest="", why=str(error))
        return EngineDigest(engine_id=engine_id, version=found.version, root_digest=found.root_digest)


def _progress(record: _Record, engine_id: str, progress: Progress) -> EngineProgress:
    figures = record.figures.get(engine_id, _Figures())
    return EngineProgress(
        engine_id=engine_id,
        state=progress.state,
        bytes_read=figures.bytes_read,
        stage_ms=figures.stage_ms,
        flip_ms=figures.flip_ms,
        why=progress.why,
    )

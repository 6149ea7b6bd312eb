"""A weight bus and engines that only pretend to hold weights, for tests of what the bus asks and answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import msgspec
from fastapi import FastAPI, Request

from services.http.app import Stop, make_app
from services.observability.tracing import NO_TRACING, Tracing
from services.policies.fleet.policy import BARRIER, FleetPolicy
from services.security.permissions import NO_KEYS, Keys
from services.wire.errors import ConflictError
from services.wire.weights_api import CommitAnswer, CommitCall, DigestAnswer, RollbackCall, StageAnswer
from tests.support.served_app import served
from weight_bus.client.bus_client import BusClient
from weight_bus.coordinator.app import build_app
from weight_bus.errors import StageError
from weight_bus.manifest.manifest import Bucket, Layout, Manifest, Owner, ShmSource, decode_manifest


def manifest_of(run_id: str, version: int, digest: str | None = None) -> Manifest:
    """A sound manifest of four bytes that nobody can read."""
    return Manifest(
        run_id=run_id,
        version=version,
        kind="dense",
        layout=Layout(tensors=[], total_bytes=4, digest="l"),
        buckets=[Bucket(offset=0, length=4, hash="bb" * 32)],
        root_digest=digest or f"digest-{version}",
        owners=[Owner(total_bytes=4, sources=[ShmSource(path="/nowhere", length=4, host="h")])],
    )


@asynccontextmanager
async def _nothing(_: FastAPI) -> AsyncIterator[None]:
    yield


class PretendEngine:
    """`broken`: why every stage fails. `go_on`: stages wait for it. `token`: what its canary generates.

    `ranks`: what each rank claims to have staged; None for an engine of one. `key`: what callers must show.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.served, self.digest = 0, "digest-0"
        self.staged: Manifest | None = None
        self.before: tuple[int, str] | None = None
        self.broken: str | None = None
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.token = 7
        self.ranks: list[str] | None = None
        self.paused: str | None = None
        self.key: str | None = None
        self.calls: list[str] = []

    def app(self) -> FastAPI:
        app = make_app("pretend-engine", "0", _nothing, not_ready=list)

        @app.middleware("http")
        async def check_key(request: Request, call_next):  # type: ignore[no-untyped-def]
            assert self.key is None or request.headers.get("authorization") == f"Bearer {self.key}"
            self.calls.append(request.url.path)
            return await call_next(request)

        @app.post("/weights/stage")
        async def stage(request: Request) -> StageAnswer:
            manifest = decode_manifest(await request.body())
            await self.go_on.wait()
            if self.broken is not None:
                raise StageError(self.broken)
            self.staged, self.before = manifest, None
            root = manifest.root_digest
            return StageAnswer(
                version=manifest.version, root_digest=root, bytes_read=4, seconds=0.0, rank_digests=self.ranks
            )

        @app.post("/weights/commit")
        async def commit(call: CommitCall) -> CommitAnswer:
            if self.staged is None or self.staged.version != call.version:
                raise ConflictError(f"version {call.version} is not staged")
            self.before = (self.served, self.digest)
            self.served, self.digest, self.staged = self.staged.version, self.staged.root_digest, None
            return CommitAnswer(version=call.version, flip_ms=0.5, requests_in_flight=0)

        @app.post("/weights/rollback")
        async def rollback(call: RollbackCall) -> CommitAnswer:
            if self.before is None or self.before[0] != call.version:
                raise ConflictError(f"version {call.version} is not kept")
            (self.served, self.digest), self.before = self.before, None
            return CommitAnswer(version=call.version, flip_ms=0.5, requests_in_flight=0)

        @app.get("/weights/digest")
        async def digest() -> DigestAnswer:
            return DigestAnswer(version=self.served, root_digest=self.digest)

        @app.post("/inference/v1/generate")
        async def generate(request: Request) -> dict[str, object]:
            call = msgspec.json.decode(await request.body())
            assert call["sampling_params"]["temperature"] == 0.0
            sampled = [self.token] * call["sampling_params"]["max_tokens"]
            return {"request_id": "r", "choices": [{"index": 0, "token_ids": sampled}]}

        @app.post("/pause")
        async def pause(mode: str, clear_cache: bool) -> dict[str, str]:
            self.paused = mode
            return {"status": "paused"}

        @app.post("/resume")
        async def resume() -> dict[str, str]:
            self.paused = None
            return {"status": "resumed"}

        return app


class BusFleet:
    """A bus on a real socket, `http` for operators' raw calls, `bus` for the trainer's and the engines'."""

    def __init__(self, run_id: str, stack: AsyncExitStack) -> None:
        self.run_id = run_id
        self.engines: dict[str, PretendEngine] = {}
        self.urls: dict[str, str] = {}
        self.url: str
        self.bus: BusClient
        self.http: httpx.AsyncClient
        self._stack = stack

    async def start(
        self,
        policy: FleetPolicy = BARRIER,
        *,
        keys: Keys = NO_KEYS,
        engine_key: str | None = None,
        lease_s: float = 30.0,
        tracing: Tracing = NO_TRACING,
        state_file: Path | None = None,
    ) -> None:
        stop = Stop()
        app = build_app(
            self.run_id,
            5.0,
            stop=stop,
            lease_s=lease_s,
            policy=policy,
            keys=keys,
            engine_key=engine_key,
            tracing=tracing,
            state_file=state_file,
        )
        self.url = await self._stack.enter_async_context(served(app, stop))
        self.bus = BusClient(self.url, self.run_id, deadline_s=2.0, key=keys.admin)
        self._stack.push_async_callback(self.bus.close)
        headers = {} if keys.admin is None else {"authorization": f"Bearer {keys.admin}"}
        self.http = await self._stack.enter_async_context(
            httpx.AsyncClient(base_url=self.url, headers=headers, timeout=20)
        )

    async def add(self, name: str, ranks: int = 1) -> PretendEngine:
        engine = PretendEngine(name)
        self.urls[name] = await self._stack.enter_async_context(served(engine.app()))
        self.engines[name] = engine
        await self.bus.register(name, self.urls[name], engine.served, ranks=ranks)
        return engine

    async def beat(self, name: str) -> None:
        await self.bus.register(name, self.urls[name], self.engines[name].served)

    async def publish(self, version: int, *, wait_s: float = 5.0) -> str:
        """The state that the update comes to."""
        return (await self.bus.announce(manifest_of(self.run_id, version), wait_s=wait_s)).state

    @property
    def served(self) -> dict[str, int]:
        return {name: engine.served for name, engine in self.engines.items()}

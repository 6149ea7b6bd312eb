"""A rollout server on a real socket inside the test's event loop, and a client that speaks to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from redis.asyncio import Redis

from rollout_server.app import make_rollout_app
from rollout_server.engines.base import Engine
from rollout_server.server import ServerPlan
from services.config.settings import RunSettings
from services.http.app import Stop, make_server, open_port
from services.observability.tracing import NO_TRACING, Tracing
from services.run_store.client import connect
from services.run_store.ledger import Ledger
from services.run_store.stream import TrajectoryReader
from services.security.permissions import NO_KEYS, Keys
from services.security.tls import PLAIN, Tls
from services.wire.trajectory import Trajectory, decode_trajectory
from tests.support.served_app import context_of
from tests.support.until import until as until
from weight_bus.client.membership import Bus

SAMPLING = {"max_tokens": 24}


@dataclass
class Host:
    """A server that is ready, a client of it, and the run's Redis beside it."""

    http: httpx.AsyncClient
    url: str
    redis: Redis
    ledger: Ledger
    run_id: str
    stop: Stop
    redis_url: str

    async def report(self) -> dict[str, Any]:
        """`GET /engine`."""
        answer: dict[str, Any] = (await self.http.get("/engine")).json()
        return answer

    async def open(self, **changes: Any) -> dict[str, Any]:
        answer = await self.try_open(**changes)
        assert answer.status_code == 201, answer.text
        opened: dict[str, Any] = answer.json()
        return opened

    async def try_open(self, **changes: Any) -> httpx.Response:
        body = {"task": "sums", "group_size": 2, "sampling": SAMPLING, "wait_s": 0.0} | changes
        return await self.http.post("/groups", json=body)

    async def turns(self, group: dict[str, Any], *texts: str | None, **changes: Any) -> httpx.Response:
        """One turn for each session with a text, in one call."""
        pairs = zip(group["session_ids"], texts, strict=True)
        turns = [{"session_id": session_id, "text": text} for session_id, text in pairs if text is not None]
        return await self.http.post(f"/groups/{group['group_id']}/turns", json={"turns": turns} | changes)

    async def finish(self, group: dict[str, Any], *rewards: float) -> httpx.Response:
        pairs = zip(group["session_ids"], rewards, strict=False)
        body = {"rewards": [{"session_id": name, "reward": reward} for name, reward in pairs]}
        return await self.http.post(f"/groups/{group['group_id']}/finish", json=body)

    async def published(self) -> list[Trajectory]:
        """Every trajectory in the stream, checked."""
        reader = TrajectoryReader(self.redis, self.run_id)
        await reader.open()
        entries = []
        # First what was read before, in earlier calls, then what is new.
        while more := await reader.read(1000, 1):
            entries += more
        return [decode_trajectory(entry.payload) for entry in entries]


@asynccontextmanager
async def hosting(
    engine: Engine,
    *,
    redis_url: str,
    run_id: str,
    model: Path,
    settings: RunSettings | None = None,
    bus: Bus | None = None,
    server_id: str = "s0",
    port: int = 0,
    keys: Keys = NO_KEYS,
    tls: Tls = PLAIN,
    tracing: Tracing = NO_TRACING,
    stop: Stop | None = None,
    announced_url: str | None = None,
) -> AsyncIterator[Host]:
    """Serve `engine` until the block ends; the block starts when the server says that it is ready.

    `stop`: given, it says why a server ended that never was ready. `announced_url`: where gateways find it, if not there.
    """
    listener = open_port("127.0.0.1", port)
    url = f"{tls.scheme}://127.0.0.1:{listener.getsockname()[1]}"
    plan = ServerPlan(
        run_id=run_id,
        server_id=server_id,
        url=announced_url or url,
        redis_url=redis_url,
        model=model,
        settings=settings or RunSettings(),
        keys=keys,
        trust=tls.trust,
        tracing=tracing,
    )
    stop = stop or Stop()
    server = make_server(make_rollout_app(plan, engine, bus, stop), stop, identity=tls.identity)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    redis = connect(redis_url)
    try:
        async with httpx.AsyncClient(base_url=url, timeout=20.0, verify=context_of(tls.trust)) as http:
            await until_ready(http, serving)
            yield Host(http, url, redis, Ledger(redis, run_id), run_id, stop, redis_url)
    finally:
        server.should_exit = True
        await serving
        await redis.aclose()


async def until_ready(http: httpx.AsyncClient, serving: asyncio.Task[None], deadline_s: float = 30.0) -> None:
    async with asyncio.timeout(deadline_s):
        while True:
            if serving.done():
                raise RuntimeError("the server ended before it was ready")
            try:
                if (await http.get("/readyz")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.01)


def small_batch(*, k: int = 0, batch: int = 4, timeout_s: float = 120.0) -> RunSettings:
    """Settings of a run whose steps consume `batch` groups."""
    settings = RunSettings(k=k)
    settings.rollout.groups_per_step = batch
    settings.rollout.group_timeout_s = timeout_s
    return settings

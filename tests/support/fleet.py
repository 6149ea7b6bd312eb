"""Rollout servers and a gateway as real processes on one Redis, to be killed, drained and added while agents speak."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
from redis.asyncio import Redis

from benchmarks.harness.processes import PYTHON, free_port, running
from services.config.load import dump_settings
from services.config.settings import RunSettings
from services.run_store.client import connect
from services.run_store.discovery import ServiceRegistry
from services.run_store.ledger import Ledger
from services.run_store.stream import TrajectoryLog
from services.supervisor.processes import Child
from services.wire.trajectory import Trajectory, decode_trajectory

READY_WITHIN_S = 60.0


class Fleet:
    """`servers`: those that run, by id."""

    def __init__(self, folder: Path, redis_url: str, run_id: str, model: Path, settings: RunSettings) -> None:
        self.servers: dict[str, Child] = {}
        self.urls: dict[str, str] = {}
        self.gateway_url = ""
        self.redis: Redis = connect(redis_url)
        self.ledger = Ledger(self.redis, run_id)
        self.registry = ServiceRegistry(self.redis, run_id)
        self._log = TrajectoryLog(self.redis, run_id)
        self._http = httpx.AsyncClient(timeout=10.0)
        self._folder = folder
        self._mesh = ["--run-id", run_id, "--redis-url", redis_url, "--config", str(folder / "run.toml")]
        self._model = model
        self._stacks: dict[str, AsyncExitStack] = {}
        self._gateway: Child | None = None
        (folder / "run.toml").write_text(dump_settings(settings))

    async def start(self, server_id: str, *, engine: str = "torch", wait: bool = True) -> None:
        """A rollout server, on the port that it had before."""
        url = self.urls.get(server_id) or f"http://127.0.0.1:{free_port()}"
        command = [*PYTHON, "services", "rollout-server", *self._mesh, "--server-id", server_id]
        command += ["--port", url.rpartition(":")[2], "--model", str(self._model), "--engine", engine]
        self.urls[server_id] = url
        stack = self._stacks[server_id] = AsyncExitStack()
        child = await stack.enter_async_context(running(server_id, command, self._folder))
        self.servers[server_id] = child
        if wait:
            await self.ready(server_id)

    async def ready(self, server_id: str) -> None:
        await self.servers[server_id].until(lambda: self._answers(f"{self.urls[server_id]}/readyz"), READY_WITHIN_S)

    async def start_gateway(self) -> None:
        self.gateway_url = f"http://127.0.0.1:{free_port()}"
        command = [*PYTHON, "services", "gateway", *self._mesh, "--port", self.gateway_url.rpartition(":")[2]]
        stack = self._stacks["gateway"] = AsyncExitStack()
        self._gateway = child = await stack.enter_async_context(running("gateway", command, self._folder))
        await child.until(lambda: self._answers(f"{self.gateway_url}/readyz"), READY_WITHIN_S)

    def processes(self) -> dict[str, Child]:
        """The servers and the gateway."""
        return self.servers | ({} if self._gateway is None else {"gateway": self._gateway})

    async def kill(self, server_id: str) -> None:
        """kill -9, and gone."""
        child = self.servers.pop(server_id)
        os.killpg(child.process.pid, signal.SIGKILL)
        await child.process.wait()
        await self._stacks.pop(server_id).aclose()

    async def terminate(self, server_id: str) -> int:
        """SIGTERM, and gone; the exit code."""
        child = self.servers.pop(server_id)
        child.process.terminate()
        code = await child.process.wait()
        await self._stacks.pop(server_id).aclose()
        return code

    async def published(self) -> list[Trajectory]:
        """Every trajectory in the stream, checked."""
        return [decode_trajectory(entry.payload) for entry in await self._log.after("0-0", 100_000)]

    def logs(self) -> str:
        """The ends of all logs, for a failure's message."""
        return "\n".join(f"== {path.name}\n{path.read_text()[-3000:]}" for path in sorted(self._folder.glob("*.log")))

    async def close(self) -> None:
        for stack in self._stacks.values():
            await stack.aclose()
        await self._http.aclose()
        await self.redis.aclose()

    async def _answers(self, url: str) -> bool:
        try:
            return (await self._http.get(url)).status_code == 200
        except httpx.HTTPError:
            return False


@asynccontextmanager
async def fleet_of(
    count: int, *, folder: Path, redis_url: str, run_id: str, model: Path, settings: RunSettings
) -> AsyncIterator[Fleet]:
    """So many servers `s0`, `s1`, … and a gateway, ready."""
    fleet = Fleet(folder, redis_url, run_id, model, settings)
    try:
        for number in range(count):
            await fleet.start(f"s{number}", wait=False)
        for number in range(count):
            await fleet.ready(f"s{number}")
        await fleet.start_gateway()
        yield fleet
    finally:
        await fleet.close()

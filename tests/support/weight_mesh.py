"""A mesh of real processes around the weight bus, and what is to hold of it whatever is done to them."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

import httpx

from services.host.files import remove_shm_files
from services.policies.fleet.policy import FleetPolicy
from services.wire.errors import RollmeshError
from services.wire.weights_api import UpdateView
from tests.conftest import free_port
from tests.support.until import until
from tests.support.weight_processes import (
    LEASE_S,
    STAGE_TIMEOUT_S,
    end,
    fork_server,
    run_bus,
    run_engine,
    run_publisher,
)
from weight_bus.client.bus_client import BusClient
from weight_bus.manifest.manifest import Manifest, decode_manifest

STARTS_WITHIN_S = 30.0
SETTLES_WITHIN_S = 2 * STAGE_TIMEOUT_S + 2 * LEASE_S + 3.0
"""A stage and a commit that both run out, a lease that lapses, and a margin for a busy machine."""
CATCHES_UP_WITHIN_S = 3 * STAGE_TIMEOUT_S + 2 * LEASE_S + 6.0
"""From the moment that everybody lives again and the newest version can be had."""
POLICIES = [FleetPolicy("barrier"), FleetPolicy("rolling"), FleetPolicy("quorum", quorum=0.5)]


class WeightMesh:
    """`start` it, `close` it. `published`: the digest of every version that engines may serve."""

    def __init__(self, run_id: str, transport: str, names: list[str], seed: int) -> None:
        self.run_id, self.transport, self.names = run_id, transport, names
        self.random = random.Random(seed)
        self.published: dict[int, str] = {}
        self.newest = 0
        self.bus_url = f"http://127.0.0.1:{free_port()}"
        self.bus = BusClient(self.bus_url, run_id, deadline_s=STARTS_WITHIN_S)
        self._urls = {name: f"http://127.0.0.1:{free_port()}" for name in names}
        self._context = fork_server()
        self._running: dict[str, ForkServerProcess] = {}
        self._stopped: set[str] = set()
        self._orders: Connection
        self._http = httpx.AsyncClient(timeout=SETTLES_WITHIN_S)

    async def start(self) -> None:
        for name in ("bus", "publisher", *self.names):
            self.begin(name)
        await until(self.everybody_registered, STARTS_WITHIN_S)
        initial = {await self.served(name) for name in self.names}
        assert len(initial) == 1
        self.published.update(initial)

    async def close(self) -> None:
        for name in list(self._running):
            self.kill(name)
        await self._http.aclose()
        await self.bus.close()
        # Of publishers that could not tidy up.
        remove_shm_files(self.run_id)

    def begin(self, name: str, policy: FleetPolicy | None = None) -> None:
        """Start the process `name`: bus, publisher, or an engine. `policy`: a bus's; None draws one."""
        if name == "bus":
            policy = policy or self.random.choice(POLICIES)
            self._run(name, run_bus, self.run_id, _port(self.bus_url), policy)
        elif name == "publisher":
            self._orders, theirs = self._context.Pipe()
            self._run(name, run_publisher, self.run_id, self.transport, theirs)
            theirs.close()
        else:
            self._run(name, run_engine, self.run_id, name, _port(self._urls[name]), self.bus_url, self.transport)

    def kill(self, name: str) -> None:
        self._stopped.discard(name)
        end(self._running.pop(name))

    def stop(self, name: str) -> None:
        """It stands still, with all its connections open."""
        self._signal(name, signal.SIGSTOP)
        self._stopped.add(name)

    def go_on(self, name: str) -> None:
        self._signal(name, signal.SIGCONT)
        self._stopped.discard(name)

    @property
    def surviving(self) -> list[str]:
        """Engines that live and do not stand still."""
        return [name for name in self.names if name in self._running and name not in self._stopped]

    async def publish(self, version: int) -> Manifest:
        manifest = decode_manifest(await self.order(f"publish {version}"))
        assert self.published.setdefault(version, manifest.root_digest) == manifest.root_digest
        self.newest = max(self.newest, version)
        return manifest

    async def order(self, order: str) -> bytes:
        """Have the publisher do it."""
        self._orders.send_bytes(order.encode())
        assert await asyncio.to_thread(self._orders.poll, STARTS_WITHIN_S), f"the publisher hangs at {order}"
        return self._orders.recv_bytes()

    async def served(self, name: str) -> tuple[int, str]:
        """What an engine says it serves, and the digest of the bytes that it really does."""
        answer = await self._http.get(f"{self._urls[name]}/weights/digest")
        digest = answer.raise_for_status().json()
        return digest["version"], digest["root_digest"]

    async def check_whole(self) -> None:
        """Every surviving engine serves one published version, whole, and says which."""
        names = self.surviving
        for name, (version, digest) in zip(names, await asyncio.gather(*map(self.served, names)), strict=True):
            assert self.published.get(version) == digest, f"{name} says version {version} and serves other bytes"

    async def settled(self, version: int) -> UpdateView:
        return await self.bus.wait_settled(version, SETTLES_WITHIN_S)

    async def catch_up(self, manifest: Manifest) -> None:
        """Announce it again and again, as a trainer does, until everybody serves it."""
        ends = time.monotonic() + CATCHES_UP_WITHIN_S
        expected = (manifest.version, manifest.root_digest)
        while {await self.served(name) for name in self.names} != {expected}:
            assert time.monotonic() < ends, f"after {CATCHES_UP_WITHIN_S} s: {await self.bus.announce(manifest)}"
            await self.bus.announce(manifest, wait_s=0.5)

    async def everybody_registered(self) -> bool:
        try:
            return len((await self.bus.engines()).engines) == len(self.names)
        except RollmeshError:
            return False

    def _run(self, name: str, main: object, *arguments: object) -> None:
        process = self._context.Process(target=main, args=arguments, name=name, daemon=True)  # type: ignore[arg-type]
        process.start()
        self._running[name] = process

    def _signal(self, name: str, number: signal.Signals) -> None:
        pid = self._running[name].pid
        assert pid is not None
        os.kill(pid, number)


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])

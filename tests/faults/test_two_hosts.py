"""Engines on another host than the trainer: weights cross a link, which is cut and healed, over NIXL by TCP and over gloo.

The hosts are network namespaces of this machine (`tests.support.two_hosts`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess

import httpx
import pytest

pytest.importorskip("torch")

from services.config.settings import WeightSettings
from services.policies.fleet.policy import BARRIER
from services.wire.errors import RollmeshError
from services.wire.weights_api import EngineProgress, UpdateView
from tests.support.two_hosts import Side, TwoHosts, enter_and_run, why_not
from tests.support.until import until
from tests.support.weight_processes import end, fork_server, run_bus, run_engine, run_publisher
from weight_bus.client.bus_client import BusClient
from weight_bus.manifest.manifest import Manifest, decode_manifest
from weight_bus.transports.environment import wire_environment
from weight_bus.transports.select import nixl_installed

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"two hosts: {why_not()}")

KEY = "the key of the run's weights"
WITHIN_S = 60.0
STAGE_S = 30.0
SLOWER_BY_S = 0.05
"""A version has some 35 pieces: a stage lasts nearly two seconds, in which the link can be cut."""
BUS_PORT, FIRST_PORT = 8200, 8000
NAMES = ("e0", "e1")


class Mesh:
    """Bus and publisher on one host, two engines on the other. `start` it, `close` it."""

    def __init__(self, hosts: TwoHosts, run_id: str, weights: WeightSettings) -> None:
        self.hosts, self.run_id, self.weights = hosts, run_id, weights
        self.bus_url = f"http://{hosts.addresses['trainer']}:{BUS_PORT}"
        self._context = fork_server()
        self._running: list[ForkServerProcess] = []
        self._orders: Connection

    async def start(self) -> None:
        trainer, engines = (self.hosts.addresses[side] for side in ("trainer", "engines"))
        transport, key = self.weights.transport, KEY
        self._run("trainer", run_bus, self.run_id, BUS_PORT, BARRIER, trainer, STAGE_S)
        self._orders, theirs = self._context.Pipe()
        self._run("trainer", run_publisher, self.run_id, transport, theirs, self.weights.broadcast_host, key)
        theirs.close()
        for number, name in enumerate(NAMES):
            port = FIRST_PORT + number
            where = (port, self.bus_url, transport, engines, key, SLOWER_BY_S)
            self._run("engines", run_engine, self.run_id, name, *where)
        await until(self.registered, WITHIN_S)

    def close(self) -> None:
        for process in self._running:
            end(process)

    async def publish(self, version: int) -> Manifest:
        self._orders.send_bytes(f"publish {version}".encode())
        assert await asyncio.to_thread(self._orders.poll, WITHIN_S), "the publisher hangs"
        return decode_manifest(self._orders.recv_bytes())

    async def announce(self, manifest: Manifest, wait_s: float) -> UpdateView:
        async def announce(bus: BusClient) -> UpdateView:
            return await bus.announce(manifest, wait_s=wait_s)

        return await self.ask_bus(announce)

    async def update_of(self, version: int) -> UpdateView:
        async def ask(bus: BusClient) -> UpdateView:
            return await bus.wait_settled(version, WITHIN_S)

        return await self.ask_bus(ask)

    async def ask_bus(self, ask: Callable[[BusClient], Awaitable[UpdateView]]) -> UpdateView:
        async def asked() -> UpdateView:
            bus = BusClient(self.bus_url, self.run_id, deadline_s=WITHIN_S)
            try:
                return await ask(bus)
            finally:
                await bus.close()

        return await self.hosts.at("trainer", asked)

    async def registered(self) -> bool:
        assert all(process.is_alive() for process in self._running), "a process of the mesh has ended"

        async def ask() -> int:
            bus = BusClient(self.bus_url, self.run_id, deadline_s=1.0)
            try:
                return len((await bus.engines()).engines)
            except RollmeshError:
                return 0
            finally:
                await bus.close()

        return await self.hosts.at("trainer", ask) == len(NAMES)

    async def staging(self, version: int) -> bool:
        """Whether both engines are being asked for their stage."""

        async def ask() -> list[EngineProgress]:
            async with httpx.AsyncClient(trust_env=False, timeout=WITHIN_S) as http:
                answer = await http.get(f"{self.bus_url}/v1/updates/{version}")
                if answer.status_code == 404:
                    return []
                return UpdateView.model_validate_json(answer.raise_for_status().content).engines

        found = await self.hosts.at("trainer", ask)
        return len(found) == len(NAMES) and all(engine.state == "staging" for engine in found)

    async def served(self) -> set[tuple[int, str]]:
        """Version and digest of the bytes that the engines really serve; asked on their own host."""

        async def ask() -> set[tuple[int, str]]:
            async with httpx.AsyncClient(trust_env=False, timeout=WITHIN_S) as http:
                answers = [await http.get(f"{url}/weights/digest") for url in self._urls]
            return {(found["version"], found["root_digest"]) for found in [answer.json() for answer in answers]}

        return await self.hosts.at("engines", ask)

    async def waits(self) -> list[str]:
        """What each engine says it is not ready for; asked on their own host."""

        async def ask() -> list[str]:
            async with httpx.AsyncClient(trust_env=False, timeout=WITHIN_S) as http:
                return [(await http.get(f"{url}/readyz")).text for url in self._urls]

        return await self.hosts.at("engines", ask)

    async def catch_up(self, manifest: Manifest) -> None:
        """Announce it until both engines serve it, as a trainer does of its last version."""
        expected = {(manifest.version, manifest.root_digest)}
        async with asyncio.timeout(WITHIN_S):
            while await self.served() != expected:
                await self.announce(manifest, wait_s=2.0)

    @property
    def _urls(self) -> list[str]:
        return [f"http://{self.hosts.addresses['engines']}:{FIRST_PORT + number}" for number in range(len(NAMES))]

    def _run(self, side: Side, main: Callable[..., None], *arguments: object) -> None:
        # Each host has its own name for its end of the link.
        weights = self.weights
        if weights.nixl.devices == ("LINK",):
            nixl = weights.nixl.model_copy(update={"devices": (self.hosts.links[side],)})
            weights = weights.model_copy(update={"nixl": nixl})
        given = (self.hosts.path(side), wire_environment(weights), main, *arguments)
        process = self._context.Process(target=enter_and_run, args=given, daemon=True)
        process.start()
        self._running.append(process)


@asynccontextmanager
async def mesh_of(run_id: str, make: Callable[[TwoHosts], WeightSettings]) -> AsyncIterator[Mesh]:
    with TwoHosts() as hosts:
        mesh = Mesh(hosts, run_id, make(hosts))
        try:
            await mesh.start()
            yield mesh
        finally:
            mesh.close()


def over_nixl(_: TwoHosts) -> WeightSettings:
    if not nixl_installed():
        pytest.skip("nixl is not installed")
    # By TCP alone: namespaces of one machine could be crossed by its memory.
    return WeightSettings.model_validate(
        {"transport": "nixl", "nixl": {"transports": ["tcp", "self"], "devices": ["LINK"], "ports": "42000-42099"}}
    )


def over_gloo(hosts: TwoHosts) -> WeightSettings:
    host = hosts.addresses["trainer"]
    return WeightSettings.model_validate(
        {"transport": "nccl", "broadcast_host": host, "nccl": {"ports": "42100-42199"}}
    )


@pytest.mark.parametrize("over", [over_nixl, over_gloo])
async def test_two_engines_are_updated_across_a_link_that_is_cut_and_healed(
    run_id: str, over: Callable[[TwoHosts], WeightSettings]
) -> None:
    async with mesh_of(run_id, over) as mesh:
        first = await mesh.publish(1)
        await mesh.catch_up(first)
        # All numbers of every third version are new: no delta, which would be there in a moment.
        third = await mesh.publish(3)
        announcing = asyncio.create_task(mesh.announce(third, wait_s=0.0))
        await until(lambda: mesh.staging(3), WITHIN_S)
        mesh.hosts.cut()
        await announcing
        lost = await mesh.update_of(3)
        assert lost.state == "failed"
        assert await mesh.served() == {(1, first.root_digest)}
        await until(lambda: _all_say(mesh, "not registered with the weight bus, which"), WITHIN_S)
        mesh.hosts.heal()
        await until(mesh.registered, WITHIN_S)
        await mesh.catch_up(third)
        # And on: nothing of the cut is left behind.
        await mesh.catch_up(await mesh.publish(4))


async def _all_say(mesh: Mesh, words: str) -> bool:
    return all(words in said for said in await mesh.waits())


def on_loopback(_: TwoHosts) -> WeightSettings:
    return WeightSettings(transport="nccl")


async def test_a_broadcast_on_loopback_is_refused_by_name_and_the_old_version_stays(run_id: str) -> None:
    async with mesh_of(run_id, on_loopback) as mesh:
        before = await mesh.served()
        update = await mesh.announce(await mesh.publish(1), wait_s=20.0)
        assert update.state == "failed"
        for engine in update.engines:
            assert "127.0.0.1" in (engine.why or "")
            assert "set weights.broadcast_host to an address of" in (engine.why or "")
        assert await mesh.served() == before


def nixl_on_loopback(hosts: TwoHosts) -> WeightSettings:
    weights = over_nixl(hosts)
    return weights.model_copy(update={"nixl": weights.nixl.model_copy(update={"devices": ("lo",)})})


async def test_nixl_on_loopback_is_refused_by_name_and_the_old_version_stays(run_id: str) -> None:
    async with mesh_of(run_id, nixl_on_loopback) as mesh:
        before = await mesh.served()
        update = await mesh.announce(await mesh.publish(1), wait_s=20.0)
        assert update.state == "failed"
        assert all("weights.nixl.devices" in (engine.why or "") for engine in update.engines), update
        assert await mesh.served() == before

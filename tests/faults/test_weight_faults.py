"""Whatever dies, stalls or rots between publish and commit: every surviving engine serves exactly one whole version.

`ROLLMESH_TEST_WEIGHT_FAULTS=100` sets the number of cases; `ROLLMESH_TEST_WEIGHT_SEED` where they come from.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest

pytest.importorskip("torch")

from clients.weights.client import WeightsClient
from services.policies.fleet.policy import BARRIER
from tests.support.until import until
from tests.support.weight_mesh import CATCHES_UP_WITHIN_S, WeightMesh
from weight_bus.manifest.manifest import Manifest, encode_manifest
from weight_bus.transports.select import nixl_installed

CASES = int(os.environ.get("ROLLMESH_TEST_WEIGHT_FAULTS", "6"))
SEED = int(os.environ.get("ROLLMESH_TEST_WEIGHT_SEED", "1"))
STAGE_S = 0.5
"""Faults strike within so many seconds of the announcement, rather early than late: staging, flipping, just done."""
FAULTS = ["receiver killed", "publisher killed", "bus killed", "flipped bit", "receiver stalls", "publisher stalls"]
TRANSPORTS = ["shm", "nixl"]


@asynccontextmanager
async def mesh_of(run_id: str, transport: str, engines: int) -> AsyncIterator[WeightMesh]:
    if transport == "nixl" and not nixl_installed():
        pytest.skip("nixl is not installed")
    mesh = WeightMesh(run_id, transport, [f"e{number}" for number in range(engines)], SEED)
    try:
        await mesh.start()
        yield mesh
    finally:
        await mesh.close()


def share(index: int) -> list[tuple[int, str]]:
    """The cases of the transport number `index`: every fault in turn, over both transports in turn."""
    return [(case, FAULTS[(case // 2 if CASES > 6 else case) % 6]) for case in range(CASES) if case % 2 == index]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_every_survivor_serves_one_whole_version_and_catches_up(run_id: str, transport: str) -> None:
    async with mesh_of(run_id, transport, engines=3) as mesh:
        await mesh.catch_up(await mesh.publish(1))
        for case, fault in share(TRANSPORTS.index(transport)):
            manifest = await mesh.publish(mesh.newest + 1)
            try:
                manifest = await strike(mesh, fault, manifest)
                await mesh.catch_up(manifest)
            except Exception as error:
                error.add_note(f"case {case} ({fault}, seed {SEED}, {transport}, version {manifest.version})")
                raise


async def strike(mesh: WeightMesh, fault: str, manifest: Manifest) -> Manifest:
    """Announce, let the fault happen, look, and make everybody live again; the manifest that can be had now."""
    if fault == "flipped bit":
        await a_bit_flips(mesh, manifest)
        return manifest
    sending_heartbeats = asyncio.create_task(mesh.bus.announce(manifest))
    await asyncio.sleep(mesh.random.random() ** 2 * STAGE_S)
    victim = fault.split()[0].replace("receiver", mesh.random.choice(mesh.names))
    if fault.endswith("killed"):
        mesh.kill(victim)
        await mesh.check_whole()
        mesh.begin(victim)
        await sending_heartbeats
        await until(lambda: answers(mesh, victim), 30.0)
        await mesh.check_whole()
        return await mesh.publish(manifest.version) if victim == "publisher" else manifest
    mesh.stop(victim)
    await sending_heartbeats
    # Nobody waits for it for longer than its lease and a call's deadline.
    await mesh.settled(manifest.version)
    await mesh.check_whole()
    mesh.go_on(victim)
    return manifest


async def answers(mesh: WeightMesh, name: str) -> bool:
    """Whether a process that was started again is there; for others than engines, their next caller waits."""
    try:
        return name not in mesh.names or bool(await mesh.served(name))
    except httpx.TransportError:
        return False


async def a_bit_flips(mesh: WeightMesh, manifest: Manifest) -> None:
    """One bit of the published bytes, dense and delta: nobody serves them, and everybody says why."""
    await until(mesh.everybody_registered, 10.0)
    before = {name: await mesh.served(name) for name in mesh.names}
    place = mesh.random.randrange(64)
    await mesh.order(f"flip {place}")
    await mesh.bus.announce(manifest)
    update = await mesh.settled(manifest.version)
    assert update.state == "failed"
    assert all("hash" in (engine.why or "") for engine in update.engines), update
    assert {name: await mesh.served(name) for name in mesh.names} == before
    await mesh.order(f"flip {place}")


async def test_a_bus_killed_between_prepare_and_commit_is_carried_on_by_the_next(run_id: str) -> None:
    async with mesh_of(run_id, "shm", engines=2) as mesh:
        watching = asyncio.create_task(asyncio.to_thread(watch_until_committed, mesh.bus_url))
        manifest = await mesh.publish(1)
        async with httpx.AsyncClient(timeout=20) as http:
            held = await http.post(f"{mesh.bus_url}/v1/updates?hold=true&wait_s=10", content=encode_manifest(manifest))
        assert held.json()["state"] == "held"
        mesh.kill("bus")
        await mesh.check_whole()
        # Under a quorum "committed" would not mean that both engines have flipped.
        mesh.begin("bus", BARRIER)

        async def known() -> bool:
            engines = (await mesh.bus.engines()).engines
            return [(each.policy_version, each.staged_version) for each in engines] == [(0, 1)] * 2

        await until(known, 20.0)
        # Without a publisher nothing can be read again: the engines answer from what lies staged.
        mesh.kill("publisher")
        update = await mesh.bus.announce(manifest, wait_s=10)
        assert update.state == "committed"
        assert [await mesh.served(name) for name in mesh.names] == [(1, mesh.published[1])] * 2
        # Who watches has seen both buses' events, over one stream as it seems.
        kinds = await asyncio.wait_for(watching, 20)
        assert (kinds.count("held"), kinds[-1]) == (1, "committed")


def watch_until_committed(bus_url: str) -> list[str]:
    kinds: list[str] = []
    with WeightsClient(bus_url) as operator:
        for event in operator.watch():
            if event.engine_id is None:
                kinds.append(event.kind)
                if event.kind == "committed":
                    break
    return kinds


async def test_a_rollback_reaches_those_that_stood_still_or_begin_anew(run_id: str) -> None:
    async with mesh_of(run_id, "shm", engines=3) as mesh:
        for version in (1, 2):
            await mesh.catch_up(await mesh.publish(version))
        mesh.stop("e1")
        mesh.kill("e2")
        await until(lambda: registered(mesh, 1), 10.0)
        with WeightsClient(mesh.bus_url) as operator:
            back = await asyncio.to_thread(operator.rollback)
            assert (back.withdrawn, back.update.version) == (2, 1)
            assert (await asyncio.to_thread(operator.wait, 1, 10)).state == "committed"
        assert await mesh.served("e0") == (1, mesh.published[1])
        mesh.go_on("e1")
        mesh.begin("e2")
        await until(lambda: everybody_serves(mesh, 1), CATCHES_UP_WITHIN_S)
        await mesh.catch_up(await mesh.publish(3))


async def registered(mesh: WeightMesh, engines: int) -> bool:
    return len((await mesh.bus.engines()).engines) == engines


async def everybody_serves(mesh: WeightMesh, version: int) -> bool:
    try:
        return {await mesh.served(name) for name in mesh.names} == {(version, mesh.published[version])}
    except httpx.TransportError:
        return False

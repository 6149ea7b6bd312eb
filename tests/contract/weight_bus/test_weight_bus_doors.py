"""What the weight bus does not take: old manifests after a restart, impossible versions, engines where none is."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from services.security.permissions import Keys
from services.wire.weights_api import LAST_VERSION
from tests.support.bus_fleet import BusFleet, manifest_of
from weight_bus.coordinator.version_floor import FURTHEST_AHEAD
from weight_bus.manifest.manifest import encode_manifest, sign

KEYS = Keys(admin="an-admin-key-of-many-letters", weights="a-weights-key-of-many-letters")


@pytest.fixture
async def fleet(run_id: str) -> AsyncIterator[BusFleet]:
    async with AsyncExitStack() as stack:
        yield BusFleet(run_id, stack)


async def show(fleet: BusFleet, version: int, digest: str | None = None) -> tuple[int, str]:
    """Status, and the message of an error, of announcing a signed manifest."""
    body = encode_manifest(sign(manifest_of(fleet.run_id, version, digest), KEYS.weights))
    answer = await fleet.http.post("/v1/updates", content=body)
    return answer.status_code, answer.text


async def test_a_restarted_bus_takes_no_old_manifest(fleet: BusFleet, tmp_path: Path) -> None:
    path = tmp_path / "bus.json"
    await fleet.start(keys=KEYS, state_file=path)
    assert [(await show(fleet, version))[0] for version in (1, 5, 9)] == [202, 202, 202]
    await fleet.start(keys=KEYS, state_file=path)
    for version in (1, 5, 8):
        status, said = await show(fleet, version)
        assert (status, "published before the bus started" in said) == (409, True)
    assert (await show(fleet, 9, "other bytes"))[0] == 409
    assert (await show(fleet, 9))[0] == 202, "its publisher tells it again"
    assert (await show(fleet, 9))[0] == 200
    assert (await show(fleet, 10))[0] == 202


async def test_the_newest_version_and_its_bytes_are_told_also_after_a_restart(fleet: BusFleet, tmp_path: Path) -> None:
    async def newest() -> tuple[int, str]:
        view = await fleet.bus.versions()
        return view.newest, view.newest_digest

    path = tmp_path / "bus.json"
    await fleet.start(keys=KEYS, state_file=path)
    assert await newest() == (0, "")
    assert (await show(fleet, 9))[0] == 202
    known = await newest()
    assert known == (9, manifest_of(fleet.run_id, 9).root_digest)
    await fleet.start(keys=KEYS, state_file=path)
    assert await newest() == known
    await fleet.bus.register("a", "http://127.0.0.1:9", 12)
    assert await newest() == (12, ""), "an engine serves a version that nobody has shown to the bus"


async def test_without_a_file_what_engines_serve_counts(fleet: BusFleet) -> None:
    await fleet.start(keys=KEYS)
    await fleet.bus.register("a", "http://127.0.0.1:9", 9)
    status, said = await show(fleet, 8)
    assert (status, "which an engine serves" in said) == (409, True)
    assert (await show(fleet, 9))[0] == 202


@pytest.mark.parametrize(
    ("version", "status"),
    [
        (1 << 63, 400),
        ((1 << 64) - 1, 400),
        (LAST_VERSION + 1, 400),
        (LAST_VERSION, 409),
        (FURTHEST_AHEAD + 2, 409),
        (-1, 400),
    ],
)
async def test_a_version_that_cannot_be_is_refused_though_it_is_signed(
    fleet: BusFleet, version: int, status: int
) -> None:
    await fleet.start(keys=KEYS)
    assert (await show(fleet, version))[0] == status
    assert (await show(fleet, 1))[0] == 202, "and the run goes on"
    assert (await show(fleet, version))[0] == status


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254",
        "http://2852039166",
        "http://0xa9fea9fe:80",
        "http://[fe80::1]:8100",
        "http://[::ffff:169.254.169.254]",
        "http://100.100.100.200",
        "http://user:word@10.0.0.5",
        "http://no-such-host.invalid:8100",
        "http://\u2603\udc9d",
    ],
)
async def test_an_engine_is_where_engines_are(fleet: BusFleet, url: str) -> None:
    await fleet.start(keys=KEYS)
    body = {"engine_id": "a", "url": url, "run_id": fleet.run_id, "policy_version": 0}
    content = json.dumps(body).encode()
    answer = await fleet.http.post("/v1/engines", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 422, answer.text
    assert (await fleet.http.get("/v1/engines")).json()["engines"] == []


async def test_an_engine_does_not_move_to_where_none_is(fleet: BusFleet) -> None:
    await fleet.start()
    await fleet.add("a")
    body = {"engine_id": "a", "url": "http://169.254.169.254", "run_id": fleet.run_id, "policy_version": 0}
    answer = await fleet.http.post("/v1/engines", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "address_refused")
    assert await fleet.publish(1) == "committed"


async def test_an_engine_serves_no_impossible_version(fleet: BusFleet) -> None:
    await fleet.start()
    for version in (-1, LAST_VERSION + 1, 1 << 63):
        body = {"engine_id": "a", "url": "http://127.0.0.1:9", "run_id": fleet.run_id, "policy_version": version}
        assert (await fleet.http.post("/v1/engines", json=body)).status_code == 422

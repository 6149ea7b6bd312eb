"""What operators ask of the weight bus, over real sockets: hold, commit, cancel, roll back, verify, pause, keys."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import httpx
import pytest

from services.policies.fleet.policy import FleetPolicy
from services.security.permissions import Keys
from services.wire.errors import RollmeshError, UnauthenticatedError
from tests.support.bus_fleet import BusFleet, manifest_of
from tests.support.until import until
from weight_bus.manifest.manifest import encode_manifest, sign

KEY, WEIGHTS_KEY = "an-admin-key-of-many-letters", "a-weights-key-of-many-letters"


@pytest.fixture
async def fleet(run_id: str) -> AsyncIterator[BusFleet]:
    async with AsyncExitStack() as stack:
        yield BusFleet(run_id, stack)


def states(update: dict[str, object]) -> dict[str, str]:
    return {engine["engine_id"]: engine["state"] for engine in update["engines"]}  # type: ignore[attr-defined]


async def test_a_new_manifest_is_202_the_same_200_and_another_409(fleet: BusFleet) -> None:
    await fleet.start()
    body = encode_manifest(manifest_of(fleet.run_id, 1))
    assert [(await fleet.http.post("/v1/updates", content=body)).status_code for _ in range(2)] == [202, 200]
    other = encode_manifest(manifest_of(fleet.run_id, 1, "other"))
    assert (await fleet.http.post("/v1/updates", content=other)).status_code == 409
    assert await fleet.publish(2, wait_s=0) == "failed"
    # A late repetition of what is known is no news, whatever came since.
    assert (await fleet.http.post("/v1/updates", content=body)).status_code == 200


async def test_a_held_version_is_prepared_and_flips_on_the_operators_word(fleet: BusFleet) -> None:
    await fleet.start()
    await fleet.add("a")
    body = encode_manifest(manifest_of(fleet.run_id, 1))
    held = (await fleet.http.post("/v1/updates?hold=true&wait_s=5", content=body)).json()
    assert (held["state"], states(held), fleet.served) == ("held", {"a": "prepared"}, {"a": 0})
    done = (await fleet.http.post("/v1/updates/1/commit?wait_s=5")).json()
    assert (done["state"], states(done), fleet.served) == ("committed", {"a": "committed"}, {"a": 1})
    assert done["engines"][0]["bytes_read"] == 4


async def test_a_cancelled_version_leaves_the_fleet_where_it_was(fleet: BusFleet) -> None:
    await fleet.start()
    await fleet.add("a")
    assert await fleet.publish(1) == "committed"
    await fleet.http.post("/v1/updates?hold=true&wait_s=5", content=encode_manifest(manifest_of(fleet.run_id, 2)))
    cancelled = (await fleet.http.post("/v1/updates/2/cancel")).json()
    assert cancelled["state"] == "cancelled"
    versions = (await fleet.http.get("/v1/versions")).json()
    assert (versions["latest"], [view["version"] for view in versions["versions"]]) == (1, [2, 1])
    assert [view["withdrawn"] for view in versions["versions"]] == [True, False]
    assert versions["versions"][1]["served_by"] == ["a"]
    assert (await fleet.http.post("/v1/updates/1/cancel")).status_code == 409
    assert await fleet.publish(2) == "cancelled"
    assert (await fleet.http.post("/v1/updates/2/commit?wait_s=5")).json()["state"] == "committed"
    assert fleet.served == {"a": 2}


async def test_a_rollback_brings_everybody_back_also_whoever_was_away(fleet: BusFleet) -> None:
    await fleet.start()
    for name in ("a", "b"):
        await fleet.add(name)
    assert [await fleet.publish(version) for version in (1, 2)] == ["committed", "committed"]
    await fleet.bus.deregister("b")
    back = (await fleet.http.post("/v1/rollback?wait_s=5")).json()
    assert (back["withdrawn"], back["update"]["version"], back["update"]["state"]) == (2, 1, "committed")
    assert fleet.served == {"a": 1, "b": 2}
    await fleet.beat("b")
    await until(lambda: fleet.served == {"a": 1, "b": 1})
    assert (await fleet.http.get("/v1/updates/2")).json()["state"] == "rolled_back"
    assert (await fleet.http.post("/v1/rollback")).status_code == 409
    assert (await fleet.http.post("/v1/verify")).json()["match"]
    assert await fleet.publish(2) == "rolled_back"
    assert await fleet.publish(3) == "committed"
    assert fleet.served == {"a": 3, "b": 3}


async def test_a_rollback_that_an_engine_cannot_do_is_reported(fleet: BusFleet) -> None:
    await fleet.start()
    engine = await fleet.add("a")
    assert (await fleet.http.post("/v1/rollback")).status_code == 409
    assert [await fleet.publish(version) for version in (1, 2)] == ["committed", "committed"]
    engine.before = None
    back = (await fleet.http.post("/v1/rollback?wait_s=5")).json()
    assert (back["update"]["state"], states(back["update"])) == ("failed", {"a": "failed"})
    assert "version 1 is not kept" in back["update"]["engines"][0]["why"]


async def test_a_roll_stops_at_the_engine_that_fails_and_says_so(fleet: BusFleet) -> None:
    await fleet.start(FleetPolicy("rolling"))
    for name in ("a", "b", "c"):
        await fleet.add(name)
    fleet.engines["a"].go_on.clear()
    fleet.engines["c"].go_on.clear()
    fleet.engines["b"].broken = "no memory"
    assert await fleet.publish(1, wait_s=0) == "staging"

    async def b_failed() -> bool:
        return states((await fleet.http.get("/v1/updates/1")).json())["b"] == "failed"

    await until(b_failed)
    for name in ("a", "c"):
        fleet.engines[name].go_on.set()
    update = await fleet.bus.wait_settled(1, 5)
    assert (update.state, update.policy) == ("failed", "rolling")
    assert "the roll stopped at b" in (update.why or "")
    assert "no memory" in (update.why or "")
    assert fleet.served == {"a": 0, "b": 0, "c": 0}
    fleet.engines["b"].broken = None
    assert (await fleet.http.post("/v1/updates/1/commit?wait_s=5")).status_code == 200
    await until(lambda: fleet.served == {"a": 1, "b": 1, "c": 1})


async def test_a_quorum_does_not_wait_for_the_slow(fleet: BusFleet) -> None:
    await fleet.start(FleetPolicy("quorum", quorum=0.5))
    for name in ("a", "b"):
        await fleet.add(name)
    fleet.engines["b"].go_on.clear()
    assert await fleet.publish(1) == "committed"
    assert fleet.served == {"a": 1, "b": 0}
    fleet.engines["b"].go_on.set()
    await until(lambda: fleet.served == {"a": 1, "b": 1})


@pytest.mark.parametrize(
    ("digests", "why"),
    [(["digest-1"], "1 of 2 ranks"), (["digest-1", "digest-9"], "rank 1 staged digest digest-9"), (None, None)],
)
async def test_an_engine_is_prepared_when_all_its_ranks_are(
    fleet: BusFleet, digests: list[str] | None, why: str | None
) -> None:
    await fleet.start()
    engine = await fleet.add("a", ranks=2)
    engine.ranks = digests
    state = await fleet.publish(1)
    assert (state, fleet.served["a"]) == (("committed", 1) if why is None else ("failed", 0))
    assert why is None or why in ((await fleet.bus.wait_settled(1, 5)).engines[0].why or "")


async def test_verify_compares_bytes_and_greedy_tokens(fleet: BusFleet) -> None:
    await fleet.start(engine_key=KEY)
    for name in ("a", "b"):
        (await fleet.add(name)).key = KEY
    assert await fleet.publish(1) == "committed"
    order = {"canary": True, "prompts": [[1, 2], [3]], "max_tokens": 2}
    verified = (await fleet.http.post("/v1/verify", json=order)).json()
    assert (verified["match"], verified["canary"]["agree"]) == (True, True)
    assert verified["canary"]["engines"][0] == {"engine_id": "a", "tokens": [[7, 7], [7, 7]], "why": None}
    fleet.engines["b"].token = 8
    fleet.engines["b"].digest = "rotten"
    verified = (await fleet.http.post("/v1/verify", json={"canary": True})).json()
    assert (verified["match"], verified["canary"]["agree"]) == (False, False)
    assert (await fleet.http.post("/v1/verify")).json()["canary"] is None


async def test_pause_and_resume_reach_every_engine_and_name_those_they_do_not(fleet: BusFleet) -> None:
    await fleet.start()
    engine = await fleet.add("a")
    await fleet.bus.register("gone", "http://127.0.0.1:9", 0)
    answer = (await fleet.http.post("/v1/pause", json={"mode": "wait"})).json()["engines"]
    assert [(each["engine_id"], each["done"]) for each in answer] == [("a", True), ("gone", False)]
    assert "could not be reached" in answer[1]["why"]
    assert engine.paused == "wait"
    await fleet.http.post("/v1/resume")
    assert engine.paused is None


async def test_without_the_admin_key_nothing_opens(fleet: BusFleet) -> None:
    await fleet.start(keys=Keys(admin=KEY))
    await fleet.add("a")
    async with httpx.AsyncClient(base_url=fleet.url) as stranger:
        document = (await stranger.get("/openapi.json")).json()
        for path, methods in document["paths"].items():
            for method in methods:
                address = path.format(engine_id="a", version=1)
                answer = await stranger.request(method, address, headers={"authorization": "Bearer wrong"})
                assert answer.status_code == (401 if path.startswith("/v1/") or path == "/metrics" else 200), (
                    method,
                    path,
                )
    assert [engine.engine_id for engine in (await fleet.bus.engines()).engines] == ["a"]
    fleet.bus._http.headers.pop("authorization")
    with pytest.raises(UnauthenticatedError, match="admin key"):
        await fleet.bus.engines()


async def test_a_manifest_without_the_runs_signature_reaches_no_engine(fleet: BusFleet) -> None:
    await fleet.start(keys=Keys(weights=WEIGHTS_KEY))
    engine = await fleet.add("a")
    manifest = manifest_of(fleet.run_id, 1)
    for forged in (manifest, sign(manifest, "some-other-key-of-letters")):
        with pytest.raises(RollmeshError, match="sign"):
            await fleet.bus.announce(forged)
    assert "/weights/stage" not in engine.calls
    assert (await fleet.bus.announce(sign(manifest, WEIGHTS_KEY), wait_s=5)).state == "committed"


async def test_every_route_is_described(fleet: BusFleet) -> None:
    await fleet.start()
    document = (await fleet.http.get("/openapi.json")).json()
    operations = {path: methods for path, methods in document["paths"].items() if path.startswith("/v1/")}
    assert set(operations) >= {
        *("/v1/engines", "/v1/engines/{engine_id}", "/v1/updates", "/v1/updates/{version}", "/v1/versions"),
        *("/v1/updates/{version}/commit", "/v1/updates/{version}/cancel", "/v1/rollback", "/v1/verify"),
        *("/v1/pause", "/v1/resume", "/v1/events", "/v1/snapshots"),
    }
    for methods in operations.values():
        for operation in methods.values():
            assert operation["description"]
            assert operation["security"] in ([{"serviceKey": []}], [{"operatorKey": []}])
            assert "ErrorBody" in str(operation["responses"]["409"])


async def test_a_restarted_bus_learns_from_heartbeats_and_the_repeated_announcement(fleet: BusFleet) -> None:
    """Killed between PREPARE and commit: the engine holds version 2 whole, and nobody remembers."""
    await fleet.start()
    engine = await fleet.add("a")
    assert await fleet.publish(1) == "committed"
    engine.staged = manifest_of(fleet.run_id, 2)
    await fleet.start()  # another bus, which knows nothing
    await fleet.beat("a")
    heard = {"newest": 1, "newest_digest": ""}  # of the engine, which serves it
    assert (await fleet.http.get("/v1/versions")).json() == {"latest": None, "versions": []} | heard
    assert await fleet.publish(2) == "committed"
    assert fleet.served == {"a": 2}
    # It never saw version 1, but the engine keeps it.
    back = (await fleet.http.post("/v1/rollback?wait_s=5")).json()
    assert (back["update"]["version"], back["update"]["state"], fleet.served) == (1, "committed", {"a": 1})


async def test_a_bus_killed_while_it_rolls_back_can_be_told_again(fleet: BusFleet) -> None:
    await fleet.start()
    for name in ("a", "b"):
        await fleet.add(name)
    assert [await fleet.publish(version) for version in (1, 2)] == ["committed", "committed"]
    fleet.engines["a"].served, fleet.engines["a"].digest = 1, "digest-1"
    await fleet.start()  # another bus, which knows nothing
    for name in ("a", "b"):
        await fleet.beat(name)
    assert (await fleet.http.post("/v1/rollback")).status_code == 409
    back = (await fleet.http.post("/v1/rollback?wait_s=5", json={"version": 1})).json()
    assert (back["withdrawn"], back["update"]["state"], fleet.served) == (2, "committed", {"a": 1, "b": 1})
    # The publisher tells of the withdrawn version again, which is known by now for what it is.
    assert await fleet.publish(2) == "rolled_back"
    assert fleet.served == {"a": 1, "b": 1}

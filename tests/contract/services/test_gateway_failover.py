"""Servers die, drain, hang and join under a gateway; agents get their answers, whole and once."""

from __future__ import annotations

import asyncio
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from services.run_store.client import connect
from services.run_store.status import read_waits
from services.supervisor.launch_plan import ValkeyPlan
from tests.conftest import free_port, wait_for_port
from tests.support.fake_servers import FakeServer, Seen, World
from tests.support.flaky_proxy import flaky_proxy
from tests.support.gateway_host import GatewayHost, gateway, mesh
from tests.support.until import until

STREAM = {"messages": [], "stream": True}
WHOLE: dict[str, Any] = {"messages": []}


def chat(session: dict[str, Any]) -> str:
    return f"/sessions/{session['session_id']}/v1/chat/completions"


async def opened_on(host: GatewayHost, server: FakeServer) -> dict[str, Any]:
    """A session that this server holds."""
    while True:
        session = await host.open()
        if session["server"] == server.name:
            return session


@pytest.mark.parametrize("die_at", range(6))
async def test_a_stream_goes_on_where_its_server_died(redis_url: str, run_id: str, die_at: int) -> None:
    async with mesh(redis_url, run_id) as (host, (dying, other)):
        session = await opened_on(host, dying)
        dying.die_at = die_at
        answer = await host.http.post(chat(session), json=STREAM)
        assert answer.status_code == 200
        (call,) = {seen.call for server in (dying, other) for seen in server.seen if seen.path == chat(session)}
        assert answer.content == b"".join(other.world.answers[call])
        assert other.world.sampled == 1
        assert len(other.seen[-1].call) == 32


async def test_an_answer_that_breaks_off_is_asked_for_again(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id) as (host, (dying, other)):
        session = await opened_on(host, dying)
        dying.die_at = 0
        answer = await host.http.post(chat(session), json=WHOLE)
        assert (answer.status_code, answer.json()["server"]) == (200, other.name)
        assert other.world.sampled == 1
        # It is remembered who holds the session now, and nobody asks the dead.
        before = len(other.seen)
        assert (await host.http.post(chat(session), json=WHOLE)).status_code == 200
        assert len(other.seen) == before + 1


async def test_a_dead_server_of_an_idle_session_is_passed_over(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id, "abc") as (host, (dying, *others)):
        sessions = [await opened_on(host, dying) for _ in range(5)]
        dying.die()
        answers = await asyncio.gather(*(host.http.post(chat(session), json=WHOLE) for session in sessions))
        assert {answer.json()["server"] for answer in answers} <= {other.name for other in others}


async def test_a_connection_that_leads_to_another_server_is_not_used_again(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id) as (host, (holder, other)):
        session, own_port = await opened_on(host, holder), int(holder.url.rpartition(":")[2])
        async with flaky_proxy(other.url) as address:
            holder.url = address.url
            await holder.announce()

            async def known() -> bool:
                return address.url in {each["url"] for each in await host.servers()}

            await until(known)
            # The first connection to the holder's address leads to the other one, those after it to the holder.
            call = asyncio.create_task(host.http.post(chat(session), json=WHOLE))
            await until(lambda: address.connections > 0)
            address.port = own_port
            assert (await call).json()["server"] == holder.name
            asked = len(other.seen)
            assert (await host.http.post(chat(session), json=WHOLE)).json()["server"] == holder.name
            assert len(other.seen) == asked


@pytest.mark.parametrize("refusal", [(503, "draining"), (503, "not_ready"), (502, "whatever")])
async def test_a_server_that_drains_or_starts_is_passed_over(
    redis_url: str, run_id: str, refusal: tuple[int, str]
) -> None:
    async with mesh(redis_url, run_id) as (host, (draining, other)):
        session = await opened_on(host, draining)
        draining.world.owner[session["session_id"]] = other
        draining.refusal = refusal
        for body in (WHOLE, STREAM):
            assert (await host.http.post(chat(session), json=body)).status_code == 200
        assert (await host.open())["server"] == other.name


async def test_a_503_of_another_meaning_is_the_agents_to_see(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id, "a") as (host, (server,)):
        server.refusal = (503, "something_else")
        answer = await host.http.post("/sessions", json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "something_else")
        assert len(server.seen) == 1


async def test_a_session_is_opened_once_though_the_answer_was_lost(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id) as (host, servers):
        for server in servers:
            server.custom = _lost_once(server, servers)
        session = await host.open()
        calls = {seen.call for server in servers for seen in server.seen}
        assert len(calls) == 1
        assert list(servers[0].world.opened.values()) == [session["session_id"]]
        assert session["base_url"] == f"{host.url}/sessions/{session['session_id']}/v1"


def _lost_once(server: FakeServer, servers: list[FakeServer]) -> Any:
    """The session is opened, then the connection breaks: the first time only."""

    def answer(seen: Seen) -> tuple[int, list[bytes]]:
        for each in servers:
            each.custom = None
        server._open(seen)
        raise ConnectionError

    return answer


async def test_a_call_that_nobody_takes_fails_and_says_what_was_tried(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id, failover_timeout_s=0.4) as (host, (refusing, dead)):
        dead.die()
        refusing.refusal = (503, "draining")
        answer = await host.http.post("/sessions/s-1/v1/chat/completions", json=WHOLE)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (504, "deadline")
        assert "a: it answered 503 (draining)" in error["message"]
        assert "b: no connection" in error["message"]
        assert len(refusing.seen) > 2, "one try is no failing over"


async def test_without_any_server_a_call_waits_for_one(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id, "") as (host, _):
        ready = await host.http.get("/readyz")
        assert (ready.status_code, ready.json()) == (503, {"not_ready": ["no rollout server is serving"]})
        waiting = asyncio.create_task(host.http.post("/sessions", json={}))
        await until(lambda: waits(redis_url, run_id, "a rollout server that takes calls"))
        late = FakeServer("late", World(), host.registry)
        try:
            await late.start()
            await late.announce(state="draining")
            await host.until_known(late="draining")
            assert not waiting.done()
            await late.announce()
            assert (await waiting).json()["server"] == "late"
            await until(lambda: waits(redis_url, run_id, None))
            assert (await host.http.get("/readyz")).status_code == 200
        finally:
            late.die()


async def test_a_gateway_that_ends_waits_for_nothing_any_more(redis_url: str, run_id: str) -> None:
    async with gateway(redis_url, run_id):
        await until(lambda: waits(redis_url, run_id, "a rollout server that takes calls"))
    assert await waits(redis_url, run_id, None)


async def test_without_any_server_a_call_fails_in_the_end(redis_url: str, run_id: str) -> None:
    async with gateway(redis_url, run_id, failover_timeout_s=0.2) as host:
        answer = await host.http.post("/sessions", json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        assert "none is serving" in answer.json()["error"]["message"]


async def test_a_server_that_joins_gets_work_and_one_that_drains_gets_none(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id) as (host, (first, second)):
        for _ in range(6):
            await host.open()
        await first.announce(state="draining")
        await host.until_known(a="draining", b="serving")
        assert {(await host.open())["server"] for _ in range(4)} == {"b"}
        late = FakeServer("c", second.world, host.registry)
        try:
            await late.start()
            await late.announce()
            await host.until_known(a="draining", b="serving", c="serving")
            # It is the idlest by far: all that is new goes there until it has caught up.
            assert [(await host.open())["server"] for _ in range(5)] == ["c"] * 5
            await first.withdraw()
            await host.until_known(b="serving", c="serving")
        finally:
            late.die()


@pytest.mark.parametrize("body", [WHOLE, STREAM])
async def test_a_server_that_hangs_is_left_when_its_lease_runs_out(
    redis_url: str, run_id: str, body: dict[str, Any]
) -> None:
    async with mesh(redis_url, run_id) as (host, (hanging, other)):
        session = await opened_on(host, hanging)
        hanging.hold.clear()
        waiting = asyncio.create_task(host.http.post(chat(session), json=body))
        await until(lambda: any(seen.path == chat(session) for seen in hanging.seen))
        hanging.alive = False  # as others find it
        await hanging.withdraw()
        answer = await waiting
        (chunks,) = other.world.answers.values()
        text = answer.content if body is STREAM else answer.json()["text"].encode()
        assert text == b"".join(chunks)
        assert other.seen[-1].path == chat(session)


async def stall(server: FakeServer) -> None:
    """It stands still: its lease runs out, as others find it too."""
    server.alive = False
    await server.announce(lease_s=0.01)


async def test_a_call_that_makes_servers_stand_still_is_sent_to_no_third(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id, "abc") as (host, servers):
        session = await opened_on(host, servers[0])
        for server in servers:
            server.hold.clear()
        waiting = asyncio.create_task(host.http.post(chat(session), json=WHOLE))
        await until(lambda: reached(servers, session) == servers[:1])
        await stall(servers[0])
        await until(lambda: len(reached(servers, session)) == 2)
        (third,) = [server for server in servers if server not in reached(servers, session)]
        third.hold.set()
        (second,) = [server for server in reached(servers, session) if server is not servers[0]]
        await stall(second)
        error = (await waiting).json()["error"]
        assert ((await waiting).status_code, error["code"]) == (400, "stalls_servers")
        assert f"{servers[0].name}: its lease ran out" in error["message"]
        assert f"{second.name}: its lease ran out" in error["message"]
        # Its session has ended: a client that sends it again finds that out, and no server has to.
        await until(lambda: f"POST /sessions/{session['session_id']}/abort" in third.paths())
        assert chat(session) not in [seen.path for seen in third.seen]


async def test_a_call_that_ends_servers_is_sent_to_no_fourth(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id, "abcd") as (host, servers):

        def end(seen: Seen) -> Any:
            raise ConnectionError

        group = {"turns": [{"session_id": name, "text": "x"} for name in ("s-1", "s-2")]}
        for server in servers:
            server.custom = end
        answer = await host.http.post("/groups/g-1/turns", json=group)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "stalls_servers")
        (fourth,) = [server for server in servers if "POST /groups/g-1/turns" not in server.paths()]
        for server in servers:
            server.custom = None
            server.world.owner |= {"s-1": fourth, "s-2": fourth}
        aborts = {"POST /sessions/s-1/abort", "POST /sessions/s-2/abort"}
        await until(lambda: aborts <= {path for server in servers for path in server.paths()})


async def test_a_large_suspect_comes_after_those_that_were_lost_with_it(
    redis_url: str, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.policies.blame.LARGE_BYTES", 1000)
    monkeypatch.setattr("services.policies.blame.QUARANTINE_S", 0.5)
    async with mesh(redis_url, run_id) as (host, (stalling, other)):
        session = await opened_on(host, stalling)
        stalling.hold.clear()
        bodies = [WHOLE | {"text": "x" * 2000}, WHOLE]
        calls = []
        for number, body in enumerate(bodies, start=1):
            calls.append(asyncio.create_task(host.http.post(chat(session), json=body)))
            await until(lambda: len(stalling.seen) == number + 1)  # noqa: B023
        await stall(stalling)
        assert [(await call).status_code for call in calls] == [200, 200]
        sizes = [len(seen.body) for seen in other.seen if seen.path == chat(session)]
        assert sizes == sorted(sizes)


async def test_servers_that_are_lost_with_the_registry_are_no_calls_fault(run_id: str, tmp_path: Path) -> None:
    plan = ValkeyPlan(data_dir=tmp_path, port=free_port())
    process = started(plan)
    try:
        async with mesh(plan.url, run_id, "abc") as (host, servers):
            session = await opened_on(host, servers[0])
            for server in servers:
                server.hold.clear()
            waiting = asyncio.create_task(host.http.post(chat(session), json=WHOLE))
            lost: list[FakeServer] = []
            while len(lost) < 2:
                await until(lambda: len(reached(servers, session)) > len(lost))
                (holder,) = [server for server in reached(servers, session) if server not in lost]
                process.kill()
                process.wait(timeout=10)
                await until(lambda: _unreadable(host), deadline_s=15.0)
                process = started(plan)
                lost.append(holder)
                (last,) = [server for server in servers if server not in lost][-1:]
                if len(lost) == 2:
                    last.hold.set()
                await stall(holder)
            answer = await waiting
            assert (answer.status_code, answer.json()["server"]) == (200, last.name)
    finally:
        process.terminate()
        process.wait(timeout=10)


def reached(servers: list[FakeServer], session: dict[str, Any]) -> list[FakeServer]:
    """The servers that a call in the session came to."""
    return [server for server in servers if any(seen.path == chat(session) for seen in server.seen)]


async def _unreadable(host: GatewayHost) -> bool:
    return "the registry cannot be read" in (await host.http.get("/readyz")).text


async def test_a_stream_that_cannot_go_on_ends_with_an_error_that_says_so(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id) as (host, (dying, other)):
        session = await opened_on(host, dying)
        dying.die_at = 2
        other.custom = lambda seen: (404, [b'{"error": {"code": "not_found", "message": "forgotten"}}'])
        answer = await host.http.post(chat(session), json=STREAM)
        *passed, last = answer.text.removesuffix("\n\n").split("\n\n")
        (chunks,) = other.world.answers.values()
        assert "\n\n".join(passed).encode() + b"\n\n" == b"".join(chunks[:2])
        assert "forgotten" in json.loads(last.removeprefix("data: "))["error"]["message"]


async def test_draining_is_asked_of_the_server_itself(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id, "a") as (host, (server,)):
        server.custom = lambda seen: (202, [b'{"server_id": "a", "state": "draining"}'])
        answer = await host.http.post("/admin/drain", json={"server_id": "a"})
        assert (answer.status_code, answer.json()) == (202, {"server_id": "a", "state": "draining"})
        assert server.paths() == ["POST /admin/drain"]
        unknown = await host.http.post("/admin/drain", json={"server_id": "z"})
        assert unknown.status_code == 404
        assert "known: a" in unknown.json()["error"]["message"]


async def test_while_redis_fails_the_last_view_stands(run_id: str, tmp_path: Path) -> None:
    plan = ValkeyPlan(data_dir=tmp_path, port=free_port())
    process = started(plan)
    try:
        async with mesh(plan.url, run_id) as (host, _):
            session = await host.open()
            process.kill()
            process.wait(timeout=10)

            async def said() -> bool:
                return "the registry cannot be read" in (await host.http.get("/readyz")).text

            await until(said, deadline_s=15.0)
            assert [each["server_id"] for each in await host.servers()] == ["a", "b"]
            assert (await host.http.post(chat(session), json=WHOLE)).json()["server"] == session["server"]
            process = started(plan)

            async def recovered() -> bool:
                return "the registry cannot be read" not in (await host.http.get("/readyz")).text

            await until(recovered, deadline_s=15.0)
    finally:
        process.terminate()
        process.wait(timeout=10)


async def waits(redis_url: str, run_id: str, what: str | None) -> bool:
    """Whether the gateway says on the board that it waits for this, or for nothing."""
    redis = connect(redis_url)
    try:
        wait = (await read_waits(redis, run_id)).get("gateway")
        return (None if wait is None else wait.waiting_for) == what
    finally:
        await redis.aclose()


def started(plan: ValkeyPlan) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(plan.command(), stdout=subprocess.DEVNULL)
    wait_for_port(plan.port, process)
    return process

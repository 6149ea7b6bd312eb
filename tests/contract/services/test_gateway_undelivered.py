"""Calls that a gateway gives up before the agent got anything: they are noted, at the latest before the session goes on."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import httpx
from redis.asyncio import Redis

from services.run_store.client import connect
from services.run_store.discovery import ServiceRegistry
from services.run_store.keys import RunKeys
from services.supervisor.launch_plan import ValkeyPlan
from tests.conftest import free_port, wait_for_port
from tests.support.fake_servers import fake_servers
from tests.support.gateway_host import GatewayHost, gateway, mesh
from tests.support.until import until

STREAM = {"messages": [], "stream": True}
WHOLE: dict[str, Any] = {"messages": []}


def chat(session: dict[str, Any]) -> str:
    return f"/sessions/{session['session_id']}/v1/chat/completions"


async def opened(host: GatewayHost, redis: Redis, run_id: str) -> dict[str, Any]:
    """A session of the group `g`, as its server would have written it down."""
    session = await host.open()
    await redis.set(RunKeys(run_id).group_of(session["session_id"]), "g")
    return session


async def noted(redis: Redis, run_id: str, group_id: str = "g") -> set[str]:
    return {name.decode() for name in await redis.smembers(RunKeys(run_id).undelivered(group_id))}


async def test_a_call_that_is_given_up_is_noted_before_the_agent_hears_of_it(redis_url: str, run_id: str) -> None:
    redis = connect(redis_url)
    async with mesh(redis_url, run_id, "a", failover_timeout_s=0.2) as (host, (server,)):
        session = await opened(host, redis, run_id)
        server.refusal = (503, "not_ready")
        answer = await host.http.post(chat(session), json=WHOLE)
        assert answer.status_code == 504
        assert await noted(redis, run_id) == {server.seen[-1].call}
        # A group's turns are noted as well; calls that generate nothing are not.
        assert (await host.http.post("/groups/h/turns", json={})).status_code == 504
        assert await noted(redis, run_id, "h") == {server.seen[-1].call}
        assert (await host.http.post(f"/sessions/{session['session_id']}/finish", json={})).status_code == 504
        assert len(await noted(redis, run_id)) == 1
        assert 0 < await redis.ttl(RunKeys(run_id).undelivered("g")) <= 24 * 3600
    await redis.aclose()


async def test_an_answer_that_arrived_and_a_part_that_was_seen_are_not_noted(redis_url: str, run_id: str) -> None:
    redis = connect(redis_url)
    async with mesh(redis_url, run_id, "a", failover_timeout_s=0.2) as (host, (server,)):
        session = await opened(host, redis, run_id)
        for body in (WHOLE, STREAM):
            assert (await host.http.post(chat(session), json=body)).status_code == 200
        server.die_at = 2
        broken = await host.http.post(chat(session), json=STREAM)
        assert broken.content.count(b"data: ") == 3 and b'"error"' in broken.content
        assert await noted(redis, run_id) == set()
    await redis.aclose()


async def test_an_agent_that_hung_up_before_its_answer_began_got_nothing(redis_url: str, run_id: str) -> None:
    redis = connect(redis_url)
    async with mesh(redis_url, run_id, "a") as (host, (server,)):
        session = await opened(host, redis, run_id)
        server.hold.clear()
        async with httpx.AsyncClient(base_url=host.url) as hasty:
            calling = asyncio.create_task(hasty.post(chat(session), json=WHOLE))
            await until(lambda: server.seen[-1].path == chat(session))
            calling.cancel()
            await asyncio.wait([calling])

        async def is_noted() -> bool:
            return await noted(redis, run_id) == {server.seen[-1].call}

        await until(is_noted)
    await redis.aclose()


async def test_names_that_no_server_takes_are_not_noted(redis_url: str, run_id: str) -> None:
    redis = connect(redis_url)
    async with mesh(redis_url, run_id, "a", failover_timeout_s=0.1) as (host, (server,)):
        session = await opened(host, redis, run_id)
        server.refusal = (503, "not_ready")
        await host.http.post(chat(session), json=WHOLE, headers={"x-rollmesh-call": "a,b c"})
        assert await noted(redis, run_id) == set()
    await redis.aclose()


async def test_while_redis_is_away_the_note_waits_and_the_session_with_it(tmp_path: Path, run_id: str) -> None:
    plan = ValkeyPlan(data_dir=tmp_path, port=free_port())
    process = subprocess.Popen(plan.command(), stdout=subprocess.DEVNULL)  # noqa: ASYNC220
    try:
        wait_for_port(plan.port, process)
        redis = connect(plan.url)
        async with fake_servers("a", ServiceRegistry(redis, run_id)) as (server,):
            async with gateway(plan.url, run_id, failover_timeout_s=0.2) as host:
                await host.until_known(a="serving")
                session, other = await opened(host, redis, run_id), await host.open()
                await redis.save()
                process.terminate()
                process.wait(timeout=10)
                server.refusal = (503, "not_ready")
                assert (await host.http.post(chat(session), json=WHOLE)).status_code == 504
                given_up = server.seen[-1].call
                server.refusal = None
                before = len(server.seen)
                refused = await host.http.post(f"/sessions/{session['session_id']}/finish", json={})
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
                assert len(server.seen) == before, "the session's end overtook the note"
                assert (await host.http.post(chat(other), json=WHOLE)).status_code == 200
                process = subprocess.Popen(plan.command(), stdout=subprocess.DEVNULL)  # noqa: ASYNC220
                wait_for_port(plan.port, process)

                async def ended() -> bool:
                    answer = await host.http.post(f"/sessions/{session['session_id']}/finish", json={})
                    return bool(answer.status_code == 200)

                await until(ended)
                assert await noted(redis, run_id) == {given_up}
        await redis.aclose()
    finally:
        process.terminate()
        process.wait(timeout=10)

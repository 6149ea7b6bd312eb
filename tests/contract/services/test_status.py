"""`rollmesh status` over a real Valkey: what it finds, what it asks, and that nothing makes it hang."""

from __future__ import annotations

import asyncio
import io
import json
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from redis.asyncio import Redis
from rich.console import Console

from services.http.app import make_app
from services.observability.mesh_status.collector import StatusCollector
from services.observability.mesh_status.report import MeshReport
from services.run_store.client import connect
from services.run_store.discovery import Listed, ServerRecord, ServiceKind, ServiceRecord, ServiceRegistry
from services.run_store.keys import RunKeys
from services.run_store.ledger import Ledger
from services.run_store.status import WaitBoard
from services.status.render import screen
from tests.conftest import free_port, running_valkey
from tests.support.mesh_command import COMMAND, run_command
from tests.support.served_app import served


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(trust_env=False) as client:
        yield client


@contextmanager
def stopped_service() -> Iterator[str]:
    """Where connections are taken, as a stopped process's kernel takes them, and nobody answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


@asynccontextmanager
async def nothing(_: FastAPI) -> AsyncIterator[None]:
    yield


async def enter(redis: Redis, run_id: str, name: str, url: str, kind: ServiceKind = "rollout-server") -> None:
    record = ServiceRecord(name=name, kind=kind, url=url) if kind != "rollout-server" else server(name, url)
    await ServiceRegistry(redis, run_id).announce([record])


def server(name: str, url: str, *, sampled: int = 0, running: int = 0) -> ServerRecord:
    return ServerRecord(
        name=name,
        incarnation="life",
        url=url,
        state="serving",
        model="m",
        policy_version=3,
        running=running,
        sampled_tokens=sampled,
        lease_s=60.0,
    )


async def announce(redis: Redis, run_id: str, name: str, url: str, *, sampled: int, running: int = 2) -> None:
    await ServiceRegistry(redis, run_id).announce([server(name, url, sampled=sampled, running=running)])


async def last_heard(redis: Redis, run_id: str, name: str, ago_s: float) -> None:
    await redis.zadd(RunKeys(run_id).service_heartbeats, {name: (time.time() - ago_s) * 1000})


async def look(redis: Redis, run_id: str, http: httpx.AsyncClient) -> MeshReport:
    return await StatusCollector(redis, run_id, http).collect()


@pytest.mark.alone
async def test_a_stopped_service_costs_a_deadline_and_is_named_with_the_groups_that_it_took_over(
    redis: Redis, run_id: str, http: httpx.AsyncClient
) -> None:
    ledger, keys = Ledger(redis, run_id), RunKeys(run_id)
    await ledger.begin(0)
    await redis.hset(keys.open_groups, mapping={"a": b'[0,"s0",1000.0]', "b": b'[1,"s0",1001.0]'})
    await redis.hset(keys.owners, mapping={"a": "s1/life", "b": ""})
    await redis.hset(keys.published_groups, "a", 3)
    with stopped_service() as url:
        await enter(redis, run_id, "s1", url)
        await enter(redis, run_id, "gone", f"http://127.0.0.1:{free_port()}", "gateway")
        began = time.monotonic()
        report = await look(redis, run_id, http)
        assert time.monotonic() - began < 4.0
    assert [(cause.service, cause.kind) for cause in report.causes] == [("s1", "silent"), ("gone", "gone")]
    (held,) = report.causes[0].groups
    assert (held.group, held.ordinal, held.server, held.finished, held.opened_at) == ("a", 0, "s1", 3, 1000.0)
    assert not report.well
    assert report.queue is not None and report.queue.open_groups == 2


async def test_a_server_that_let_its_lease_run_out_is_still_known_and_named(
    redis: Redis, run_id: str, http: httpx.AsyncClient
) -> None:
    with stopped_service() as url:
        await enter(redis, run_id, "s1", url)
        await last_heard(redis, run_id, "s1", 61.0)
        report = await look(redis, run_id, http)
    (service,) = report.services
    assert (service.alive, service.probe) == (False, "silent")
    assert report.causes[0].service == "s1"


async def test_an_engine_that_samples_nothing_shows_between_two_looks_of_one_command(
    redis: Redis, run_id: str, http: httpx.AsyncClient
) -> None:
    async with served(make_app("well", "0", nothing, list)) as url:
        for name in ("busy", "stuck"):
            await announce(redis, run_id, name, url, sampled=10)
        await WaitBoard(redis, run_id, "trainer").post("the batch of step 4: 2 of 4 groups")
        collector = StatusCollector(redis, run_id, http, collect_again_s=0.0)
        await collector.collect(again=False)
        await announce(redis, run_id, "busy", url, sampled=90)
        report = await collector.collect(again=False)
        at_once = await StatusCollector(redis, run_id, http, collect_again_s=0.0).collect()
    assert [(cause.service, cause.kind, cause.sure) for cause in report.causes] == [("stuck", "draws_nothing", False)]
    assert report.trainer_waits is not None
    assert report.well, "a guess alone is no failure"
    assert {cause.service for cause in at_once.causes} == {"busy", "stuck"}, "neither sampled between its two looks"


async def test_a_group_that_is_complete_by_the_second_look_is_not_to_blame(
    redis: Redis, run_id: str, http: httpx.AsyncClient
) -> None:
    ledger, keys, board = Ledger(redis, run_id), RunKeys(run_id), WaitBoard(redis, run_id, "trainer")
    await ledger.begin(0)
    asked = asyncio.Event()

    def reasons() -> list[str]:
        asked.set()
        return []

    async with served(make_app("well", "0", nothing, reasons)) as url:
        await announce(redis, run_id, "s0", url, sampled=10, running=0)
        await redis.hset(keys.open_groups, mapping={"a": b'[0,"s0",1000.0]', "b": b'[1,"s0",1001.0]'})
        await redis.hset(keys.owners, mapping={"a": "s0/life", "b": "s0/life"})
        await board.post("the batch of step 4: groups 2/4 ready")
        looking = asyncio.create_task(StatusCollector(redis, run_id, http, collect_again_s=1.0).collect())
        await asked.wait()
        # The first is whole, and the account not written yet; the other one is.
        await redis.hdel(keys.owners, "a")
        await redis.hset(keys.published_groups, "a", 8)
        (cause,) = (await looking).causes
        assert (cause.kind, [each.group for each in cause.groups]) == ("open_group", ["b"])
        asked.clear()
        looking = asyncio.create_task(StatusCollector(redis, run_id, http, collect_again_s=1.0).collect())
        await asked.wait()
        await board.clear()
        report = await looking
    assert (report.trainer_waits, report.causes) == (None, []), "the wait was over before it was explained"


async def test_a_run_that_starts_is_well_and_says_what_is_not_ready(
    redis: Redis, redis_url: str, run_id: str, http: httpx.AsyncClient
) -> None:
    await Ledger(redis, run_id).begin(0)
    async with served(make_app("trainer", "0", nothing, lambda: ["no step yet"])) as url:
        record = ServiceRecord(name="trainer", kind="trainer", url=url, lease_s=60.0)
        await ServiceRegistry(redis, run_id).announce([record])
        done = await asyncio.to_thread(run_command, ["status", "--run-id", run_id, "--redis-url", redis_url])
    assert done.code == 0, done.err
    assert "starting: trainer is not ready yet: no step yet" in done.out


async def test_watching_ends_with_the_run_and_its_redis(run_id: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        url = stack.enter_context(running_valkey(tmp_path)).url
        early = await asyncio.to_thread(run_command, ["status", "--redis-url", url])
        assert (early.code, early.out) == (0, "")
        assert "Redis knows no run yet" in early.err
        redis = connect(url)
        await Ledger(redis, run_id).begin(0)
        command = [*COMMAND, "status", "--run-id", run_id, "--redis-url", url, "--watch", "--every", "0.2"]
        watching = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        try:
            assert watching.stdout is not None
            async with asyncio.timeout(20.0):
                await watching.stdout.readline()
                await Ledger(redis, run_id).conclude(7)
                while b"concluded" not in await watching.stdout.readline():
                    pass
                await redis.aclose()
                stack.close()
                rest, _ = await watching.communicate()
            assert (watching.returncode, b"not read" in rest) == (0, False)
        finally:
            if watching.returncode is None:
                watching.kill()
                await watching.wait()


async def test_a_redis_that_is_full_is_the_cause_before_anything_else(
    redis: Redis, run_id: str, http: httpx.AsyncClient
) -> None:
    async with served(make_app("well", "0", nothing, list)) as url:
        full = msgspec.structs.replace(server("s0", url), store_used=90 << 20, store_most=80 << 20)
        await ServiceRegistry(redis, run_id).announce([full])
        await WaitBoard(redis, run_id, "trainer").post("the batch of step 4: 2 of 4 groups")
        report = await look(redis, run_id, http)
    (cause,) = report.causes
    assert (cause.kind, cause.sure, cause.service) == ("store_full", True, None)
    assert "90 of 80 MiB" in cause.what
    assert not report.well


async def test_a_redis_that_stands_still_is_told_part_by_part(
    redis: Redis, run_id: str, http: httpx.AsyncClient
) -> None:
    await redis.execute_command("CLIENT", "PAUSE", "600", "ALL")
    report = await StatusCollector(redis, run_id, http, part_within_s=0.2).collect()
    assert len(report.unread) == 7
    assert "registry: Redis has not answered within 0.2 s" in report.unread
    assert not report.well


async def test_the_screen_says_what_the_report_says(redis: Redis, run_id: str, http: httpx.AsyncClient) -> None:
    await Ledger(redis, run_id).begin(0)
    await WaitBoard(redis, run_id, "trainer").post("the batch of step 4: 2 of 4 groups")
    with stopped_service() as url:
        await enter(redis, run_id, "s1", url)
        report = await look(redis, run_id, http)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(screen(report))
    shown = console.export_text()
    assert "the trainer waits" in shown and "the batch of step 4" in shown
    assert "because: s1 takes connections and answers nothing" in shown
    assert "silent" in shown and url in shown


def test_the_command_says_by_its_exit_code_how_it_went(redis_url: str, run_id: str) -> None:
    done = run_command(["status", "--run-id", run_id, "--redis-url", redis_url])
    assert (done.code, done.out) == (2, "")
    assert f"Redis knows no run {run_id!r}" in done.err
    assert run_command(["status", "--redis-url", f"redis://127.0.0.1:{free_port()}/0"]).code == 2
    assert run_command(["status", "--also", "rewards", "--redis-url", redis_url]).code == 2


async def test_further_services_are_asked_and_json_is_one_line(redis: Redis, redis_url: str, run_id: str) -> None:
    await Ledger(redis, run_id).begin(0)
    also = f"rewards=http://127.0.0.1:{free_port()}"
    done = await asyncio.to_thread(
        run_command, ["status", "--run-id", run_id, "--redis-url", redis_url, "--also", also, "--json"]
    )
    assert done.code == 1
    report = json.loads(done.out)
    assert done.out.count("\n") == 1
    assert report["causes"][0]["service"] == "rewards"


async def test_services_withdraw_at_their_end_and_are_forgotten_where_they_could_not(redis: Redis, run_id: str) -> None:
    registry = ServiceRegistry(redis, run_id)
    records = [server("s1", "http://127.0.0.1:1"), ServiceRecord(name="g1", kind="gateway", url="http://127.0.0.1:2")]
    await registry.announce(records)
    listed = await registry.services()
    assert [(each.record, each.alive) for each in listed] == [(records[1], True), (records[0], True)]
    assert await registry.withdraw(records) == 2
    assert await registry.services() == list[Listed]()
    await registry.announce(records)
    await last_heard(redis, run_id, "g1", 599.0)
    await last_heard(redis, run_id, "s1", 601.0)
    assert [(each.record.name, each.alive) for each in await registry.services()] == [("g1", False)]
    assert await registry.servers() == list[ServerRecord]()
    await registry.announce([])
    assert await redis.hkeys(RunKeys(run_id).services) == [b"g1"], "what is forgotten is removed"


async def test_an_earlier_incarnation_does_not_take_a_later_ones_record_away(redis: Redis, run_id: str) -> None:
    registry = ServiceRegistry(redis, run_id)
    earlier, later = (ServiceRecord(name="g1", kind="gateway", url="http://127.0.0.1:1") for _ in range(2))
    await registry.announce([earlier])
    await registry.announce([later])
    assert await registry.withdraw([earlier]) == 0
    assert [each.record for each in await registry.services()] == [later]


async def test_watching_looks_again_until_it_is_interrupted(redis: Redis, redis_url: str, run_id: str) -> None:
    await Ledger(redis, run_id).begin(0)
    command = [*COMMAND, "status", "--run-id", run_id, "--redis-url", redis_url, "--watch", "--every", "0.2", "--json"]
    watching = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    try:
        assert watching.stdout is not None
        async with asyncio.timeout(20.0):
            first = json.loads(await watching.stdout.readline())
            await WaitBoard(redis, run_id, "trainer").post("the batch of step 4")
            while (later := json.loads(await watching.stdout.readline()))["trainer_waits"] is None:
                assert later["at"] > first["at"]
            watching.send_signal(signal.SIGINT)
            assert await watching.wait() == 130
    finally:
        if watching.returncode is None:
            watching.kill()
            await watching.wait()

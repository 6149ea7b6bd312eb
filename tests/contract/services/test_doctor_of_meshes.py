"""`rollmesh doctor` of a mesh that runs: a real Valkey, and services that say what is planted."""

from __future__ import annotations

import asyncio
import shutil
import socket
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import msgspec
import pytest
from fastapi import FastAPI, Header, HTTPException
from fastapi.responses import StreamingResponse
from redis.asyncio import Redis

from services.doctor.running import examine_mesh
from services.doctor.session import of_session
from services.http.app import make_app
from services.run_store.client import connect
from services.run_store.discovery import ServerRecord, ServiceRecord, ServiceRegistry
from services.run_store.keys import RunKeys
from services.security.keys import NO_PLACES, KeyPlaces, make_keys
from services.security.tls import PUBLIC
from services.wire.weights_api import EngineDigest, VerifyView, WeightEvent
from tests.support.rollout_host import hosting, small_batch
from tests.support.scripted_engine import ScriptedEngine
from tests.support.served_app import served


@asynccontextmanager
async def announcing(redis: Redis, run_id: str, *records: ServiceRecord) -> AsyncIterator[None]:
    """Keeps them alive in the registry; rollout servers sample a token for each that `running` says, in each second."""
    registry, began = ServiceRegistry(redis, run_id), time.monotonic()

    def now(record: ServiceRecord) -> ServiceRecord:
        if not isinstance(record, ServerRecord):
            return record
        rate = record.sampled_tokens
        return msgspec.structs.replace(record, sampled_tokens=round(rate * (time.monotonic() - began)))

    async def announce() -> None:
        while True:
            await registry.announce([now(each) for each in records])
            await asyncio.sleep(0.2)

    task = asyncio.create_task(announce())
    await asyncio.sleep(0)
    await registry.announce([now(each) for each in records])
    try:
        yield
    finally:
        task.cancel()


@asynccontextmanager
async def nothing(app: FastAPI) -> AsyncIterator[None]:
    yield


def server(name: str, url: str, tokens_per_s: int = 0) -> ServerRecord:
    return ServerRecord(
        name=name, url=url, state="serving", model="m", policy_version=7, running=4, sampled_tokens=tokens_per_s
    )


def bus_app(*digests: str, lost: int = 0, key: str | None = None) -> FastAPI:
    """A weight bus whose engines serve these digests; one of them was lost so often."""
    app = make_app("weight-bus", "0", nothing, list)

    @app.post("/v1/verify")
    def verify(authorization: str | None = Header(default=None)) -> VerifyView:
        if key is not None and authorization != f"Bearer {key}":
            raise HTTPException(401)
        engines = [EngineDigest(engine_id=f"s{n}", version=7, root_digest=each) for n, each in enumerate(digests)]
        return VerifyView(version=7, root_digest="aa", engines=engines, match=len(set(digests)) == 1)

    @app.get("/v1/events")
    async def events() -> StreamingResponse:
        async def lines() -> AsyncIterator[bytes]:
            for number in range(lost):
                event = WeightEvent(id=str(number), at=time.time(), kind="left", engine_id="s0")
                yield f"data: {event.model_dump_json(exclude_none=True)}\n\n".encode()
            await asyncio.sleep(60.0)

        return StreamingResponse(lines(), media_type="text/event-stream")

    return app


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


async def found_of(redis_url: str, run_id: str, keys: KeyPlaces = NO_PLACES) -> list[str]:
    return [each.id for each in await examine_mesh(redis_url, run_id, keys, PUBLIC)]


async def test_weights_that_diverged_and_leases_that_flap_are_named_and_a_whole_fleet_is_not(
    redis: Redis, redis_url: str, run_id: str
) -> None:
    for number, (app, wanted) in enumerate(
        [
            (bus_app("aa", "aa"), []),
            (bus_app("aa", "bb"), ["weights-diverged"]),
            (bus_app("aa", "aa", lost=3), ["lease-flapping"]),
        ]
    ):
        run = f"{run_id}-{number}"
        async with served(app) as url:
            record = ServiceRecord(name="weight-bus", kind="weight-bus", url=url)
            async with announcing(redis, run, record):
                assert await found_of(redis_url, run) == wanted


async def test_a_wrong_key_is_named(redis: Redis, redis_url: str, run_id: str, tmp_path: Path) -> None:
    make_keys(tmp_path / "keys")
    right = (tmp_path / "keys" / "admin.key").read_text().strip()
    make_keys(tmp_path / "others")
    (tmp_path / "others" / "redis.key").unlink()
    (tmp_path / "keys" / "redis.key").unlink()
    async with served(bus_app("aa", key=right)) as url:
        async with announcing(redis, run_id, ServiceRecord(name="weight-bus", kind="weight-bus", url=url)):
            assert await found_of(redis_url, run_id, KeyPlaces(tmp_path / "keys")) == []
            assert await found_of(redis_url, run_id, KeyPlaces(tmp_path / "others")) == ["keys"]


async def test_a_straggler_is_named(redis: Redis, redis_url: str, run_id: str) -> None:
    async with served(make_app("rollout-server", "0", nothing, list)) as url:
        records = [server("s0", url, 400), server("s1", url, 420), server("s2", url, 20)]
        async with announcing(redis, run_id, *records):
            found = await examine_mesh(redis_url, run_id, NO_PLACES, PUBLIC)
    (only,) = found
    assert only.id == "straggler"
    assert only.cause.startswith("s2 is much slower")


async def test_an_account_that_does_not_balance_and_a_service_that_is_gone_are_named(
    redis: Redis, redis_url: str, run_id: str
) -> None:
    await redis.hset(RunKeys(run_id).accounts, mapping={"published": 3, "trained": 5})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{probe.getsockname()[1]}"
    async with announcing(redis, run_id, server("s0", nobody)):
        assert sorted(await found_of(redis_url, run_id)) == ["account-wrong", "run-blocked"]


async def test_a_conversation_that_goes_on_stays_one_segment_unless_its_template_rewrites_it(
    redis_url: str, run_id: str, tiny_policy: Path, chat_policy: Path, tmp_path: Path
) -> None:
    rewriting = tmp_path / "rewriting"
    shutil.copytree(chat_policy, rewriting)
    template = rewriting / "chat_template.jinja"
    template.write_text("{{ messages | length }} messages" + template.read_text())
    for number, (model, wanted) in enumerate([(tiny_policy, []), (chat_policy, []), (rewriting, ["prefix-broken"])]):
        run, settings = f"{run_id}-{number}", small_batch()
        engine = ScriptedEngine(answer_length=2)
        async with hosting(engine, redis_url=redis_url, run_id=run, model=model, settings=settings) as host:
            async with httpx.AsyncClient() as http:
                found = await of_session(http, "s0", host.url, None)
            assert [each.id for each in found] == wanted
            assert (await host.ledger.accounts()).published == 0
            assert len(engine.requests) == 2


class _OldClock(BaseHTTPRequestHandler):
    def date_time_string(self, timestamp: float | None = None) -> str:
        return super().date_time_string((timestamp or time.time()) - 300)

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        return


async def test_a_host_whose_clock_is_wrong_is_named(redis: Redis, redis_url: str, run_id: str) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _OldClock) as there:
        threading.Thread(target=there.serve_forever, daemon=True).start()
        record = ServiceRecord(name="trainer", kind="trainer", url=f"http://127.0.0.1:{there.server_address[1]}")
        async with announcing(redis, run_id, record):
            found = await examine_mesh(redis_url, run_id, NO_PLACES, PUBLIC)
        there.shutdown()
    (only,) = found
    assert only.id == "clock-skew"
    assert "trainer" in only.cause

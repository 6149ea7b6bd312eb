"""Services that speak TLS: all of them, calls through the gateway, an agent's own client, Redis, `rollmesh status`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytest.importorskip("torch")

from services.config.rewards import RewardSettings
from services.config.settings import RunSettings
from services.http.app import Stop
from services.rewards.app import make_rewards_app
from services.run_store.client import check_reachable, connect, reached_by
from services.run_store.discovery import ServiceRecord, ServiceRegistry, announced
from services.run_store.ledger import Ledger
from services.security.tls import Tls
from services.wire.errors import UntrustedError
from tests.conftest import free_port
from tests.support.certificates import Certificates, behind_tls, make_certificates
from tests.support.gateway_host import gateway
from tests.support.mesh_command import COMMAND, run_command
from tests.support.rollout_host import hosting, small_batch
from tests.support.scripted_engine import ScriptedEngine
from tests.support.served_app import served
from tests.support.until import until
from trainer.io_loop import Background
from trainer.metrics.exporter import open_telemetry
from weight_bus.client.bus_client import BusClient
from weight_bus.coordinator.app import build_app


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@dataclass(frozen=True)
class Place:
    """What a service of a test stands on."""

    redis_url: str
    run_id: str
    model: Path
    tls: Tls


@pytest.fixture
def place(redis_url: str, run_id: str, chat_policy: Path, certificates: Certificates) -> Place:
    return Place(redis_url, run_id, chat_policy, certificates.mesh)


@asynccontextmanager
async def rollout_server(place: Place, tls: Tls | None = None) -> AsyncIterator[str]:
    engine, settings = ScriptedEngine(answer_length=3), small_batch()
    run = {"redis_url": place.redis_url, "run_id": place.run_id}
    async with hosting(engine, **run, model=place.model, settings=settings, tls=tls or place.tls) as host:
        yield host.url


@asynccontextmanager
async def in_front(place: Place) -> AsyncIterator[str]:
    async with rollout_server(place), gateway(place.redis_url, place.run_id, tls=place.tls) as host:
        await host.until_known(s0="serving")
        yield host.url


@asynccontextmanager
async def weight_bus(place: Place) -> AsyncIterator[str]:
    stop = Stop()
    app = build_app(place.run_id, 5.0, stop=stop, trust=place.tls.trust)
    async with served(app, stop, identity=place.tls.identity) as url:
        yield url


@asynccontextmanager
async def rewards(place: Place) -> AsyncIterator[str]:
    stop = Stop()
    components: Any = [{"name": "words", "function": "judges:words"}]
    app = make_rewards_app(RewardSettings(components=components), stop, trust=place.tls.trust)
    async with served(app, stop, identity=place.tls.identity) as url:
        yield url


@asynccontextmanager
async def trainer(place: Place) -> AsyncIterator[str]:
    """Its probes, on a loop in another thread."""
    background, redis = Background(), connect(place.redis_url)
    registry = ServiceRegistry(redis, place.run_id)
    bus_url = "https://127.0.0.1:1"
    told = (place.run_id, bus_url, Path(os.devnull), RunSettings(steps=9), background)
    own = connect(place.redis_url)
    try:
        with ExitStack() as stack:
            open_telemetry(own, *told, stack, tls=place.tls)

            async def listed() -> list[str]:
                return [each.record.url for each in await registry.services() if each.record.name == "trainer"]

            await until(listed)
            yield (await listed())[0]
        background.call(own.aclose(), "closing Redis", 5.0)
    finally:
        background.close()
        await redis.aclose()


SERVICES: dict[str, Callable[[Place], AbstractAsyncContextManager[str]]] = {
    "rollout server": rollout_server,
    "gateway": in_front,
    "weight bus": weight_bus,
    "rewards": rewards,
    "trainer": trainer,
}


@pytest.mark.parametrize("name", SERVICES)
async def test_a_service_speaks_tls_to_who_knows_its_authority_and_to_nobody_else(
    place: Place, certificates: Certificates, name: str
) -> None:
    async with SERVICES[name](place) as url:
        assert url.startswith("https://127.0.0.1:")
        async with httpx.AsyncClient(verify=place.tls.trust.verify) as http:
            assert (await http.get(f"{url}/livez")).json() == {"status": "alive"}
        strangers = certificates.stranger.trust
        async with httpx.AsyncClient(verify=strangers.verify) as http:
            with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
                await http.get(f"{url}/livez")
        async with httpx.AsyncClient() as http:
            with pytest.raises(httpx.TransportError):
                await http.get(f"{url.replace('https', 'http')}/livez")


AGENT = """
import sys
from openai import OpenAI
agent = OpenAI(base_url=sys.argv[1], api_key=sys.argv[2], max_retries=0)
answer = agent.chat.completions.create(model="any", messages=[{"role": "user", "content": "hello"}])
print(answer.choices[0].message.role)
"""


async def test_an_agent_with_an_unchanged_client_needs_the_authority_in_its_environment_variables(
    place: Place, certificates: Certificates
) -> None:
    """`SSL_CERT_FILE`, as the document says, through the gateway to a server."""
    async with in_front(place) as url:
        async with httpx.AsyncClient(verify=place.tls.trust.verify) as http:
            session = (await http.post(f"{url}/sessions", json={"wait_s": 20})).json()
        assert session["base_url"] == f"{url}/sessions/{session['session_id']}/v1"
        said = {}
        for name, folder in (("ours", certificates.ours), ("strange", certificates.strange)):
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", AGENT, session["base_url"], session["api_key"]),
                env={**os.environ, "SSL_CERT_FILE": str(folder / "ca.pem")},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            said[name] = [part.decode() for part in await asyncio.wait_for(process.communicate(), 60)]
    assert said["ours"][0].strip() == "assistant", said["ours"][1]
    assert "CERTIFICATE_VERIFY_FAILED" in said["strange"][1]


async def test_a_gateway_says_which_server_shows_a_strangers_certificate(
    place: Place, certificates: Certificates
) -> None:
    async with rollout_server(place, certificates.stranger):
        async with gateway(place.redis_url, place.run_id, tls=place.tls, failover_timeout_s=0.5) as host:
            await host.until_known(s0="serving")
            answer = await host.http.post("/sessions", json={})
            assert answer.status_code == 504
            assert f"s0: https://127.0.0.1:{answer.text.partition('https://127.0.0.1:')[2][:5]}" in answer.text
            assert str(certificates.ours / "ca.pem") in answer.text


async def test_a_server_ends_where_another_answers_as_its_bus(place: Place, certificates: Certificates) -> None:
    async with weight_bus(place) as url:
        bus = BusClient(url, place.run_id, deadline_s=2.0, trust=certificates.stranger.trust)
        engine, run = ScriptedEngine(), {"redis_url": place.redis_url, "run_id": place.run_id}
        stop = Stop()
        with pytest.raises(RuntimeError, match="ended before it was ready"):
            async with hosting(
                engine, **run, model=place.model, settings=small_batch(), bus=bus, tls=place.tls, stop=stop
            ):
                pass
    assert isinstance(stop.failure, UntrustedError)
    assert str(certificates.strange / "ca.pem") in str(stop.failure)


async def test_redis_is_spoken_to_over_tls(place: Place, certificates: Certificates) -> None:
    port = int(place.redis_url.rpartition(":")[2].partition("/")[0])
    async with behind_tls(port, certificates.shown(certificates.ours)) as guarded:
        url = f"rediss://127.0.0.1:{guarded}/0"
        reached = reached_by(url, None, place.tls.trust)
        await check_reachable(reached)
        redis = connect(reached)
        try:
            assert await redis.ping()
            await Ledger(redis, place.run_id).begin(0)
        finally:
            await redis.aclose()
        began = time.monotonic()
        with pytest.raises(UntrustedError, match="does not vouch for") as refused:
            await check_reachable(reached_by(url, None, certificates.stranger.trust))
        assert time.monotonic() - began < 12.0
        assert str(certificates.strange / "ca.pem") in str(refused.value)
        command = ["dead-letters", "--run-id", place.run_id, "--redis-url", url, "--tls-dir"]
        for folder, code in ((certificates.ours, 0), (certificates.strange, 1)):
            done = await asyncio.to_thread(run_command, [*command, str(folder)])
            assert done.code == code, done.err


async def test_status_asks_over_tls_and_tells_a_wrong_authority_from_a_service_that_is_gone(
    place: Place, certificates: Certificates
) -> None:
    async def look(folder: Path) -> dict[str, Any]:
        process = await asyncio.create_subprocess_exec(
            *(*COMMAND, "status", "--redis-url", place.redis_url, "--run-id", place.run_id, "--json"),
            *("--tls-dir", str(folder)),
            stdout=asyncio.subprocess.PIPE,
        )
        out, _ = await asyncio.wait_for(process.communicate(), 30)
        report: dict[str, Any] = json.loads(out)
        return {each["name"]: each for each in report["services"]}

    redis = connect(place.redis_url)
    try:
        async with weight_bus(place) as url:
            record = ServiceRecord(name="weight-bus", kind="weight-bus", url=url, told_by="trainer")
            async with announced(redis, place.run_id, record):
                seen = (await look(certificates.ours))["weight-bus"]
                assert (seen["probe"], seen["reasons"]) == ("ready", [])
                seen = (await look(certificates.strange))["weight-bus"]
                assert seen["probe"] == "not_ready"
                assert f"{certificates.strange / 'ca.pem'} does not vouch for" in seen["reasons"][0]
    finally:
        await redis.aclose()


def commands(redis_url: str) -> dict[str, list[str]]:
    """Every command that serves, in front of what it would wait for in vain."""
    served_at = ["--run-id", "r", "--port", str(free_port())]
    return {
        "gateway": ["gateway", *served_at, "--redis-url", redis_url],
        "weight-bus": ["weight-bus", *served_at],
        "rollout-server": ["rollout-server", *served_at, "--redis-url", redis_url, "--model", "none"],
        "up": ["up", "--engine", "torch"],
    }


@pytest.mark.parametrize("name", commands("redis://127.0.0.1"))
def test_no_service_starts_with_a_certificate_for_another_host(
    certificates: Certificates, redis_url: str, tmp_path: Path, name: str
) -> None:
    done = run_command([*commands(redis_url)[name], "--tls-dir", str(certificates.misplaced)], cwd=tmp_path)
    assert (done.code, len(done.err.strip().splitlines())) == (2, 1), done.err
    assert f"callers of 127.0.0.1 would refuse {certificates.misplaced / 'cert.pem'}" in done.err
    assert list(tmp_path.iterdir()) == []


def test_no_client_calls_a_bus_over_plain_http_in_a_mesh_of_tls(certificates: Certificates) -> None:
    done = run_command(["weights", "status", "--tls-dir", str(certificates.ours)])
    assert (done.code, len(done.err.strip().splitlines())) == (2, 1), done.err
    assert "http://127.0.0.1:8200 is plain HTTP" in done.err

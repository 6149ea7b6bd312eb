"""Every client of a service over TLS: it speaks to the mesh's own, and at once to nobody else, with words that help."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from fastapi import FastAPI, Request

from clients.environments.rewards import RewardsClient
from clients.rollout.client import RolloutClient
from clients.rollout.sync_client import SyncRolloutClient
from clients.weights.client import WeightsClient
from rollout_server.engines.http.client import EngineClient as HttpEngineClient
from services.config.rewards import RewardComponent
from services.gateway.servers import Server
from services.gateway.upstream import Upstream
from services.policies.rewards import Failure
from services.rewards.model_component import ModelScorer
from services.rewards.sandbox.protocol import Sample
from services.run_store.discovery import ServerRecord
from services.security.tls import PUBLIC, Trust, read_trust
from services.wire.errors import RollmeshError, UntrustedError, UsageError
from tests.support.certificates import Certificates, make_certificates
from tests.support.served_app import served
from weight_bus.client.bus_client import BusClient
from weight_bus.coordinator.engine_client import EngineClient

AT_ONCE_S = 12.0
"""Below the patience of each of them (15 s and more)."""

Call = Callable[[str, Trust], Awaitable[object]]


async def rollout(url: str, trust: Trust) -> object:
    async with RolloutClient(url, trust=trust) as client:
        return await client.run_state()


async def rollout_sync(url: str, trust: Trust) -> object:
    def ask() -> object:
        with SyncRolloutClient(url, trust=trust) as client:
            return client.run_state()

    return await asyncio.to_thread(ask)


async def rewards(url: str, trust: Trust) -> object:
    async with RewardsClient(url, trust=trust) as client:
        return await client.formula()


async def weights(url: str, trust: Trust) -> object:
    def ask() -> object:
        with WeightsClient(url, trust=trust) as client:
            return client.engines()

    return await asyncio.to_thread(ask)


async def watching(url: str, trust: Trust) -> object:
    def ask() -> object:
        with WeightsClient(url, trust=trust) as client:
            return next(client.watch(patience_s=30.0))

    return await asyncio.to_thread(ask)


async def bus(url: str, trust: Trust) -> object:
    async with BusClient(url, "run-1", trust=trust) as client:
        return await client.engines()


async def engines(url: str, trust: Trust) -> object:
    client = EngineClient(20.0, trust=trust)
    try:
        return await client.digest(url, 10.0)
    finally:
        await client.close()


async def upstream(url: str, trust: Trust) -> object:
    record = ServerRecord(
        **{"name": "s0", "incarnation": "s0-1", "url": url, "state": "serving", "model": "m"},
        **{"policy_version": 0, "max_running": 1},
    )
    async with Upstream(trust) as client:
        return await client.ask(Server(record), "GET", "/run", None)


async def engine_behind_a_url(url: str, trust: Trust) -> object:
    peer = HttpEngineClient(url, None, trust)
    await peer.open()
    try:
        return await peer.max_model_len()
    finally:
        await peer.close()


async def reward_model(url: str, trust: Trust) -> object:
    component = RewardComponent.model_validate({"name": "worth", "model": {"url": url}, "deadline_s": 20.0})
    scorer = ModelScorer(component, 8, lambda _: None, trust)
    running = asyncio.create_task(scorer.run())
    try:
        sample = Sample(task="t", prompt="p", messages=None, answer="a", complete=True, metadata={})
        score = await scorer.submit(sample)
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    # A sample without a value is an answer there: its words are what people see.
    assert isinstance(score, Failure)
    raise UntrustedError(score.what)


INSIDE: dict[str, Call] = {
    "rollout": rollout,
    "rollout, blocking": rollout_sync,
    "rewards": rewards,
    "weights": weights,
    "weights, watching": watching,
    "bus": bus,
    "engines": engines,
    "upstream": upstream,
}
OUTSIDE: dict[str, Call] = {"engine behind a URL": engine_behind_a_url, "reward model": reward_model}
ALL = INSIDE | OUTSIDE


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


class Answering:
    """A service that answers whatever it is asked with an error of nobody's, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.app = FastAPI()

        @self.app.api_route("/{path:path}", methods=["GET", "POST"], status_code=418)
        async def answer(path: str, request: Request) -> dict[str, str]:
            self.asked.append(request.url.scheme)
            return {}


@pytest.mark.parametrize("name", ALL)
async def test_a_client_reaches_the_service_of_its_own_mesh_over_tls(certificates: Certificates, name: str) -> None:
    service = Answering()
    trust = certificates.mesh.trust if name in INSIDE else read_trust(certificates.ours, public=True)
    async with served(service.app, identity=certificates.shown(certificates.ours)) as url:
        with suppress(RollmeshError):
            async with asyncio.timeout(20.0):
                await ALL[name](url, trust)
    assert service.asked[:1] == ["https"]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("shown", ["another authority's", "another host's", "nothing"])
async def test_a_client_sends_nothing_to_whom_its_authority_does_not_vouch_for(
    certificates: Certificates, name: str, shown: str
) -> None:
    identity = {
        "another authority's": certificates.shown(certificates.strange),
        "another host's": certificates.shown(certificates.misplaced),
        "nothing": None,
    }[shown]
    said = {
        "another authority's": "does not vouch for",
        "another host's": "not valid for '127.0.0.1'",
        "nothing": "speaks no TLS",
    }[shown]
    service = Answering()
    async with served(service.app, identity=identity) as url:
        address = f"https://{url.partition('://')[2]}"
        began = time.monotonic()
        with pytest.raises(UntrustedError) as refused:
            await ALL[name](address, certificates.mesh.trust)
    assert time.monotonic() - began < AT_ONCE_S
    assert said in str(refused.value)
    assert address in str(refused.value)
    assert "--tls-dir" in str(refused.value)
    if identity is not None:
        assert str(certificates.ours / "ca.pem") in str(refused.value)
    assert service.asked == []


@pytest.mark.parametrize("name", ALL)
async def test_without_a_folder_an_authority_of_ones_own_is_a_strangers(certificates: Certificates, name: str) -> None:
    async with served(Answering().app, identity=certificates.shown(certificates.ours)) as url:
        with pytest.raises(UntrustedError, match="the system's trust store does not vouch for"):
            await ALL[name](url, PUBLIC)


@pytest.mark.parametrize("name", INSIDE)
async def test_inside_the_mesh_nothing_is_sent_over_plain_http(certificates: Certificates, name: str) -> None:
    service = Answering()
    async with served(service.app) as url:
        with pytest.raises(UsageError, match=f"{url}.* is plain HTTP"):
            await INSIDE[name](url, certificates.mesh.trust)
    assert service.asked == []


def test_no_code_leaves_a_certificate_unchecked() -> None:
    root = Path(__file__).parents[3]
    for room in ("services", "rollout_server", "weight_bus", "trainer", "clients"):
        for file in (root / room).rglob("*.py"):
            code = file.read_text(encoding="utf-8")
            for weak in ("verify=False", "ssl=False", "CERT_NONE", "check_hostname = False", "_create_unverified"):
                assert weak not in code, file

"""Whoever has no key is told so before a byte of a body is waited for, at every service, and nothing is logged."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from services.config.rewards import RewardSettings
from services.config.settings import GatewaySettings
from services.gateway.app import GatewayPlan, make_gateway_app
from services.http.app import Stop
from services.rewards.app import make_rewards_app
from services.run_store.client import connect
from services.run_store.keys import RunKeys
from services.security.keys import SessionKeys
from services.security.permissions import Keys
from tests.support.raw_http import connected, head
from tests.support.rollout_host import hosting, small_batch
from tests.support.scripted_engine import ScriptedEngine
from tests.support.served_app import served
from tests.support.until import until
from weight_bus.coordinator.app import build_app

NAMES = ("agent", "admin", "peer", "metrics", "weights", "session")
KEYS = Keys(**{name: f"the-{name}-key-of-this-test" for name in NAMES})
MADE_UP = [None, "x" * 40, "rs-s-" + "0" * 32, SessionKeys(b"another secret").issue("s"), "rs-", "rs-é"]
WHOLE = 31 << 20
AGENT = {"authorization": f"Bearer {KEYS.agent}"}
JSON = {"content_type": "application/json"}


@asynccontextmanager
async def everything(redis_url: str, run_id: str, model: Any, keys: Keys = KEYS) -> AsyncIterator[dict[str, str]]:
    """Every service's address, by its name."""
    stops = [Stop() for _ in range(3)]
    plan = GatewayPlan(run_id=run_id, redis_url=redis_url, settings=GatewaySettings(poll_s=0.05), keys=keys)
    async with (
        hosting(
            ScriptedEngine(), redis_url=redis_url, run_id=run_id, model=model, settings=small_batch(), keys=keys
        ) as host,
        served(make_gateway_app(plan, stops[0], max_body_mib=32), stops[0]) as gateway,
        served(build_app(run_id, 2.0, keys=keys, stop=stops[1]), stops[1]) as bus,
        served(make_rewards_app(RewardSettings(), stops[2], keys=keys), stops[2]) as rewards,
        httpx.AsyncClient(base_url=gateway) as http,
    ):

        async def ready() -> bool:
            return (await http.get("/readyz")).status_code == 200

        await until(ready)
        yield {"rollout": host.url, "gateway": gateway, "bus": bus, "rewards": rewards}


ROUTES = {
    "rollout": ["/groups", "/v1/chat/completions", "/sessions/s/v1/completions", "/weights/stage", "/update_weights"],
    "gateway": ["/groups", "/v1/chat/completions", "/sessions/s/v1/completions", "/inference/v1/generate"],
    "bus": ["/v1/updates", "/v1/engines"],
    "rewards": ["/v1/rewards"],
}


async def test_a_body_without_a_key_is_refused_before_it_comes(redis_url: str, run_id: str, chat_policy: Any) -> None:
    async with everything(redis_url, run_id, chat_policy) as urls:
        for name, url in urls.items():
            for route in [*ROUTES[name], "/nothing/here"]:
                for shown in MADE_UP:
                    bearer = {} if shown is None else {"authorization": f"Bearer {shown}"}
                    async with connected(url) as connection:
                        # Nothing of the body: whoever waits for it does not answer.
                        await connection.send(head("POST", route, **bearer, **JSON, content_length=WHOLE))
                        answer = await connection.answer()
                        assert (answer.status, answer.code) == (401, "invalid_api_key"), (name, route, shown)


async def test_garbage_without_a_key_is_401_and_not_422(redis_url: str, run_id: str, chat_policy: Any) -> None:
    async with everything(redis_url, run_id, chat_policy) as urls:
        for name, url in urls.items():
            async with httpx.AsyncClient(base_url=url) as http:
                for route in ROUTES[name]:
                    for garbage in (b"{", b"[" * 10_000, b"\xff"):
                        headers = {"authorization": f"Bearer {MADE_UP[2]}", "content-type": "application/json"}
                        assert (await http.post(route, content=garbage, headers=headers)).status_code == 401


@pytest.mark.parametrize("given", ["by file", "from Redis"])
async def test_a_gateway_knows_the_session_keys_of_its_run(
    redis_url: str, run_id: str, chat_policy: Any, given: str
) -> None:
    keys = KEYS if given == "by file" else Keys(agent=KEYS.agent, admin=KEYS.admin)
    async with (
        everything(redis_url, run_id, chat_policy, keys) as urls,
        httpx.AsyncClient(base_url=urls["gateway"]) as http,
    ):
        opened = (await http.post("/sessions", json={}, headers=AGENT)).json()
        call = {"messages": [{"role": "user", "content": "hello"}]}
        own = {"authorization": f"Bearer {opened['api_key']}"}
        assert (await http.post("/v1/chat/completions", json=call, headers=own)).status_code == 200
        forged = {"authorization": f"Bearer {opened['api_key'][:-1]}x"}
        assert (await http.post("/v1/chat/completions", json=call, headers=forged)).status_code == 401


async def test_a_gateway_that_cannot_know_the_session_keys_yet_says_so(redis_url: str, run_id: str) -> None:
    stop = Stop()
    plan = GatewayPlan(run_id=run_id, redis_url=redis_url, settings=GatewaySettings(), keys=Keys(agent=KEYS.agent))
    redis = connect(redis_url)
    try:
        # Something else than a secret lies where it should be.
        await redis.hset(RunKeys(run_id).session_secret, "a", "b")
        async with served(make_gateway_app(plan, stop, max_body_mib=1), stop) as url, connected(url) as connection:
            bearer = {"authorization": f"Bearer {MADE_UP[2]}"}
            await connection.send(head("POST", "/v1/chat/completions", **bearer, content_length=WHOLE))
            answer = await connection.answer()
            assert (answer.status, answer.code) == (503, "not_ready")
    finally:
        await redis.aclose()


async def test_uploads_that_break_off_leave_no_traceback(
    redis_url: str, run_id: str, chat_policy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bearers = {
        "rollout": (KEYS.agent, KEYS.peer),
        "gateway": (KEYS.agent,),
        "bus": (KEYS.peer,),
        "rewards": (KEYS.agent,),
    }
    async with everything(redis_url, run_id, chat_policy) as urls:
        for name, url in urls.items():
            for route in ROUTES[name]:
                for key in bearers[name]:
                    begun = head("POST", route, authorization=f"Bearer {key}", **JSON, content_length=1000)
                    async with connected(url) as connection:
                        await connection.send(begun + b'{"messages": [')
            async with httpx.AsyncClient(base_url=url) as http:
                assert (await http.get("/livez")).status_code == 200
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


@pytest.mark.parametrize(
    "deep", [b"[" * 200_000, b'{"a":' * 100_000, b'{"prompt": ' + b"[" * 200_000, b"\x81\xa1a" * 100_000]
)
async def test_nesting_is_refused_and_no_traceback(
    redis_url: str, run_id: str, chat_policy: Any, deep: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    peer = {"authorization": f"Bearer {KEYS.peer}"}
    async with everything(redis_url, run_id, chat_policy) as urls:
        calls = [
            ("bus", "/v1/updates", peer),
            ("bus", "/v1/engines", peer | {"content-type": "application/json"}),
            ("rollout", "/weights/stage", peer),
            ("rewards", "/v1/rewards", AGENT | {"content-type": "application/json"}),
            ("gateway", "/sessions", AGENT | {"content-type": "application/json"}),
            ("gateway", "/groups", AGENT | {"content-type": "application/json"}),
            ("gateway", "/inference/v1/generate", AGENT | {"content-type": "application/json"}),
        ]
        async with httpx.AsyncClient(timeout=20.0) as http:
            for name, route, headers in calls:
                answer = await http.post(urls[name] + route, content=deep, headers=headers)
                assert answer.status_code in (400, 422), (name, route, answer.text[:300])
                assert answer.json()["error"]["message"]
                if deep[:1] == b"{" and route in ("/sessions", "/inference/v1/generate"):
                    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "wire")
    assert [record.getMessage() for record in caplog.records if record.exc_info] == []


async def test_a_metrics_key_reads_figures_and_nothing_else(redis_url: str, run_id: str, chat_policy: Any) -> None:
    scraper = {"authorization": f"Bearer {KEYS.metrics}"}
    async with everything(redis_url, run_id, chat_policy) as urls:
        for name, url in urls.items():
            async with httpx.AsyncClient(base_url=url, headers=scraper) as http:
                assert (await http.get("/metrics")).status_code == 200
            for route in ROUTES[name]:
                async with connected(url) as connection:
                    await connection.send(head("POST", route, **scraper, **JSON, content_length=WHOLE))
                    answer = await connection.answer()
                    assert answer.status == 403, (name, route)
                    assert "metrics key" in json.loads(answer.body)["error"]["message"]

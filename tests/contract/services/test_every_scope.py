"""Every route of every service asks for a key, and for the right one.

The routes come from the services' own OpenAPI documents; a new one fails here until it stands in a table below, which says
who may open it, and until it keeps everybody else out.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from services.config.rewards import RewardSettings
from services.config.settings import GatewaySettings
from services.dashboard.app import make_dashboard_app
from services.dashboard.open_runs import OpenRuns
from services.dashboard.plan import DashboardPlan
from services.gateway.app import GatewayPlan, make_gateway_app
from services.gateway.request import is_proxied
from services.http.app import Stop
from services.rewards.app import make_rewards_app
from services.security.keys import SessionKeys, secret_of_run
from services.security.permissions import Keys
from tests.conftest import free_port
from tests.support.dashboard_runs import make_run
from tests.support.mesh_command import run_command
from tests.support.rollout_host import Host, hosting, small_batch
from tests.support.scripted_engine import ScriptedEngine
from tests.support.served_app import served
from tests.support.until import until
from weight_bus.coordinator.app import build_app

NAMES = ("agent", "admin", "peer", "metrics", "weights", "session", "redis")
KEYS = Keys(**{name: f"the-{name}-key-of-this-test" for name in NAMES})
OPEN = {"/livez", "/readyz", "/version"}
UNDOCUMENTED = {"/openapi.json", "/docs", "/docs/oauth2-redirect", "/redoc"}
EVERYBODY = frozenset((*("nobody", "stranger"), *NAMES, "own session", "other session"))
AGENT, OPERATOR = frozenset({"agent"}), frozenset({"admin"})
SERVICE, READING = frozenset({"admin", "peer"}), frozenset({"agent", "admin", "peer"})
SESSION = frozenset({"agent", "own session"})
ANY = READING | {"own session", "other session"}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}

Scopes = Mapping[str, frozenset[str]]
PROBES: Scopes = {**{f"GET {path}": EVERYBODY for path in OPEN}, "GET /metrics": SERVICE | {"metrics"}}
ROLLOUT: Scopes = PROBES | {
    # Which session is meant is said by its key.
    "POST /v1/chat/completions": SESSION | {"other session"},
    "POST /v1/completions": SESSION | {"other session"},
    "POST /inference/v1/generate": ANY,
    "POST /sessions/{session_id}/v1/chat/completions": SESSION,
    "POST /sessions/{session_id}/v1/completions": SESSION,
    "POST /sessions/{session_id}/inference/v1/generate": SESSION,
    "GET /sessions/{session_id}/v1/models": SESSION,
    "GET /sessions/{session_id}": SESSION,
    "GET /sessions/{session_id}/trajectory": SESSION,
    "POST /sessions/{session_id}/heartbeat": SESSION,
    "POST /sessions/{session_id}/reward": AGENT,
    "POST /sessions/{session_id}/finish": AGENT,
    "POST /sessions/{session_id}/abort": AGENT,
    "DELETE /sessions/{session_id}": AGENT,
    "POST /sessions": AGENT,
    "POST /groups": AGENT,
    "POST /groups/{group_id}/turns": AGENT,
    "POST /groups/{group_id}/finish": AGENT,
    "POST /calls": AGENT,
    "POST /calls/given-up": AGENT,
    "GET /groups/{group_id}": AGENT,
    "POST /runners": AGENT,
    "POST /runners/heartbeat": AGENT,
    "POST /runners/leave": AGENT,
    "POST /evaluations": AGENT,
    "GET /evaluations": READING,
    "GET /trajectories": AGENT,
    "GET /v1/models": ANY,
    "GET /run": READING,
    "GET /engine": READING,
    "POST /pause": SERVICE,
    "POST /resume": SERVICE,
    "GET /is_paused": SERVICE,
    "POST /abort_requests": SERVICE,
    "GET /get_world_size": SERVICE,
    "POST /init_weight_transfer_engine": SERVICE,
    "POST /start_weight_update": SERVICE,
    "POST /update_weights": SERVICE,
    "POST /finish_weight_update": SERVICE,
    "GET /weight_info": SERVICE,
    "POST /update_weight_version": SERVICE,
    "POST /weight_checker": SERVICE,
    "POST /weights/stage": SERVICE,
    "POST /weights/commit": SERVICE,
    "POST /weights/rollback": SERVICE,
    "GET /weights/digest": SERVICE,
    "POST /admin/drain": OPERATOR,
}
GATEWAY: Scopes = PROBES | {"GET /run": READING, "GET /admin/servers": SERVICE, "POST /admin/drain": OPERATOR}
BUS: Scopes = PROBES | {
    "POST /v1/engines": SERVICE,
    "DELETE /v1/engines/{engine_id}": SERVICE,
    "GET /v1/engines": SERVICE,
    "POST /v1/updates": SERVICE,
    "GET /v1/updates/{version}": SERVICE,
    "GET /v1/versions": SERVICE,
    "GET /v1/events": SERVICE,
    "POST /v1/verify": SERVICE,
    "POST /v1/snapshots": OPERATOR,
    "POST /v1/updates/{version}/commit": OPERATOR,
    "POST /v1/updates/{version}/cancel": OPERATOR,
    "POST /v1/rollback": OPERATOR,
    "POST /v1/pause": OPERATOR,
    "POST /v1/resume": OPERATOR,
}
DASHBOARD: Scopes = PROBES | {
    "POST /login": EVERYBODY,
    "POST /logout": READING,
    "GET /api/who": READING,
    "GET /api/runs": READING,
    "GET /api/runs/{run}/events": READING,
    "GET /api/runs/{run}/steps": READING,
    "GET /api/runs/{run}/rollouts": READING,
    "GET /api/runs/{run}/rollouts/{rollout}": READING,
    "GET /api/runs/{run}/rollouts/{rollout}/tokens": READING,
    "GET /api/compare": READING,
    **{
        f"POST /api/runs/{{run}}/actions/{name}": OPERATOR for name in ("drain", "hold", "resume", "rollback", "verify")
    },
}
OF_THE_PAGE = {"/", "/page/{path:path}", "/openapi.json"}
REWARDS: Scopes = PROBES | {"POST /v1/rewards": AGENT, "GET /v1/rewards": READING}
# Some routes read the body before they judge the key: these get past that.
BODIES: dict[str, Any] = {
    "/groups": {"task": "t", "group_size": 2, "sampling": {"max_tokens": 4}, "wait_s": 0.0},
    "/groups/{group_id}/turns": {"turns": [{"session_id": "s", "text": "t"}]},
    "/groups/{group_id}/finish": {"rewards": []},
    "/calls": {"calls": [{"path": "/groups/g/finish", "body": {"rewards": []}}]},
    "/calls/given-up": {"names": ["0" * 32]},
    **{f"/runners{verb}": {"name": "r", "incarnation": "0000aaaa"} for verb in ("", "/heartbeat", "/leave")},
    "/evaluations": {
        **dict.fromkeys(("due", "first_version", "last_version"), 1),
        **{"task": "t", "solved": [1], "temperature": 0.0, "mean_length": 1.0, "seconds": 1.0, "at": 1.0},
    },
    "/sessions/{session_id}/reward": {"reward": 1.0},
    "/sessions/{session_id}/finish": {"reward": 1.0},
    **{f"{root}/v1/chat/completions": CHAT for root in ("", "/sessions/{session_id}")},
    **{f"{root}/v1/completions": {"prompt": "hello"} for root in ("", "/sessions/{session_id}")},
    **{
        f"{root}/inference/v1/generate": {"token_ids": [5], "sampling_params": {"max_tokens": 2}}
        for root in ("", "/sessions/{session_id}")
    },
}


@dataclass
class Service:
    """A service that is ready, and callers who know it: by name, the bearer that each shows."""

    http: httpx.AsyncClient
    callers: dict[str, str | None]
    names: dict[str, str]
    """What stands for the parameters of paths."""

    async def routes(self) -> list[str]:
        document = (await self.http.get("/openapi.json")).json()
        return [f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods]

    async def call(self, route: str, caller: str) -> int:
        method, path = route.split(" ")
        shown = self.callers[caller]
        headers = {} if shown is None else {"authorization": f"Bearer {shown}"}
        if caller == "agent" and path in ("/v1/chat/completions", "/v1/completions"):
            headers["x-session-id"] = self.names["session_id"]
        body = BODIES.get(path, {}) if method == "POST" else None
        target = path.format(**self.names)
        # The answer's head only: events go on for ever.
        async with self.http.stream(method, target, json=body, headers=headers) as answer:
            return answer.status_code


def callers(sessions: Mapping[str, str] | None = None) -> dict[str, str | None]:
    known: dict[str, str | None] = {name: KEYS.get(name) for name in NAMES}  # type: ignore[arg-type]
    forged = SessionKeys(b"another secret").issue("s")
    own = sessions or {"own session": forged, "other session": forged}
    return {"nobody": None, "stranger": "x" * 43} | known | dict(own)


@asynccontextmanager
async def standing(app: FastAPI, stop: Stop) -> AsyncIterator[Service]:
    async with served(app, stop) as url, httpx.AsyncClient(base_url=url, timeout=20.0) as http:

        async def ready() -> bool:
            return (await http.get("/readyz")).status_code == 200

        await until(ready, 20.0)
        yield Service(http, callers(), {"engine_id": "e", "version": "1"})


@asynccontextmanager
async def rollout(redis_url: str, run_id: str, chat_policy: Any) -> AsyncIterator[tuple[Host, Service]]:
    engine, terms = ScriptedEngine(max_model_len=2048), small_batch(batch=64)
    async with hosting(
        engine, redis_url=redis_url, run_id=run_id, model=chat_policy, settings=terms, keys=KEYS
    ) as host:
        agent = {"authorization": f"Bearer {KEYS.agent}"}
        opened = [(await host.http.post("/sessions", json={}, headers=agent)).json() for _ in range(2)]
        issued = {"own session": opened[0]["api_key"], "other session": opened[1]["api_key"]}
        names = {"session_id": opened[0]["session_id"], "group_id": opened[0]["group_id"]}
        yield host, Service(host.http, callers(issued), names)


async def check(service: Service, authorizer: Scopes, routes: Sequence[str]) -> None:
    """Nobody comes in who should not; then, that it can be right at all, everybody does who should."""
    wrong = []
    for route in routes:
        for caller in sorted(EVERYBODY - authorizer[route]):
            status = await service.call(route, caller)
            unknown = caller in ("nobody", "stranger", "weights", "session", "redis")
            if status != 401 and (unknown or status != 403):
                wrong.append(f"{route} answers {status} to {caller}")
    for route in routes:
        for caller in sorted(authorizer[route]):
            status = await service.call(route, caller)
            if status in (401, 403):
                wrong.append(f"{route} refuses {caller} with {status}")
    assert wrong == []


async def test_rollout_server(redis_url: str, run_id: str, chat_policy: Any) -> None:
    async with rollout(redis_url, run_id, chat_policy) as (_, service):
        routes = await service.routes()
        assert sorted(routes) == sorted(ROLLOUT)
        await check(service, ROLLOUT, routes)


async def test_gateway_and_what_it_passes_on(redis_url: str, run_id: str, chat_policy: Any) -> None:
    plan = GatewayPlan(run_id=run_id, redis_url=redis_url, settings=GatewaySettings(poll_s=0.05), keys=KEYS)
    stop = Stop()
    async with rollout(redis_url, run_id, chat_policy) as (_, behind):
        app = make_gateway_app(plan, stop, max_body_mib=1)
        assert undocumented(app) == UNDOCUMENTED | {"/{path:path}"}
        async with standing(app, stop) as service:
            service.callers, service.names = behind.callers, behind.names
            own = await service.routes()
            assert sorted(own) == sorted(GATEWAY)
            await check(service, GATEWAY, own)
            passed_on = [route for route in await behind.routes() if is_proxied(route.split(" ")[1])]
            assert len(passed_on) > 15
            await check(service, ROLLOUT, passed_on)
            for caller in ("nobody", "stranger"):
                assert await service.call("GET /pause", caller) == 401, "nor is told what there is"


async def test_weight_bus(run_id: str) -> None:
    stop = Stop()
    app = build_app(run_id, 2.0, keys=KEYS, stop=stop)
    assert undocumented(app) == UNDOCUMENTED
    async with standing(app, stop) as service:
        routes = await service.routes()
        assert sorted(routes) == sorted(BUS)
        await check(service, BUS, routes)


async def test_dashboard(tmp_path: Path) -> None:
    make_run(tmp_path, "run", steps=2)
    stop = Stop()
    app = make_dashboard_app(DashboardPlan(runs=OpenRuns(root=tmp_path), keys=KEYS), stop)
    assert undocumented(app) == OF_THE_PAGE
    async with standing(app, stop) as service:
        service.names = {"run": "run", "path": "app.js", "rollout": "1"}
        routes = await service.routes()
        assert sorted(routes) == sorted(DASHBOARD)
        # It answers a key that opens nothing here with 401, and is open to whoever shows one.
        assert [await service.call("POST /login", caller) for caller in ("nobody", "agent")] == [422, 422]
        scopes = {route: callers for route, callers in DASHBOARD.items() if route != "POST /login"}
        await check(service, scopes, sorted(scopes))
        for caller in sorted(EVERYBODY - READING):
            assert await service.call("GET /page/{path}", caller) in (401, 403), caller
            # None of these is a scope of the page; nor does the login need one.
            assert await service.call("GET /page/login.js", caller) == 200, caller
        for caller in sorted(READING):
            assert await service.call("GET /page/{path}", caller) == 200, caller


async def test_rewards() -> None:
    stop = Stop()
    app = make_rewards_app(RewardSettings(), stop, keys=KEYS)
    assert undocumented(app) == UNDOCUMENTED
    async with standing(app, stop) as service:
        routes = await service.routes()
        assert sorted(routes) == sorted(REWARDS)
        await check(service, REWARDS, routes)


@pytest.mark.parametrize("command", ["rollout-server", "gateway", "weight-bus", "rewards", "dashboard"])
def test_beyond_loopback_each_service_names_the_keys_that_it_lacks(
    redis_url: str, run_id: str, tmp_path: Path, command: str
) -> None:
    config = tmp_path / "run.toml"
    config.write_text('[[rewards.components]]\nname = "x"\nfunction = "operator:eq"\n')
    options = ["--run-id", run_id, "--host", "0.0.0.0", "--port", str(free_port()), "--config", str(config)]
    if command in ("rollout-server", "gateway"):
        options += ["--redis-url", redis_url]
    if command == "rollout-server":
        options += ["--model", str(tmp_path)]
    if command == "dashboard":
        options = options[2:6]
    done = run_command([command, *options])
    assert done.code == 2, done.err
    assert "0.0.0.0 is not a loopback address" in done.err
    assert f"there is no {'admin' if command == 'weight-bus' else 'agent'}" in done.err
    missing = run_command([command, *options, "--keys-dir", str(tmp_path)])
    assert missing.code == 2, "a folder without keys is no open door"
    assert ".key" in missing.err


async def test_a_key_of_a_session_of_another_run_opens_nothing(redis_url: str, run_id: str, chat_policy: Any) -> None:
    async with rollout(redis_url, run_id, chat_policy) as (_, service):
        assert KEYS.session is not None
        elsewhere = SessionKeys(secret_of_run(KEYS.session, "another run"))
        service.callers["own session"] = elsewhere.issue(service.names["session_id"])
        for route in ROLLOUT:
            if "own session" in ROLLOUT[route] and route.split(" ")[1] not in OPEN:
                assert await service.call(route, "own session") == 401, route


@pytest.mark.parametrize("configured", ["agent", "admin", "peer"])
async def test_a_bus_with_one_key_of_any_kind_has_no_open_route(run_id: str, configured: str) -> None:
    stop = Stop()
    async with standing(build_app(run_id, 2.0, keys=Keys(**{configured: "k" * 20}), stop=stop), stop) as service:
        service.callers = callers() | {configured: "k" * 20}
        for route in await service.routes():
            if route.split(" ")[1] not in OPEN:
                assert await service.call(route, "nobody") == 401
                assert await service.call(route, configured) not in (401, 403)


def undocumented(app: FastAPI) -> set[str]:
    """Paths that the OpenAPI document does not have."""
    documented = set(app.openapi()["paths"])
    return {str(getattr(route, "path", route)) for route in app.routes} - documented


def test_every_route_is_documented_with_the_keys_that_open_it() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "routes.md").read_text(encoding="utf-8")
    parts = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    told = {
        part.partition("\n")[0]: dict(re.findall(r"^\| `([A-Z]+ [^`]+)` \| ([^|]*) \|", part, flags=re.MULTILINE))
        for part in parts
    }
    services = {
        "Rollout server": ROLLOUT,
        "Gateway": GATEWAY,
        "Weight bus": BUS,
        "Reward service": REWARDS,
        "Dashboard": DASHBOARD,
    }
    for name, scopes in services.items():
        own = {route: keys for route, keys in scopes.items() if route not in PROBES}
        assert told[name] == {route: _words(keys) for route, keys in own.items()}
    assert told["Every service, the trainer too"] == {route: _words(keys) for route, keys in PROBES.items()}


def _words(keys: frozenset[str]) -> str:
    if keys == EVERYBODY:
        return "none"
    session = "a session's" if "other session" in keys else "the session's own" if "own session" in keys else ""
    return ", ".join([*(name for name in NAMES[:4] if name in keys), *filter(None, [session])])

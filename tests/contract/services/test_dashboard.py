"""The dashboard's own service: who gets in, what it tells of a live run, and that it costs nothing while nobody looks."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import msgspec
import pytest
from fastapi import Request

from services.dashboard.login import COOKIE, LOGIN_LASTS_S, MOST_LOGINS, Logins
from services.dashboard.look.pace import MOST_S
from services.dashboard.open_runs import OpenRuns
from services.dashboard.page_files import FOLDER, HEADERS, read_page
from services.http.app import make_app
from services.observability.mesh_status.report import MeshReport
from services.run_store.discovery import ServiceKind
from services.security.permissions import Keys
from services.supervisor.launch_plan import ValkeyPlan
from services.wire.gateway_api import Draining
from tests.conftest import free_port, wait_for_port
from tests.support.dashboard_runs import LiveRun, dashboard, learning_step, make_run, nothing
from tests.support.mesh_command import run_command
from tests.support.served_app import served
from tests.support.until import until

KEYS = Keys(agent="the-agent-key-of-this-test", admin="the-admin-key-of-this-test", peer="the-peer-key-of-this-test")


def shown(key: str | None) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_a_login_is_a_cookie_that_ends_and_works_from_this_page_alone(tmp_path: Path) -> None:
    make_run(tmp_path, "run", steps=2)
    async with dashboard(OpenRuns(root=tmp_path), KEYS) as url, httpx.AsyncClient(base_url=url) as http:
        assert (await http.get("/")).headers["location"] == "/login"
        assert (await http.get("/login")).status_code == 200
        assert (await http.get("/page/app.js")).status_code == 401
        refused = await http.post("/login", json={"key": "x" * 40})
        assert (refused.status_code, refused.headers.get("set-cookie")) == (401, None)
        elsewhere = {"origin": "http://elsewhere.example"}
        for origin in (elsewhere, {"origin": "http://[::1"}, {"origin": "null"}):
            assert (await http.post("/login", json={"key": KEYS.agent}, headers=origin)).status_code == 403
        entered = await http.post("/login", json={"key": KEYS.agent}, headers={"origin": url})
        cookie = entered.headers["set-cookie"]
        assert all(part in cookie for part in ("HttpOnly", "SameSite=strict", "Path=/"))
        assert KEYS.agent is not None and KEYS.agent not in cookie
        assert (await http.get("/api/runs")).json() == {"runs": [{"name": "run", "run_id": "id-of-run", "live": False}]}
        assert (await http.get("/api/who")).json() == {"keyless": False, "operator": False}
        hold = "/api/runs/run/actions/hold"
        assert (await http.post(hold, json={"confirmed": True})).status_code == 403, "that is the admin's"
        # A page of elsewhere makes the browser send the cookie.
        assert (await http.post("/logout", headers=elsewhere)).status_code == 403
        name = f"{COOKIE}-{httpx.URL(url).port}"
        token = http.cookies[name]
        assert (await http.post("/logout", headers={"origin": url})).status_code == 204
        http.cookies.set(name, token)
        assert (await http.get("/api/runs")).status_code == 401


def test_logins_run_out_and_are_bounded() -> None:
    now = 0.0
    logins = Logins(lambda: now)
    first = logins.open("first")
    assert logins.key_of(first) == "first"
    tokens = [logins.open(str(number)) for number in range(MOST_LOGINS)]
    assert logins.key_of(first) is None, "the oldest is forgotten"
    now = LOGIN_LASTS_S + 1.0
    assert logins.key_of(tokens[-1]) is None


async def test_without_keys_only_a_name_of_this_machine_is_answered(tmp_path: Path) -> None:
    async with dashboard(OpenRuns(root=tmp_path)) as url, httpx.AsyncClient(base_url=url) as http:
        for host, status in (
            ("localhost", 200),
            ("127.0.0.1", 200),
            ("[::1]", 200),
            ("rebound.example", 403),
            ("[::1", 403),
            ("", 403),
        ):
            assert (await http.get("/api/runs", headers={"host": f"{host}:8500"})).status_code == status, host
        sent = {"json": {"confirmed": True}, "headers": {"origin": "http://elsewhere.example"}}
        assert (await http.post("/api/runs/x/actions/hold", **sent)).status_code == 403  # type: ignore[arg-type]


async def test_every_answer_has_the_headers_that_bind_a_browser(tmp_path: Path) -> None:
    async with dashboard(OpenRuns(root=tmp_path), KEYS) as url, httpx.AsyncClient(base_url=url) as http:
        for path, key in (
            ("/", KEYS.agent),
            ("/login", None),
            ("/nothing", None),
            ("/nothing", KEYS.agent),
            ("/livez", None),
        ):
            answer = await http.get(path, headers={} if key is None else shown(key))
            assert {name: answer.headers.get(name) for name in HEADERS} == dict(HEADERS), path
        policy = HEADERS["content-security-policy"]
        assert "unsafe" not in policy and "http" not in policy
        known = (await http.get("/page/app.js", headers=shown(KEYS.agent))).headers["etag"]
        again = await http.get("/page/app.js", headers={**shown(KEYS.agent), "if-none-match": known})
        assert (again.status_code, again.content) == (304, b"")
        for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page//etc/passwd"):
            assert (await http.get(path, headers=shown(KEYS.agent))).status_code == 404, path


def test_the_page_names_nothing_of_elsewhere_and_has_its_licences() -> None:
    files = read_page()
    assert "Permission is hereby granted" in files["vendor/uPlot.LICENSE"].content.decode()
    for name, file in files.items():
        text = file.content.decode()
        if name.startswith("vendor/"):
            continue
        assert "innerHTML" not in text and "style=" not in text, name
        named = re.findall(r"""["'](?:https?:)?//[^"'\s]+""", text)
        assert named in ([], ['"http://www.w3.org/2000/svg']), name
    assert all(path.is_dir() or path.relative_to(FOLDER).as_posix() in files for path in FOLDER.rglob("*"))


async def test_steps_are_joined_to_places_and_asked_for_as_they_grow(tmp_path: Path) -> None:
    folder = make_run(tmp_path, "run", steps=1000)
    async with dashboard(OpenRuns(root=tmp_path)) as url, httpx.AsyncClient(base_url=url) as http:

        async def steps(**asked: Any) -> dict[str, Any]:
            answer = await http.get("/api/runs/run/steps", params={"figure": ["step", "success", "loss"], **asked})
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        whole = await steps(most=100)
        assert (whole["each"], whole["total"], whole["last"]) == (10, 1000, 1000)
        assert whole["columns"][0] == list(range(10, 1001, 10))
        first = [learning_step(step, 1000, 1).success for step in range(1, 11)]
        assert whole["columns"][1][0] == pytest.approx(sum(first) / 10)
        with folder.metrics.open("ab") as file:
            file.write(msgspec.json.encode(learning_step(1001, 1000, 1, loss=None)) + b'\n{"torn')
        grown = await steps(after=1000)
        assert (grown["columns"][0], grown["columns"][2]) == ([1001], [None])
        assert (await http.get("/api/runs/run/steps", params={"figure": "__class__"})).status_code == 404
        assert (await http.get("/api/runs/../steps", params={"figure": "step"})).status_code == 404


@asynccontextmanager
async def events(url: str, run: str = "live") -> AsyncIterator[Any]:
    """The state of a page: a dictionary that is filled as events come."""
    state: dict[str, Any] = {}

    async def read() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=10.0) as http:
            async with http.stream("GET", f"/api/runs/{run}/events") as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                async for line in answer.aiter_lines():
                    if line.startswith("data: "):
                        state.update(json.loads(line.removeprefix("data: ")))

    reading = asyncio.create_task(read())
    try:
        yield state
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def test_a_live_run_is_told_as_status_and_its_file_tell_it(redis_url: str, run_id: str, tmp_path: Path) -> None:
    run = LiveRun(redis_url, run_id, tmp_path)
    async with served(make_app("s", "0", nothing, list)) as url:
        await run.begin()
        await run.announce("s0", url, kv_use=0.375)
        await run.hold_up("s0", "g")
        async with dashboard(run.runs) as page, events(page) as state:
            await until(lambda: bool(state), 10.0)
            command = ["status", "--json", "--run-id", run_id, "--redis-url", redis_url]
            told = await asyncio.to_thread(run_command, command)
    status = json.loads(told.out)
    names = set(MeshReport.__struct_fields__) - {"run_id", "at"}
    assert names <= set(state)
    for cause in (*status["causes"], *state["causes"]):
        cause["what"] = re.sub(r"\d+ s,", "some s,", cause["what"])  # told at different moments
    heard = [each.pop("last_heard") for each in (*status["services"], *state["services"])]
    assert len(heard) == 2
    assert {name: state[name] for name in names} == {name: status.get(name) for name in names}
    assert state["causes"][0]["groups"][0]["group"] == "g"
    assert state["services"][0]["kv_use"] == 0.375
    assert state["line"] == json.loads(run.folder.metrics.read_bytes().splitlines()[-1])
    assert (state["live"], state["phase"]["name"], state["about"]["k"]) == (True, "training", 2)


@pytest.mark.slow
@pytest.mark.alone
async def test_a_service_that_ends_is_told_within_three_seconds_and_so_is_its_return(
    redis_url: str, run_id: str, tmp_path: Path
) -> None:
    mesh = LiveRun(redis_url, run_id, tmp_path)
    await mesh.begin()
    kinds: tuple[tuple[str, ServiceKind], ...] = (
        ("s0", "rollout-server"), ("gateway", "gateway"), ("weight-bus", "weight-bus"), ("trainer", "trainer"),
        ("rewards", "rewards"),
    )  # fmt: skip
    async with dashboard(mesh.runs) as page, events(page) as state:
        for name, kind in kinds:
            app = make_app(name, "0", nothing, list)

            def probe(name: str = name) -> str | None:
                found = [each["probe"] for each in state.get("services", ()) if each["name"] == name]
                return found[0] if found else None

            async with served(app) as url:
                await mesh.announce(name, url, kind)
                await until(lambda: probe() == "ready", 3.0)
            await until(lambda: probe() == "refused", 3.0)
            async with served(app) as url:
                await mesh.announce(name, url, kind)
                await until(lambda: probe() == "ready", 3.0)


async def test_nothing_is_asked_while_no_page_is_open(redis_url: str, run_id: str, tmp_path: Path) -> None:
    mesh = LiveRun(redis_url, run_id, tmp_path)
    await mesh.begin()
    asked = 0

    def reasons() -> list[str]:
        nonlocal asked
        asked += 1
        return []

    async with served(make_app("s", "0", nothing, reasons)) as url, dashboard(mesh.runs) as page:
        await mesh.announce("s0", url)
        async with httpx.AsyncClient(base_url=page) as http:
            await http.get("/api/runs")
        assert asked == 0
        async with events(page) as state, events(page):
            await until(lambda: bool(state), 10.0)
            assert asked > 0

        async def quiet() -> bool:
            before = asked
            await asyncio.sleep(MOST_S + 0.7)
            return asked == before

        await until(quiet, 10.0)


async def test_an_admin_acts_by_the_routes_of_the_services_with_its_own_key(
    redis_url: str, run_id: str, tmp_path: Path
) -> None:
    mesh = LiveRun(redis_url, run_id, tmp_path)
    await mesh.begin()
    seen: list[tuple[str, str | None]] = []
    service = make_app("s", "0", nothing, list)

    @service.post("/admin/drain", status_code=202)
    async def drain(request: Request) -> Draining:
        seen.append((request.url.path, request.headers.get("authorization")))
        return Draining(server_id="s0", state="draining")

    @service.post("/v1/pause")
    async def pause(request: Request) -> dict[str, Any]:
        seen.append((request.url.path, request.headers.get("authorization")))
        return {"engines": [{"engine_id": "s0", "done": True}]}

    async with served(service) as url, dashboard(mesh.runs, KEYS) as page, httpx.AsyncClient(base_url=page) as http:
        await mesh.announce("s0", url)
        await mesh.announce("weight-bus", url, "weight-bus")
        order, at = {"server_id": "s0", "confirmed": True}, "/api/runs/live/actions"
        for key in (KEYS.agent, KEYS.peer):
            assert (await http.post(f"{at}/drain", json=order, headers=shown(key))).status_code == 403
        for body in ({"server_id": "s0"}, {"server_id": "s0", "confirmed": False}, {}):
            assert (await http.post(f"{at}/drain", json=body, headers=shown(KEYS.admin))).status_code == 422
        assert seen == []
        done = await http.post(f"{at}/drain", json=order, headers=shown(KEYS.admin))
        assert (done.status_code, done.json()) == (200, {"server_id": "s0", "state": "draining"})
        held = await http.post(f"{at}/hold", json={"confirmed": True}, headers=shown(KEYS.admin))
        assert held.json()["engines"][0]["done"] is True
        assert seen == [("/admin/drain", f"Bearer {KEYS.admin}"), ("/v1/pause", f"Bearer {KEYS.admin}")]
        unknown = await http.post(f"{at}/drain", json={**order, "server_id": "s9"}, headers=shown(KEYS.admin))
        assert unknown.status_code == 404
        assert "known services: s0, weight-bus" in unknown.json()["error"]["message"]


async def test_a_run_that_ends_is_told_so_and_one_that_is_named_twice_is_one(tmp_path: Path) -> None:
    make_run(tmp_path, "run", steps=4)
    async with dashboard(OpenRuns(root=tmp_path)) as url, events(url, "run") as state:
        await until(lambda: bool(state), 10.0)
        assert (state["live"], state["phase"]["name"], state["line"]["step"]) == (False, "done", 4)
        async with httpx.AsyncClient(base_url=url) as http:
            unknown = await http.get("/api/runs/other/events")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")


async def test_the_document_of_routes_says_what_they_answer(tmp_path: Path) -> None:
    make_run(tmp_path, "run", steps=3)
    paths = {
        "/api/compare": ("?run=run", "/api/compare"),
        "/api/runs/{run}/steps": ("?figure=step&figure=loss", "/api/runs/run/steps"),
        "/api/runs/{run}/rollouts": ("", "/api/runs/run/rollouts"),
    }
    async with dashboard(OpenRuns(root=tmp_path)) as url, httpx.AsyncClient(base_url=url) as http:
        document = (await http.get("/openapi.json")).json()
        for path, (query, asked) in paths.items():
            said = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
            answer = await http.get(asked + query)
            assert answer.status_code == 200, answer.text
            jsonschema.validate(answer.json(), said)
            assert set(said["required"]) == set(answer.json())
    assert "$defs" not in json.dumps(document)


async def test_a_run_whose_settings_cannot_be_read_says_why(tmp_path: Path) -> None:
    make_run(tmp_path, "run", steps=4).config.write_text("steps = [")
    async with dashboard(OpenRuns(root=tmp_path)) as url, events(url, "run") as state:
        await until(lambda: bool(state), 10.0)
    assert state["line"]["step"] == 4, "all else is shown"
    assert state["about"]["steps"] == 0
    assert "config.toml is not valid TOML" in state["about"]["unread"]


@pytest.mark.alone
async def test_a_redis_that_dies_is_told_within_three_seconds_and_so_is_its_return(run_id: str, tmp_path: Path) -> None:
    plan = ValkeyPlan(data_dir=tmp_path, port=free_port())
    run = LiveRun(plan.url, run_id, tmp_path)
    process = await started(plan)
    try:
        async with dashboard(run.runs) as page, events(page) as state:
            await run.begin()
            await until(lambda: state.get("queue") is not None, 5.0)
            process.kill()
            await until(lambda: bool(state["unread"]), 3.0)
            assert state["line"]["step"] == run.step, "what the files say is still shown"
            process.wait(10)
            process = await started(plan)
            await until(lambda: not state["unread"] and state["queue"] is not None, 3.0)
    finally:
        process.kill()
        process.wait(10)


async def started(plan: ValkeyPlan) -> subprocess.Popen[bytes]:
    def start() -> subprocess.Popen[bytes]:
        process = subprocess.Popen(plan.command(), stdout=subprocess.DEVNULL)
        wait_for_port(plan.port, process)
        return process

    return await asyncio.to_thread(start)

"""Every service answers the same probes: alive, ready or why not, which version, and figures under catalogued names."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

pytest.importorskip("torch")

from services.config.settings import RunSettings
from services.http.app import Stop, make_app, serve
from services.observability.catalog import CATALOG
from services.run_store.client import connect
from services.run_store.discovery import Listed, ServiceRegistry
from services.run_store.status import TrainerStatus, read_trainer_status
from services.wire.errors import NotReadyError
from tests.conftest import free_port
from tests.support.gateway_host import gateway
from tests.support.rewards_host import figure, judging
from tests.support.rollout_host import hosting, small_batch
from tests.support.scripted_engine import ScriptedEngine
from tests.support.served_app import served
from tests.support.step_lines import step_line
from tests.support.until import until
from trainer.io_loop import Background
from trainer.metrics.exporter import open_telemetry
from weight_bus.coordinator.app import build_app


@dataclass(frozen=True)
class Place:
    """What services of a test stand on."""

    redis_url: str
    run_id: str
    model: Path
    folder: Path

    async def listed(self) -> dict[str, Listed]:
        """The run's services."""
        redis = connect(self.redis_url)
        try:
            return {each.record.name: each for each in await ServiceRegistry(redis, self.run_id).services()}
        finally:
            await redis.aclose()

    async def report(self) -> TrainerStatus | None:
        redis = connect(self.redis_url)
        try:
            return await read_trainer_status(redis, self.run_id)
        finally:
            await redis.aclose()


@asynccontextmanager
async def rollout_server(place: Place) -> AsyncIterator[httpx.AsyncClient]:
    engine, settings = ScriptedEngine(answer_length=3), small_batch()
    async with hosting(
        engine, redis_url=place.redis_url, run_id=place.run_id, model=place.model, settings=settings
    ) as host:
        yield host.http


@asynccontextmanager
async def in_front(place: Place) -> AsyncIterator[httpx.AsyncClient]:
    async with rollout_server(place), gateway(place.redis_url, place.run_id) as host:
        yield host.http


@asynccontextmanager
async def weight_bus(place: Place) -> AsyncIterator[httpx.AsyncClient]:
    stop = Stop()
    async with served(build_app(place.run_id, 5.0, stop=stop), stop) as url, httpx.AsyncClient(base_url=url) as http:
        yield http


@asynccontextmanager
async def rewards(place: Place) -> AsyncIterator[httpx.AsyncClient]:
    async with judging({"name": "words", "function": "judges:words"}) as http:
        yield http


@asynccontextmanager
async def trainer(place: Place) -> AsyncIterator[httpx.AsyncClient]:
    """Its telemetry, as it has it: on a loop in another thread."""
    background = Background()
    metrics, settings = place.folder / "metrics.jsonl", RunSettings(steps=9, k=2)
    redis = connect(place.redis_url)
    try:
        with ExitStack() as stack:
            open_telemetry(redis, place.run_id, "http://127.0.0.1:1", metrics, settings, background, stack)

            async def is_listed() -> bool:
                return "trainer" in await place.listed()

            await until(is_listed)
            url = (await place.listed())["trainer"].record.url
            async with httpx.AsyncClient(base_url=url) as http:
                yield http
        background.call(redis.aclose(), "closing Redis", 5.0)
    finally:
        background.close()


Serving = Callable[[Place], AbstractAsyncContextManager[httpx.AsyncClient]]
SERVICES: dict[str, Serving] = {
    "rollout": rollout_server,
    "gateway": in_front,
    "bus": weight_bus,
    "rewards": rewards,
    "trainer": trainer,
}


@pytest.fixture
def place(redis_url: str, run_id: str, tiny_policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    # Reward functions are looked for where the service runs.
    (tmp_path / "judges.py").write_text("def words(answer): return len(answer.split())\n")
    monkeypatch.chdir(tmp_path)
    return Place(redis_url, run_id, tiny_policy, tmp_path)


@pytest.mark.parametrize("room", SERVICES)
async def test_every_service_answers_the_probes_and_tells_figures_of_the_catalogue(room: str, place: Place) -> None:
    (place.folder / "metrics.jsonl").write_bytes(step_line(1) + b"\n")
    kinds = {metric.name.removesuffix("_total"): (metric.kind, metric.help) for metric in CATALOG}
    async with SERVICES[room](place) as http:

        async def ready() -> bool:
            return (await http.get("/readyz")).status_code == 200

        await until(ready)
        assert (await http.get("/readyz")).json() == {"not_ready": []}
        assert (await http.get("/livez")).json() == {"status": "alive"}
        version = (await http.get("/version")).json()
        answer = await http.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        families = {family.name: family for family in text_string_to_metric_families(answer.text)}
        # When a counter began to count is the client library's to tell.
        told = [name for name in families if name.startswith("rollmesh_") and not name.endswith("_created")]
        ours = {name: families[name] for name in told}
        assert all((family.type, family.documentation) == kinds[name] for name, family in ours.items())
        build = ours["rollmesh_service_build_info"].samples[0].labels
        assert build == {"service": version["service"], "version": version["version"]}
        assert figure(answer.text, "rollmesh_service_not_ready_reasons") == 0
        assert any(name.startswith(f"rollmesh_{room}_") for name in ours)


async def test_the_trainer_says_why_it_is_not_ready_and_goes_on_with_the_runs_totals(place: Place) -> None:
    metrics = place.folder / "metrics.jsonl"
    async with trainer(place) as http:
        assert (await http.get("/readyz")).json() == {"not_ready": ["no optimizer step yet"]}
        assert await place.report() is None
        metrics.write_bytes(step_line(1) + b"\n" + step_line(2) + b"\n")

        async def told() -> bool:
            return (report := await place.report()) is not None and report.step == 2

        await until(told)
        assert (await http.get("/readyz")).status_code == 200
    assert await place.listed() == {}, "it has withdrawn itself"
    async with trainer(place) as http:

        async def counted() -> bool:
            return figure((await http.get("/metrics")).text, "rollmesh_trainer_optimizer_steps_total") == 2

        await until(counted)
        assert (
            figure((await http.get("/metrics")).text, "rollmesh_trainer_thread_seconds_total", activity="wait") == 0.5
        )


async def test_what_a_rollout_server_and_its_gateway_do_is_counted(place: Place) -> None:
    async with rollout_server(place) as server, gateway(place.redis_url, place.run_id) as host:
        session = await host.open(env="sums", purpose="evaluate")
        told = (await server.get("/metrics")).text
        assert figure(told, "rollmesh_rollout_open_sessions") == 1
        assert figure(told, "rollmesh_rollout_open_groups") == 1
        assert figure((await host.http.get("/metrics")).text, "rollmesh_gateway_known_servers", state="serving") == 1
        assert session["session_id"]
        listed = await place.listed()
        assert listed["s0"].alive
        assert json.loads((await server.get("/engine")).content)["server_id"] == "s0"


def test_a_service_that_fails_ends_and_raises_why() -> None:
    stop = Stop()

    @asynccontextmanager
    async def failing(_: FastAPI) -> AsyncIterator[None]:
        stop.fail(NotReadyError("the disk is gone"))
        yield

    app = make_app("failing", "0", failing, not_ready=list)
    with pytest.raises(NotReadyError, match="the disk is gone"):
        serve(app, "127.0.0.1", free_port(), stop=stop)

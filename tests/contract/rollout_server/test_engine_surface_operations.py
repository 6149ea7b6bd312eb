"""vLLM's routes for whoever operates an engine: pause, resume, abort, and the life of a weight update."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.contract.rollout_server.engine_harness import WeightPublisher
from tests.support.rollout_host import Host, hosting, small_batch, until
from tests.support.scripted_engine import ScriptedEngine
from trainer.sft.tiny_model import build_model, save_policy

GENERATE = "/inference/v1/generate"
LONG = {"token_ids": [3, 4], "sampling_params": {"max_tokens": 200}}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(answer_length=199, step_s=0.001)


@pytest.fixture
async def host(engine: ScriptedEngine, redis_url: str, run_id: str, tiny_policy: Path) -> AsyncIterator[Host]:
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tiny_policy, settings=small_batch()) as host:
        yield host


@pytest.fixture
def publisher(run_id: str) -> Iterator[WeightPublisher]:
    publisher = WeightPublisher(run_id, "shm")
    yield publisher
    publisher.close()


def manifest(publisher: WeightPublisher, folder: Path) -> dict[str, Any]:
    """The body of `/update_weights` for fresh weights, saved in `folder`, as version 1."""
    save_policy(build_model(seed=5), folder)
    return {"update_info": {"manifest": base64.b64encode(publisher.publish(1, folder)).decode()}}


async def generating(host: Host, engine: ScriptedEngine, **changes: Any) -> asyncio.Task[httpx.Response]:
    """A request that has sampled some tokens."""
    before = engine.status().tokens_generated
    task = asyncio.create_task(host.http.post(GENERATE, json=LONG | changes))
    await until(lambda: engine.status().tokens_generated > before + 3)
    return task


async def choice_of(task: asyncio.Task[httpx.Response]) -> dict[str, Any]:
    choice: dict[str, Any] = (await asyncio.wait_for(task, 10.0)).json()["choices"][0]
    return choice


async def test_pause_abort_ends_requests_with_what_they_have(host: Host, engine: ScriptedEngine) -> None:
    task = await generating(host, engine)
    assert (await host.http.post("/pause")).json() == {"status": "paused"}
    await engine.resume()
    choice = await choice_of(task)
    assert choice["finish_reason"] == "abort"
    assert 0 < len(choice["token_ids"]) < 200
    assert choice["policy_versions"] == [[0, 0]]


async def test_pause_keep_freezes_and_resume_goes_on(host: Host, engine: ScriptedEngine) -> None:
    task = await generating(host, engine)
    answer = await host.http.post("/pause", params={"mode": "keep", "clear_cache": "true"})
    assert answer.json() == {"status": "paused"}
    assert (await host.http.get("/is_paused")).json() == {"is_paused": True}
    assert not task.done()
    assert (await host.http.post("/resume")).json() == {"status": "resumed"}
    assert (await host.http.get("/is_paused")).json() == {"is_paused": False}
    assert len((await choice_of(task))["token_ids"]) == 200


async def test_pause_wait_lets_requests_end(host: Host, engine: ScriptedEngine) -> None:
    task = await generating(host, engine)
    assert (await host.http.post("/pause", params={"mode": "wait"})).json() == {"status": "paused"}
    assert (await choice_of(task))["finish_reason"] == "stop"


async def test_requests_are_aborted_by_their_ids_or_all_of_them(host: Host, engine: ScriptedEngine) -> None:
    one, other = await generating(host, engine, request_id="one"), await generating(host, engine, request_id="other")
    answer = await host.http.post("/abort_requests", json={"request_ids": ["one", "nobody"], "more": 1})
    assert answer.json() == {"status": "aborted", "aborted": 1}
    assert (await choice_of(one))["finish_reason"] == "abort"
    assert not other.done()
    for body in ({"content": b""}, {"json": {}}, {"json": {"request_ids": []}}):
        task = await generating(host, engine)
        answer = await host.http.post("/abort_requests", **body)  # type: ignore[arg-type]
        assert answer.status_code == 200
        assert answer.json()["aborted"] >= 1
        assert (await choice_of(task))["finish_reason"] == "abort"
    assert (await choice_of(other))["finish_reason"] == "abort"


async def test_one_process_is_the_world_and_an_unknown_way_to_pause_is_refused(host: Host) -> None:
    for include_dp in ("true", "false"):
        answer = await host.http.get("/get_world_size", params={"include_dp": include_dp})
        assert answer.json() == {"world_size": 1}
    assert (await host.http.post("/pause", params={"mode": "sleep"})).status_code == 422


async def test_a_weight_update_goes_its_way_and_requests_in_flight_show_both_versions(
    host: Host, engine: ScriptedEngine, publisher: WeightPublisher, tmp_path: Path
) -> None:
    update = manifest(publisher, tmp_path / "next")
    assert (await host.http.get("/weight_info")).json() == {"weight_version": "0"}
    task = await generating(host, engine)
    steps: list[tuple[str, Any, str]] = [
        ("/init_weight_transfer_engine", {"init_info": {"backend": "rollmesh"}}, "Weight transfer initialized"),
        ("/start_weight_update", None, "Weight update started"),
        ("/update_weights", update, "Weights updated"),
        ("/finish_weight_update", {"weight_version": "1"}, "Weight update finished"),
    ]
    for path, body, message in steps:
        answer = await host.http.post(path, json=body) if body is not None else await host.http.post(path)
        assert (answer.status_code, answer.json()) == (200, {"message": message})
    assert (await host.http.get("/weight_info")).json() == {"weight_version": "1"}
    versions = (await choice_of(task))["policy_versions"]
    assert [version for version, _ in versions] == [0, 1]
    # The next one begins with start: init is for the first, and to begin anew.
    assert (await host.http.post("/start_weight_update")).status_code == 200


async def test_every_other_order_is_refused_and_says_what_comes_next(
    host: Host, publisher: WeightPublisher, tmp_path: Path
) -> None:
    update = manifest(publisher, tmp_path / "next")
    calls: dict[str, Any] = {
        "/init_weight_transfer_engine": {"init_info": {}},
        "/start_weight_update": {},
        "/update_weights": update,
        "/finish_weight_update": {},
    }
    order = list(calls)
    for due in order:
        for path in order:
            if path in (due, order[0]):
                continue
            answer = await host.http.post(path, json=calls[path])
            assert (answer.status_code, answer.json()["error"]["code"]) == (409, "conflict"), f"{path} before {due}"
            assert f"next: {due}" in answer.json()["error"]["message"]
        assert (await host.http.post(due, json=calls[due])).status_code == 200
    assert (await host.http.get("/weight_info")).json() == {"weight_version": "1"}


async def test_init_gives_up_an_update_that_was_left_half_done(
    host: Host, publisher: WeightPublisher, tmp_path: Path
) -> None:
    update = manifest(publisher, tmp_path / "next")
    for path, body in (
        ("/init_weight_transfer_engine", {"init_info": {}}),
        ("/start_weight_update", {}),
        ("/update_weights", update),
        ("/init_weight_transfer_engine", {"init_info": {}}),
        ("/start_weight_update", {}),
        ("/update_weights", update),
        ("/finish_weight_update", {}),
    ):
        assert (await host.http.post(path, json=body)).status_code == 200


async def test_a_failed_step_keeps_the_old_version_and_can_be_tried_again(
    host: Host, publisher: WeightPublisher, tmp_path: Path
) -> None:
    update = manifest(publisher, tmp_path / "next")
    await host.http.post("/init_weight_transfer_engine", json={"init_info": {}})
    await host.http.post("/start_weight_update")
    for junk in ("not base64!", base64.b64encode(b"no manifest").decode()):
        answer = await host.http.post("/update_weights", json={"update_info": {"manifest": junk}})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "wire")
    assert (await host.http.post("/update_weights", json=update)).status_code == 200
    answer = await host.http.post("/finish_weight_update", json={"weight_version": "2"})
    assert answer.status_code == 409
    assert "version 1 is staged" in answer.json()["error"]["message"]
    assert (await host.http.get("/weight_info")).json() == {"weight_version": "0"}
    assert (await host.http.post("/finish_weight_update", json={"weight_version": "1"})).status_code == 200
    assert (await host.http.get("/weight_info")).json() == {"weight_version": "1"}


BACKENDS: list[tuple[dict[str, Any], str]] = [
    ({"backend": "nccl"}, "nccl"),
    ({"backend": "ipc"}, "ipc"),
    ({"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}, "nccl"),
    ({"backend": 7}, "7"),
]


async def test_backends_of_gpus_are_refused_by_name(host: Host) -> None:
    for init_info, name in BACKENDS:
        answer = await host.http.post("/init_weight_transfer_engine", json={"init_info": init_info})
        assert answer.status_code == 422
        message = answer.json()["error"]["message"]
        assert name in message
        assert '{"backend": "rollmesh"}' in message
    assert (await host.http.post("/start_weight_update")).status_code == 409


async def test_weights_can_be_checked_and_neither_reset_nor_relabelled(host: Host) -> None:
    checksums = (await host.http.post("/weight_checker", json={"action": "checksum"})).json()
    assert checksums == {"checksums": {"root": "initial"}}

    async def compare(baseline: dict[str, str]) -> dict[str, Any]:
        body = {"action": "compare", "baseline": baseline}
        answer: dict[str, Any] = (await host.http.post("/weight_checker", json=body)).json()
        return answer

    assert await compare(checksums["checksums"]) == {"match": True, "mismatches": []}
    assert await compare({"root": "other", "more": ""}) == {"match": False, "mismatches": ["more", "root"]}
    for body in ({"action": "reset"}, {"action": "compare"}, {"action": "melt"}):
        assert (await host.http.post("/weight_checker", json=body)).status_code == 422
    assert (await host.http.post("/update_weight_version", json={"new_version": "9"})).status_code == 422
    assert (await host.http.get("/weight_info")).json() == {"weight_version": "0"}

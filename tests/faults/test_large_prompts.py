"""Prompts of many megabytes through a gateway to real servers: nobody waits, nobody's call fails, no process grows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.faults.test_failover import talk_to, wide
from tests.support.chat_policy import save_chat_policy
from tests.support.fleet import Fleet, fleet_of
from tests.support.talking_agents import Talk

PLAIN = "the weather in the city is fine\n"
GROWS_BY_MIB = 100
ALIVE_WITHIN_S = 3.0
"""Far above what a free event loop takes on a busy machine, far below what a prompt of these took."""
JSON = {"content-type": "application/json"}


@pytest.fixture
async def fleet(tmp_path: Path, redis_url: str, run_id: str) -> AsyncIterator[Fleet]:
    model = tmp_path / "chat"
    save_chat_policy(model)
    async with fleet_of(2, folder=tmp_path, redis_url=redis_url, run_id=run_id, model=model, settings=wide()) as fleet:
        yield fleet


def largest_mib(pid: int) -> float:
    """The most memory that a process has had since `forget_largest`."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


def forget_largest(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def calls(megabytes: int) -> list[tuple[str, dict[str, Any]]]:
    text = PLAIN * (megabytes * 1_000_000 // len(PLAIN))
    message = {"role": "user", "content": text}
    return [
        ("v1/completions", {"prompt": text}),
        ("v1/completions", {"prompt": text[: len(text) // 2], "stream": True}),
        ("v1/chat/completions", {"messages": [message]}),
        ("v1/completions", {"prompt": "x" * len(text) + "🙂"}),
        ("v1/chat/completions", {"messages": [{"role": "user", "content": "x"}] * 100_000}),
    ]


async def probe(urls: list[str], stop: asyncio.Event) -> None:
    """Ask each service whether it lives, until told to stop."""
    async with httpx.AsyncClient(timeout=ALIVE_WITHIN_S) as http:
        while not stop.is_set():
            for url in urls:
                answer = await http.get(f"{url}/livez")
                assert answer.status_code == 200
            await asyncio.sleep(0.02)


async def test_nobody_notices_a_prompt_of_many_megabytes(fleet: Fleet) -> None:
    urls = [fleet.gateway_url, *fleet.urls.values()]
    pids = {name: child.process.pid for name, child in fleet.processes().items()}
    stop = asyncio.Event()
    async with httpx.AsyncClient(base_url=fleet.gateway_url, timeout=60.0) as http:
        await talk_to(fleet, [Talk(number) for number in range(8)])
        before = {name: largest_mib(pid) for name, pid in pids.items() if forget_largest(pid) is None}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(probe(urls, stop))
            for megabytes in (20, 9):
                for route, body in calls(megabytes):
                    talks = [Talk(number) for number in range(4)]
                    talking = tasks.create_task(talk_to(fleet, talks, turns=2))
                    session = (await http.post("/sessions", json={})).json()["session_id"]
                    packed = await asyncio.to_thread(lambda body=body: json.dumps(body, ensure_ascii=False).encode())
                    answer = await http.post(f"/sessions/{session}/{route}", content=packed, headers=JSON)
                    assert answer.status_code == 400, answer.text
                    assert answer.json()["error"]["code"] == "context_length_exceeded"
                    await talking
            assert (await http.get("/openapi.json")).status_code == 200
            stop.set()
        grown = {name: largest_mib(pid) - before[name] for name, pid in pids.items()}
        assert max(grown.values()) <= GROWS_BY_MIB, grown
        # It ends no server, and takes no session from one to another.
        assert all(child.process.returncode is None for child in fleet.processes().values())
        assert "taken over" not in fleet.logs()

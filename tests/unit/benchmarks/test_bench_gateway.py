"""`./dev bench gateway`: its optimum is the trie's, its silence the kill's; an agent's trouble fails it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest
from aiohttp import web

from benchmarks.gateway.failover import Kill, Killed, TalkingAgents, until_heard
from benchmarks.gateway.report import GatewayBench, Prefilled, Setting, as_table, judge
from benchmarks.harness.servers import HttpArm, client
from benchmarks.harness.timing import percentile
from benchmarks.harness.workload import Exchange, distinct_prefixes
from services.wire.errors import RollmeshError

SPEEDS = {
    "engines": [100.0, 200.0, 400.0],
    "engines_streamed": [100.0, 100.0, 100.0],
    "gateway": [95.0, 180.0, 400.0],
    "gateway_streamed": [50.0, 90.0, 95.0],
    "servers": [100.0, 200.0, 400.0],
    "servers_streamed": [100.0, 100.0, 100.0],
}


def judged(kills: list[Kill]) -> GatewayBench:
    return judge(
        SPEEDS,
        {"gateway": [0.014, 0.016], "server": [0.013, 0.013], "engine": [0.010, 0.011]},
        {"prefill_vs_optimum": [Prefilled(105, 100, 800)], "ungrouped_vs_optimum": [Prefilled(200, 100, 800)]},
        Killed(kills, answers=70),
        cpu_ms={"engines": {"engines": 80.0}, "gateway": {"engines": 80.25, "gateway": 0.51234}},
        setting=Setting(
            engine="torch",
            servers=2,
            parameters=1,
            concurrency=64,
            requests=192,
            max_tokens=128,
            prompt_tokens=(10, 20),
            latency_max_tokens=8,
            groups=16,
            siblings=8,
            group_prompt_tokens=(300, 310),
            group_max_tokens=32,
            kv_policy={"timed": "keep"},
            agents=32,
            kills=10,
            turn_max_tokens=128,
        ),
        load_before=(0.0, 0.0, 0.0),
        cores=2,
        versions={"rollmesh": "0"},
    )


@pytest.mark.parametrize(
    ("prompts", "nodes"),
    [
        ([], 0),
        ([[]], 0),
        ([[1, 2, 3]], 3),
        ([[1, 2, 3], [1, 2, 3]], 3),
        ([[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 3, 4]], 6),
        ([[1, 2], [1, 2, 3], [2, 2, 3], []], 6),
    ],
)
def test_the_optimum_counts_each_distinct_prefix_once(prompts: list[list[int]], nodes: int) -> None:
    assert distinct_prefixes(prompts) == nodes


def test_the_optimum_is_the_size_of_the_set_of_all_prefixes() -> None:
    rng = random.Random(1)
    for _ in range(200):
        prompts = [[rng.randrange(3) for _ in range(rng.randrange(8))] for _ in range(rng.randrange(12))]
        prefixes = {tuple(prompt[:length]) for prompt in prompts for length in range(1, len(prompt) + 1)}
        assert distinct_prefixes(prompts) == len(prefixes)


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(value) for value in range(1, 21)]
    assert [percentile(values, percent) for percent in (0, 50, 95, 100)] == [1.0, 10.0, 19.0, 20.0]
    assert percentile([3.0], 95) == 3.0
    with pytest.raises(ValueError, match="without values"):
        percentile([], 95)


@pytest.mark.parametrize(
    ("arrivals", "heard"),
    [
        ([], None),
        ([9.9, 10.0], None),
        # On its way at the kill: no sign of life, neither alone nor before the silence.
        ([9.9, 10.02, 10.04], None),
        ([9.9, 10.02, 10.04, 12.5, 12.6], 2.5),
        ([9.9, 11.0, 11.1], 1.0),
        # A long wait later on is not the kill's.
        ([9.9, 10.5, 20.0], 0.5),
        # Nothing had come before the kill.
        ([13.0], 3.0),
    ],
)
def test_the_silence_of_a_kill_ends_with_the_first_chunk_of_another_server(
    arrivals: list[float], heard: float | None
) -> None:
    found = until_heard(10.0, 5.0, arrivals)
    assert found == (None if heard is None else pytest.approx(heard))


def test_what_it_says_follows_from_what_was_measured() -> None:
    bench = judged([Kill("s0", [0.2, 0.4], [1.0]), Kill("s1", [0.3], [])])
    assert bench.spread["gateway_vs_engine"] == [0.95, 0.9, 1.0]
    assert (bench.gateway_vs_engine, bench.streamed_vs_engine, bench.gateway_vs_servers) == (0.95, 0.9, 0.95)
    assert (bench.added_latency_ms_p50, bench.latency_over_server_ms_p50) == (4.5, 2.0)
    assert (bench.prefill_vs_optimum, bench.ungrouped_vs_optimum) == (1.05, 2.0)
    assert (bench.failover_s_p95, bench.failover_s["p50"]) == (0.4, 0.3)
    assert bench.failover_calls == {"streamed": 3, "whole": 1, "all_answers": 70}
    assert bench.spread["failover_s_p95"] == [0.4, 0.3]
    assert bench.cpu_ms_per_call["gateway"] == {"engines": 80.25, "gateway": 0.512}
    assert "no error" in "".join(str(cell) for column in as_table(bench).columns for cell in column.cells)


def test_kills_that_hit_no_streamed_call_give_no_figure_and_say_so() -> None:
    bench = judged([Kill("s0", [], [1.0])])
    assert bench.failover_s_p95 is None
    assert "ask for more kills" in str(as_table(bench).caption)


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    async with client() as http:
        yield http


WHOLE = b'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": "length"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 4}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("chunks", "trouble"),
    [
        ([WHOLE, USAGE[:20], USAGE[20:], DONE], None),
        ([WHOLE, USAGE], "without its end"),
        ([WHOLE, USAGE, DONE[:5]], "without its end"),
        ([WHOLE, b'data: {"error": {"message": "lost"}}\n\n', DONE], "an agent was sent"),
        ([WHOLE.replace(b"length", b"abort"), USAGE, DONE], "otherwise than by its length"),
        ([WHOLE, USAGE.replace(b"4", b"3"), DONE], "should have had 4 tokens"),
    ],
)
async def test_an_agent_takes_nothing_but_whole_answers(
    http: aiohttp.ClientSession, chunks: list[bytes], trouble: str | None
) -> None:
    async def opens(request: web.Request) -> web.Response:
        return web.json_response({"session_id": "s", "api_key": "k", "group_id": "g"})

    async def answers(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
        await response.write_eof()
        agents.finish()
        return response

    async def gives_up(request: web.Request) -> web.Response:
        return web.Response()

    app = web.Application()
    app.router.add_post("/sessions", opens)
    app.router.add_post("/sessions/s/v1/chat/completions", answers)
    app.router.add_post("/sessions/s/abort", gives_up)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        question = Exchange([{"role": "user", "content": "?"}], [1], 4)
        agents = TalkingAgents(HttpArm(http, url, lambda: "its log"), [question])
        async with asyncio.timeout(10.0):
            if trouble is None:
                await agents.talk(streams=True)
            else:
                with pytest.raises(RollmeshError, match=trouble):
                    await agents.talk(streams=True)
    finally:
        await runner.cleanup()
    assert agents.answers == (trouble is None)
    assert not agents.in_flight


@pytest.mark.slow
@pytest.mark.e2e
def test_a_small_benchmark_kills_a_server_says_all_its_figures_and_leaves_no_process(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    sizes = {"rounds": 1, "requests": 8, "concurrency": 4, "max-tokens": 64, "pairs": 2, "groups": 2, "siblings": 2}
    sizes |= {"agents": 8, "kills": 1, "hidden-size": 32, "layers": 1}
    options = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-P", "-m", "benchmarks", "gateway", "--json", *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, check=False, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert {"gateway_vs_engine", "added_latency_ms_p50", "prefill_vs_optimum", "failover_s_p95"} <= figures.keys()
    assert figures["gateway_vs_engine"] > 0.0
    # Two questions of two siblings: computed once each, or nearly so, and never less than the trie.
    grouped = figures["prefill_tokens"]["prefill_vs_optimum"][0]
    assert grouped["optimum"] <= grouped["computed"] < grouped["asked"]
    assert figures["failover_calls"]["all_answers"] > 0
    cpu = figures["cpu_ms_per_call"]
    assert cpu.keys() == {"engines", "engines_streamed", "gateway", "gateway_streamed"}
    assert cpu["gateway"].keys() == {"engines", "servers", "gateway", "redis", "client"}
    assert all(sum(spent.values()) > 0.0 for spent in cpu.values())
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in commands if str(tmp_path) in line]
    assert list(tmp_path.glob("rollmesh-*")) == []  # torch leaves an empty folder of its own

"""`./dev bench rollout`: what it says follows from what it measured, arms do equal work, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from benchmarks.harness.processes import running
from benchmarks.harness.servers import Card, completion_tokens, plan_mesh, vllm_serve_command
from benchmarks.harness.timing import in_parallel
from benchmarks.rollout.report import Latencies, RolloutBench, Setting, as_table, judge
from rollout_server.completions.sampling import choose_sampling
from services.config.load import load_settings
from services.wire.errors import RollmeshError
from services.wire.openai_api import ChatCall
from services.wire.rollout_api import SamplingLimits
from tests.support.rollout_host import until

SPEEDS = {
    "engine": [100.0, 200.0, 400.0],
    "engine_streamed": [50.0, 100.0, 100.0],
    "plain": [99.0, 180.0, 400.0],
    "streamed": [40.0, 90.0, 95.0],
    "tokens": [100.0, 190.0, 396.0],
}


def judged(speeds: dict[str, list[float]]) -> RolloutBench:
    return judge(
        speeds,
        Latencies(server=[0.011, 0.014, 0.012, 0.013], engine=[0.010, 0.010, 0.010, 0.010]),
        [12_345, 11_000],
        {"plain": 0.51234},
        setting=Setting(
            engine="torch",
            parameters=1,
            concurrency=64,
            requests=256,
            max_tokens=64,
            prompt_tokens=(10, 20),
            latency_max_tokens=8,
            sessions=1000,
        ),
        notes=["vllm: not installed"],
        load_before=(0.0, 0.0, 0.0),
        cores=2,
        versions={"rollmesh": "0"},
    )


def test_a_ratio_is_the_median_of_what_each_round_gave() -> None:
    bench = judged(SPEEDS)
    assert bench.spread["server_vs_engine"] == [0.99, 0.9, 1.0]
    assert (bench.server_vs_engine, bench.streamed_vs_engine, bench.tokens_vs_engine) == (0.99, 0.9, 0.99)
    assert bench.added_latency_ms_p50 == 2.5
    assert bench.idle_session_bytes == 12_345


def test_an_arm_that_could_not_be_had_is_null_and_the_table_says_why() -> None:
    bench = judged(SPEEDS)
    assert bench.vs_vllm_serve is None
    assert "not installed" in str(as_table(bench).caption)
    both = judged(SPEEDS | {"vllm_plain": [11.0, 12.0, 10.0], "vllm_serve": [10.0, 10.0, 10.0]})
    assert both.vs_vllm_serve == 1.1


def test_an_answer_of_another_length_than_was_asked_for_ends_the_benchmark() -> None:
    assert completion_tokens(b'{"usage": {"completion_tokens":8}}', 8) == 8
    for answer in (b'{"usage": {"completion_tokens":7}}', b"data: [DONE]"):
        with pytest.raises(RollmeshError, match="should have had 8 tokens"):
            completion_tokens(answer, 8)


async def test_requests_are_kept_in_flight_up_to_the_number_asked_for_and_all_are_counted() -> None:
    flying = most = 0

    async def answer(item: int) -> int:
        nonlocal flying, most
        flying += 1
        most = max(most, flying)
        await asyncio.sleep(0.001 * (item % 3))
        flying -= 1
        return item

    rate = await in_parallel(range(40), 7, answer)
    assert (rate.tokens, most) == (sum(range(40)), 7)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_a_call_that_ignores_the_end_of_a_turn_is_not_ended_by_the_templates_either(ignore_eos: bool) -> None:
    call = ChatCall.model_validate(
        {"messages": [{"role": "user", "content": "x"}], "stop_token_ids": [5], "ignore_eos": ignore_eos}
    )
    chosen = choose_sampling(SamplingLimits(), call, 8, (7, 9), 100)
    assert chosen.stop_token_ids == ((5,) if ignore_eos else (5, 7, 9))


async def test_servers_on_a_card_share_it_alike_and_are_compiled(tmp_path: Path) -> None:
    plan = await plan_mesh(
        "r", redis_url="redis://h", model=tmp_path, engine="vllm", max_running=256, folder=tmp_path, card=Card()
    )
    ours = load_settings(plan.settings, [])
    words = vllm_serve_command(tmp_path, 256, 8000, Card())
    theirs = dict(pairwise(words))
    assert (theirs["--dtype"], theirs["--gpu-memory-utilization"], theirs["--max-num-seqs"]) == (
        ours.model.dtype,
        str(ours.rollout.vllm.gpu_memory_utilization),
        str(ours.rollout.max_running),
    )
    assert "--enforce-eager" not in words and "--kv-cache-memory-bytes" not in words
    assert "--enforce-eager" in vllm_serve_command(tmp_path, 256, 8000, None)


async def test_a_process_is_ended_with_its_children_when_the_benchmark_fails(tmp_path: Path) -> None:
    program = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    pids: list[int] = []
    with pytest.raises(RuntimeError, match="an arm failed"):
        async with running("parent", [sys.executable, "-c", program], tmp_path, stop_within_s=0.2) as child:

            async def printed() -> bool:
                return (tmp_path / "parent.log").read_text().strip() != ""

            await child.until(printed, 10.0)
            pids += [child.process.pid, int((tmp_path / "parent.log").read_text())]
            raise RuntimeError("an arm failed")
    await until(lambda: not any(_alive(pid) for pid in pids))  # a killed process takes a moment to go


async def test_a_process_that_ends_by_itself_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    program = "import sys; print('no such model', flush=True); sys.exit(3)"
    async with running("server", [sys.executable, "-c", program], tmp_path) as child:
        with pytest.raises(RollmeshError, match=r"exit code 3.*no such model"):
            await child.until(never, 10.0)


def test_the_random_policys_decode_step_is_recorded(tmp_path: Path) -> None:
    """It has a padding index, which once kept an engine from recording its step: the bench would measure Python."""
    pytest.importorskip("torch")
    import torch
    from transformers import AutoModelForCausalLM

    from benchmarks.harness.workload import save_random_policy
    from rollout_server.engines.torch.forward import PolicyForward

    save_random_policy(tmp_path, hidden_size=32, layers=1, seed=1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="sdpa").eval()
    assert model.get_input_embeddings().padding_idx is not None
    assert PolicyForward(model).recorded


@pytest.mark.slow
@pytest.mark.e2e
def test_a_small_benchmark_says_all_its_figures_and_leaves_no_process(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    sizes = {"rounds": 1, "requests": 4, "concurrency": 2, "max-tokens": 4, "pairs": 2, "sessions": 4}
    sizes |= {"hidden-size": 32, "layers": 1}
    options = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    command = [sys.executable, "-P", "-m", "benchmarks", "rollout", "--json", "--no-vllm-serve", *options]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=180, check=False, env=os.environ | {"TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["server_vs_engine"] > 0.0
    assert {"added_latency_ms_p50", "idle_session_bytes", "vs_vllm_serve"} <= figures.keys()
    assert figures["vs_vllm_serve"] is None
    assert "not asked for" in figures["notes"][0]
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in commands if str(tmp_path) in line]
    assert list(tmp_path.iterdir()) == []


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

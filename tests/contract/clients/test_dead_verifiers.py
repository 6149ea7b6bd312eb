"""A verifier that hangs, crashes or is hostile, in real processes: its group is lost by cause, and nothing is rewarded 0.

run-environment ──► rollout server (here) ──► stream
       └──► rewards ──► verifier: hangs · crashes · ends · eats memory · lies · kills its worker · writes to its service
"""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest

from services.wire.packed import unpack_mask, unpack_tokens
from services.wire.trajectory import Trajectory
from tests.conftest import free_port
from tests.contract.clients.test_runner_outages import played, process, tail
from tests.support.rewards_host import figure
from tests.support.rollout_host import hosting, small_batch
from tests.support.scripted_engine import ScriptedEngine
from tests.support.until import until
from trainer.sft.tiny_model import build_tokenizer

VERIFIER = """
import ctypes, os, signal, sys, time

def judge(answer, kind):
    return globals()[kind]()

def fine(): return 1.0
def wrong(): return 0.0
def hangs(): time.sleep(600)
def spins():
    while True: pass
def crashes(): ctypes.string_at(0)
def ends(): os._exit(0)
def eats(): return float(len(bytearray(8 << 30)))
def raises(): raise ValueError("cannot tell")
def lies(): return float("nan")
def forgets(): return None
def floods():
    while True: os.write(2, b"x" * 65536)
def kills_its_worker():
    for pid in range(1, 4):
        try: os.kill(pid, signal.SIGKILL)
        except OSError: pass
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(600)
def speaks_to_the_service():
    for descriptor in range(3, 64):
        try: os.write(descriptor, b'{"value": 0.0}' * 8)
        except OSError: pass
    os._exit(0)
"""
CAUSES = {
    "hangs": {"timeout"},
    "spins": {"timeout"},
    "crashes": {"crash"},
    "ends": {"crash"},
    "eats": {"memory", "crash"},
    "raises": {"raised"},
    "lies": {"value"},
    "forgets": {"value"},
    "floods": {"output"},
    "kills_its_worker": {"crash", "timeout"},
    "speaks_to_the_service": {"crash"},
}
"""What the service may say of each; `fine` and `wrong` have a reward."""
CONFIG = """
[rewards]
not_confined = "warn"

[[rewards.components]]
name = "judge"
function = "dead_verifier:judge"
workers = 3
time_limit_s = 1.0
memory_mib = 512
"""


@pytest.mark.slow
async def test_no_trajectory_is_rewarded_by_a_verifier_that_did_not_judge_it(
    redis_url: str, run_id: str, tiny_policy: Path, tmp_path: Path
) -> None:
    kinds = ["fine", "wrong", *CAUSES]
    rows = [{"prompt": f"{number:03d}=", "kind": kinds[number % len(kinds)]} for number in range(2 * len(kinds))]
    (tmp_path / "dead_verifier.py").write_text(VERIFIER)
    (tmp_path / "run.toml").write_text(CONFIG)
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "held_out.jsonl").write_text(json.dumps({"prompt": "999=", "kind": "fine"}))
    kind_of = {row["prompt"]: row["kind"] for row in rows}
    port, log, rewards_log = free_port(), tmp_path / "environment.log", tmp_path / "rewards.log"
    url = f"http://127.0.0.1:{port}"
    rewards = ["rewards", "--config", str(tmp_path / "run.toml"), "--port", str(port)]
    task = f"prompts:{tmp_path / 'rows.jsonl'}?held_out={tmp_path / 'held_out.jsonl'}"
    environment = ["run-environment", "--run-id", run_id, "--task", task, "--rewards-url", url]
    environment += ["--run-dir", str(tmp_path), "--group-size", "2", "--evaluation-problems", "1", "--retries", "0"]
    environment += ["--concurrency", "6", "--max-tokens", "4"]

    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(
            hosting(
                ScriptedEngine(answer_length=2),
                redis_url=redis_url,
                run_id=run_id,
                model=tiny_policy,
                settings=small_batch(k=50, batch=4),
            )
        )
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20.0))
        judge = await stack.enter_async_context(process(rewards_log, *rewards, folder=tmp_path))
        await stack.enter_async_context(process(log, *environment, "--rollout-url", host.url))

        async def every_row_was_played() -> bool:
            assert (await host.ledger.accounts()).closed_groups < 400, tail(log)
            return (await host.ledger.accounts()).closed_groups >= len(rows)

        try:
            await until(every_row_was_played, 120.0)
        except TimeoutError:
            raise AssertionError(f"{tail(log)}\n{tail(rewards_log)}") from None
        told = (await http.get("/metrics")).text
        # A service that dies is a verifier that is dead: nothing is played until it is there again.
        judge.send_signal(signal.SIGKILL)
        await judge.wait()
        before = await played(host)
        await stack.enter_async_context(process(rewards_log, *rewards, folder=tmp_path))

        async def judged_again() -> bool:
            return await played(host) > before + 6

        await until(judged_again, 60.0)
        published = await host.published()

    tokenizer = build_tokenizer()

    def kind(trajectory: Trajectory) -> str:
        (segment,) = trajectory.segments
        tokens, sampled = unpack_tokens(segment.token_ids), unpack_mask(segment.loss_mask)
        return str(kind_of[tokenizer.decode(tokens[sampled == 0].tolist())])

    rewarded = Counter((kind(one), one.reward) for one in published)
    assert set(rewarded) == {("fine", 1.0), ("wrong", 0.0)}, (
        "an answer that was judged wrong is a 0, and nothing else is"
    )
    lost = re.findall(r"group lost .*?cause=(\w+)", re.sub(r"\x1b\[[0-9;]*m", "", log.read_text()))
    assert set(lost) == {"reward"}
    said = log.read_text()
    for name, causes in CAUSES.items():
        counted = {
            cause: figure(told, "rollmesh_rewards_failed_samples_total", component="judge", cause=cause)
            for cause in causes
        }
        assert sum(counted.values()) > 0, f"{name}: {counted}"
        assert any(f"no value ({cause})" in said for cause in causes), name

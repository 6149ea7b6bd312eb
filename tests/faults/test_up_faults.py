"""What can go wrong with `rollmesh up`: misuse is one line, an interruption leaves nothing, a death is survived."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import free_port
from tests.support.black_hole import black_hole_thread
from tests.support.cut_valkey import CutValkey
from tests.support.mesh_command import (
    end_by,
    processes_of_runs_in,
    run_command,
    running_up,
    summary_of,
    warm_start,
)

SMALL = ("--engine", "torch", "evaluation.problems=32", "rollout.groups_per_step=4", "--steps", "12")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trainer.learning_rat=1"], "the nearest known key is 'trainer.learning_rate'"),
        (["--stepz", "3"], "the nearest known key is 'steps'"),
        (["--task", "runing-sums"], "did you mean 'running-sums'"),
        (["--engine", "vlm"], "did you mean 'vllm'"),
        (["--steps", "0"], "steps = 0"),
        (["--servers", "many"], "servers = 'many'"),
        (["fast"], "write section.key=value"),
        (["--config", "missing.toml"], "cannot read the configuration missing.toml"),
        (["--redis-url", "redis://127.0.0.1:1/0"], "no Redis answers at redis://127.0.0.1:1/0"),
        (["--redis-url", "http://127.0.0.1"], "is no Redis address"),
        (["--run-dir", "/dev/null/run"], "cannot write the run folder /dev/null/run"),
        (["model.path=nowhere"], "nowhere is no Hugging Face model folder"),
        (["--engine", "torch", "weights.shadow=pinned"], "weights.shadow=pinned is not read by engine torch"),
        (["--engine", "torch", "rollout.tensor_parallel=2"], "cannot split a model over 2 ranks"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_misuse_is_one_line_exit_code_2_and_leaves_nothing(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = run_command(["up", *arguments], cwd=tmp_path)
    assert done.code == 2
    assert said in done.err
    assert done.err.startswith("rollmesh: ")
    assert done.err.count("\n") == 1, done.err
    assert done.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_command(["up", *SMALL, f"telemetry.trainer_port={port}"], cwd=tmp_path)
    assert (done.code, done.err.count("\n"), done.out) == (2, 1, "")
    assert f"cannot listen on 127.0.0.1:{port} (Address already in use): choose another port" in done.err
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_a_run_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("seed = 7\n")
    done = run_command(["up", "--run-dir", str(tmp_path)])
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "holds a run already" in done.err
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


@pytest.mark.parametrize("command", ["weight-bus", "rollout-server"])
def test_a_port_in_use_is_one_line(command: str, redis_url: str, tmp_path: Path) -> None:
    more = [] if command == "weight-bus" else ["--redis-url", redis_url, "--model", str(tmp_path)]
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", free_port()))
        holder.listen()
        port = str(holder.getsockname()[1])
        done = run_command([command, "--run-id", "r", "--port", port, *more])
    assert done.code == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.err
    assert "Traceback" not in done.err


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 288 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounting = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=288m", "tmpfs", str(folder)], capture_output=True, check=False
    )
    if sys.platform != "linux" or mounting.returncode != 0:
        pytest.skip("only root can mount a small disk")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def test_a_full_disk_is_refused_before_the_run(small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(b"x" * (64 << 20))
    done = run_command(["up", "--run-dir", str(small_disk / "run")])
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "MiB left" in done.err
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]


@pytest.mark.e2e
def test_a_disk_that_fills_ends_the_run_and_says_so(small_disk: Path) -> None:
    with running_up(small_disk / "run", *SMALL) as mesh:
        while not (small_disk / "run" / "logs" / "weight-bus.log").exists():
            assert mesh.process.poll() is None
            time.sleep(0.02)
        (small_disk / "ballast").write_bytes(b"x" * (270 << 20))
        done = mesh.finish(30.0)
    assert done.code == 1
    assert "MiB left: the run was ended" in done.err
    assert "Traceback" not in done.err


@pytest.fixture(scope="module")
def warm_cache() -> str:
    return warm_start()


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("which", "steps"),
    # In the middle of training Ctrl-C and a kill are told of in test_up_resume.
    [(signal.SIGINT, 0), (signal.SIGTERM, 0), (signal.SIGKILL, 0), (signal.SIGTERM, 3)],
    ids=["int-starting", "term-starting", "kill-starting", "term-training"],
)
def test_an_interrupted_run_leaves_nothing_behind(
    which: signal.Signals, steps: int, tmp_path: Path, warm_cache: str
) -> None:
    with running_up(tmp_path / "run", *SMALL, "--steps", "500", warm_cache) as mesh:
        if steps:
            mesh.wait_for_steps(steps)
        else:
            while len(mesh.descendants()) < 6:
                assert mesh.process.poll() is None
                time.sleep(0.02)
        end_by(mesh, which)


@pytest.mark.e2e
def test_the_next_run_starts_and_outlives_the_death_of_each_of_its_services(tmp_path: Path, warm_cache: str) -> None:
    """After the interrupted runs above, one in which every kind of service is killed still ends in good order."""
    with running_up(tmp_path / "run", *SMALL, "--steps", "40", warm_cache) as mesh:
        engine = "rollout_server.engines.torch.process.worker"
        services = ("train", "run-environment", "weight-bus", "valkey", "rollout-server", engine)
        for step, command in enumerate(services, start=1):
            mesh.wait_for_steps(5 * step)
            os.kill(mesh.service(command).pid, signal.SIGKILL)
        done = mesh.finish(180.0)
        assert done.code == 0, f"{done.out}\n{done.err}\n{mesh.logs()}"
    summary = summary_of(tmp_path / "run")
    assert summary["restarts"] >= len(services)
    assert summary["steps"] == summary["final_version"] == 40
    assert summary["max_staleness"] <= summary["k"]
    assert summary["weights_digest_match"] is True
    assert summary["trajectories_published"] == summary["trajectories_trained"] + summary["trajectories_dropped"]


SILENT_S = 8.0
LONGEST_GAP_S = SILENT_S + 40.0
"""Between two steps of which one came after the cut; generous, machines of tests are busy."""


@pytest.mark.e2e
def test_a_run_outlasts_a_silent_cut_and_a_redis_that_lost_its_end(tmp_path: Path, warm_cache: str) -> None:
    (tmp_path / "redis").mkdir()
    redis = CutValkey(tmp_path / "redis")
    try:
        with black_hole_thread(redis.plan.port) as (hole, told):
            url = f"redis://127.0.0.1:{hole.port}/0"
            with running_up(
                tmp_path / "run", *SMALL, "--steps", "40", "--servers", "2", "--redis-url", url, warm_cache
            ) as mesh:
                mesh.wait_for_steps(5)
                told(hole.cut)
                time.sleep(SILENT_S)
                told(hole.heal)
                mesh.wait_for_steps(mesh.steps() + 4, LONGEST_GAP_S)
                assert mesh.logs().count("Redis does not answer") >= 3
                redis.come_back(int(redis.written * 0.9))
                done = mesh.finish(180.0)
                assert done.code == 0, f"{done.out}\n{done.err}\n{mesh.logs()}"
    finally:
        redis.close()
    summary = summary_of(tmp_path / "run")
    assert summary["steps"] == summary["final_version"] == 40
    assert summary["restarts"] == 0
    assert summary["weights_digest_match"] is True
    steps = (tmp_path / "run" / "checkpoints" / "steps.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [entry for line in steps for entry in json.loads(line).get("entries", [])]
    assert summary["trajectories_trained"] == len(entries) == len(set(entries))
    assert summary["trajectories_published"] == summary["trajectories_trained"] + summary["trajectories_dropped"]


@pytest.mark.e2e
def test_a_service_that_refuses_its_environment_variables_ends_the_run_in_one_line(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    # What a look at the files finds nothing wrong with, and nobody can load.
    (model / "config.json").write_text('{"model_type": "qwen3"}')
    (model / "tokenizer.json").write_text('{"model": {}}')
    (model / "model.safetensors").write_bytes(b"no weights")
    done = run_command(["up", "--run-dir", str(tmp_path / "run"), *SMALL, f"model.path={model}"], deadline_s=120.0)
    assert (done.code, done.err.count("\n")) == (2, 1)
    assert "holds no causal language model" in done.err
    assert processes_of_runs_in(tmp_path) == []

"""deploy/slurm/rollmesh.sbatch: judged by shellcheck, then run as it stands, on nodes that are addresses of loopback."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from services.config.load import load_settings
from tests.support import fake_slurm
from tests.support.command_lines import after_shell, parse, torchrun_asks
from tests.support.manifests import ROOT
from tests.support.mesh_command import warm_start

SCRIPT = ROOT / "deploy/slurm/rollmesh.sbatch"
HEAD, *ROLLOUT_NODES = NODES = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


@dataclass
class Job:
    """The script as Slurm runs it. `home`: ROLLMESH_HOME."""

    process: subprocess.Popen[str]
    home: Path
    log: Path

    @property
    def run(self) -> Path:
        return self.home / "slurm-7"

    def steps(self) -> dict[str, fake_slurm.Step]:
        """By name; of one that was started again, the last."""
        return {step.flags["job-name"]: step for step in fake_slurm.steps(self.log)}

    def processes(self) -> list[psutil.Process]:
        """Everything that was started for this job and still runs, whoever its parent is."""
        mine = []
        for process in psutil.process_iter():
            try:
                if str(self.home) in " ".join(process.cmdline()):
                    mine.append(process)
            except psutil.Error:
                continue
        return [each for each in mine if each.pid != os.getpid()]

    def trained(self) -> int:
        """Optimizer steps so far."""
        metrics = self.run / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0


@contextmanager
def submitted(folder: Path, *overrides: str, gpus: int = 0, nodes: Sequence[str] = NODES) -> Iterator[Job]:
    home = folder / "home"
    if not (folder / "bin").exists():
        fake_slurm.install(folder / "bin")
    environ = {
        **os.environ,
        **({"SLURM_GPUS_ON_NODE": str(gpus)} if gpus else {}),
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "FAKE_SLURM_LOG": str(folder / "steps"),
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": ",".join(nodes),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "ROLLMESH_VENV": sys.prefix,
        "ROLLMESH_HOME": str(home),
        "ROLLMESH_ENGINE": "torch",
        "ROLLMESH_PORT_OFFSET": str(random.randrange(1000, 5000)),
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(
        ["bash", str(SCRIPT), *overrides], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    job = Job(process, home, folder / "steps")
    try:
        yield job
    finally:
        process.kill()
        for each in job.processes():
            each.kill()
        process.communicate(timeout=10)


def small(steps: int) -> list[str]:
    return [
        f"steps={steps}",
        "evaluation.problems=8",
        "rollout.groups_per_step=4",
        warm_start(),
    ]


def test_shellcheck_finds_nothing() -> None:
    program = Path(sys.prefix) / "bin/shellcheck"
    checked = subprocess.run([program, "--shell=bash", SCRIPT], capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stdout


def test_its_settings_are_settings() -> None:
    assert load_settings(ROOT / "deploy/slurm/mesh.toml", []).task == "running-sums"


@pytest.mark.e2e
def test_a_job_trains_and_leaves_nothing_running(tmp_path: Path) -> None:
    with submitted(tmp_path, *small(4)) as job:
        said, _ = job.process.communicate(timeout=240)
        assert job.process.returncode == 0, said
        assert not job.processes()
        assert job.trained() == 4
        assert json.loads((job.run / "evaluation.json").read_text())
        steps = job.steps()
    expected = {
        "prepare": "prepare",
        "redis": "redis",
        "weight-bus": "weight-bus",
        "rollout-0": "rollout-server",
        "rollout-1": "rollout-server",
        "gateway": "gateway",
        "trainer": "train",
        "environment": "play",
        "dashboard": "dashboard",
    }
    assert re.search(rf"dashboard: http://{HEAD}:\d+/", said)
    assert {name: parse(step.command)[0] for name, step in steps.items()} == expected
    assert [steps[f"rollout-{index}"].flags["nodelist"] for index in range(2)] == ROLLOUT_NODES
    assert all(step.flags["nodelist"] == HEAD for name, step in steps.items() if not name.startswith("rollout"))
    # Without a GPU nothing asks for one.
    assert not any("gpus" in step.flags for step in steps.values())
    keys = job.home / "keys"
    assert stat.S_IMODE(keys.stat().st_mode) == 0o700
    secrets = [file.read_text().strip() for file in keys.glob("*.key")]
    assert len(secrets) == 7
    assert not any(secret in said or secret in job.log.read_text() for secret in secrets)


def test_a_node_without_gpus_enough_for_trainer_and_engine_is_refused_with_the_sum(tmp_path: Path) -> None:
    settings = [*small(4), "rollout.tensor_parallel=2", "trainer.parallel.data=3"]
    with submitted(tmp_path, *settings, gpus=4, nodes=[HEAD]) as job:
        said, _ = job.process.communicate(timeout=120)
        assert job.process.returncode == 1
        assert not job.processes()
    assert "a node has 4 GPUs: the trainer takes 3 of the first, an engine 2, and there are 0 engines a node" in said
    assert [parse(step.command)[0] for step in job.steps().values()] == ["prepare"]


def wait_for_steps(job: Job, steps: int) -> None:
    deadline = time.monotonic() + 200
    while job.trained() < steps:
        assert job.process.poll() is None, "the job has ended"
        assert time.monotonic() < deadline, f"{job.trained()} of {steps} steps"
        time.sleep(0.1)


ENDED = {"trainer": "stopped", "rollout-0": "stopped", "redis": "ready to exit"}


def time_is_up(job: Job, ended: Mapping[str, str] = ENDED, lines: int = 1) -> str:
    """What Slurm does before it kills; returns what the script said. `ended`: what logs say in their last `lines` lines."""
    job.process.send_signal(signal.SIGTERM)
    said, _ = job.process.communicate(timeout=60)
    assert job.process.returncode == 143, said
    assert "ending the mesh" in said and "is killed" not in said
    assert not job.processes()
    # Each had the time to end in good order: what they said last says so.
    for name, words in ended.items():
        log = (job.run / f"logs/{name}.log").read_text()
        assert words in "".join(log.splitlines()[-lines:]) and "not closed cleanly" not in log, log
    return said


def serves(process: psutil.Process, server: str) -> bool:
    """Whether it is that rollout server itself, and not the srun that runs it."""
    words = process.cmdline()
    return "srun" not in words and {"rollout-server", server} <= set(words)


@pytest.mark.e2e
def test_a_job_whose_time_is_up_ends_in_good_order_and_goes_on_when_it_is_submitted_again(
    tmp_path: Path,
) -> None:
    settings = small(1000)
    with submitted(tmp_path, *settings, gpus=1) as job:
        wait_for_steps(job, 2)
        next(each for each in job.processes() if serves(each, "rollout-1")).kill()
        deadline = time.monotonic() + 60
        # A step that fails is started again: it is written down once more.
        while sum("rollout-server" in step.command for step in fake_slurm.steps(job.log)) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert "rollout-1 ended with exit code 137" in time_is_up(job)
        steps = job.steps()
        before = job.trained()
    on_gpus = {name for name, step in steps.items() if step.flags.get("gpus") == "1" and "exact" in step.flags}
    assert on_gpus == {"prepare", "trainer", "rollout-0", "rollout-1"}
    with submitted(tmp_path, *settings, gpus=1) as again:
        wait_for_steps(again, before + 2)
        time_is_up(again)


@pytest.mark.e2e
def test_a_trainer_on_two_nodes_ends_in_good_order_and_goes_on(tmp_path: Path) -> None:
    """The settings alone say so: each copy of the policy takes a node."""
    settings = [*small(1000), "trainer.parallel.replicate=2"]
    with submitted(tmp_path, *settings, gpus=1) as job:
        wait_for_steps(job, 2)
        time_is_up(job, ended={"trainer": "stopped"}, lines=80)
        steps, before = job.steps(), job.trained()
        assert "layout='2 replicate' rank=1" in (job.run / "logs/trainer.log").read_text()
        assert list((job.run / "checkpoints").glob("step-*/meta.json"))
    flags = steps["trainer"].flags
    assert (flags["nodelist"], flags["gpus-per-node"]) == (",".join(NODES[:2]), "1")
    assert [steps[name].flags["nodelist"] for name in steps if name.startswith("rollout")] == [NODES[2]]
    asked = torchrun_asks(after_shell(steps["trainer"].command))
    assert (asked.nodes, asked.ranks_a_node, asked.node, asked.master) == (2, 1, None, HEAD)
    assert parse(["rollmesh", *asked.command])[0] == "train"
    with submitted(tmp_path, *settings, gpus=1) as again:
        wait_for_steps(again, before + 2)
        time_is_up(again, ended={"trainer": "stopped"}, lines=80)

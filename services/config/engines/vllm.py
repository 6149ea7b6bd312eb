"""Settings of the vLLM engine, `[rollout.vllm]`: any of its engine arguments by vLLM's own name.

    first class       fields below, documented
    every other       taken as it is; checked against the installed vLLM (`services.host.vllm_arguments`), then by vLLM
    refused           what another setting says, and what would break a promise: REFUSED, and values by `_refused_value`

Nothing here has a default of its own: what is not set is left to vLLM, or to `rollout_server.engines.vllm.arguments`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, Field

from services.config.base import Section
from services.wire.errors import UsageError

MOST_RANK = 512
"""Of an adapter that vLLM serves."""
MOST_LOGPROBS = 257
"""Of a token, that vLLM is asked for at the most: of what `top_k` = 256 leaves, and one more."""


class VllmSettings(Section):
    model_config = ConfigDict(extra="allow", validate_default=True, allow_inf_nan=False)

    gpu_memory_utilization: float | None = Field(
        default=None, gt=0.0, le=1.0, description="Share of a GPU's memory that an engine may take"
    )
    kv_cache_memory_bytes: int | None = Field(
        default=None, ge=1 << 20, description="Bytes of keys and values on each rank, in place of what is left"
    )
    max_model_len: int | None = Field(default=None, ge=1, description="Longest context, in tokens; else the model's")
    max_num_batched_tokens: int | None = Field(default=None, ge=1, description="Tokens that a step computes at most")
    enable_chunked_prefill: bool | None = Field(
        default=None, description="Whether a prompt may be read in several steps"
    )
    enable_expert_parallel: bool | None = Field(
        default=None, description="Ranks hold whole experts, in place of a slice of each"
    )
    data_parallel_size: int | None = Field(default=None, description="1: an engine is one; `servers` starts more")
    quantization: str | None = Field(default=None, description="Of weights, as vLLM names it")
    kv_cache_dtype: str | None = Field(default=None, description="Of keys and values: auto, fp8, …")
    cpu_offload_gb: float | None = Field(
        default=None, ge=0.0, description="GiB of weights on each rank that stay in the host's memory"
    )
    speculative_config: dict[str, Any] | None = Field(
        default=None, description="Speculative decoding: a table of vLLM's"
    )
    enforce_eager: bool | None = Field(
        default=None, description="Without compiler and CUDA graphs; on a CPU that is the default"
    )
    async_scheduling: bool | None = Field(
        default=None, description="false: of steps that overlap one would be stamped with a wrong version"
    )

    def arguments(self) -> dict[str, Any]:
        """What is set, by vLLM's names."""
        return {name: value for name, value in self.model_dump().items() if value is not None}


_BY = "another setting says it: {}"
_ONE_CORE = "a version is committed in one engine core, for all of its ranks at once: start more engines (servers)"


def _each(names: str, why: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), why)


REFUSED: Mapping[str, str] = {
    **_each(
        "model model_weights tokenizer hf_config_path served_model_name revision code_revision tokenizer_revision "
        "hf_token hf_overrides model_class_overrides download_dir",
        "the run's model is the one that is trained and published: set model.path",
    ),
    "dtype": _BY.format("model.dtype"),
    "seed": _BY.format("seed; each server has one of its own"),
    "trust_remote_code": _BY.format("model.trust_remote_code"),
    "tensor_parallel_size": _BY.format("rollout.tensor_parallel"),
    "max_num_seqs": _BY.format("rollout.max_running"),
    "enable_prefix_caching": _BY.format("rollout.kv_policy"),
    "device_ids": _BY.format("placement.devices"),
    "otlp_traces_endpoint": _BY.format("telemetry.traces"),
    **_each(
        "pipeline_parallel_size prefill_context_parallel_size nnodes node_rank master_addr master_port "
        "data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address "
        "data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb "
        "data_parallel_backend",
        _ONE_CORE,
    ),
    **_each(
        "logprobs_mode logits_processors generation_config override_generation_config runner convert pooler_config "
        "diffusion_config watermark_config",
        "logprobs must be those of the distribution that was sampled from, which the trainer computes again",
    ),
    **_each(
        "weight_transfer_config enable_sleep_mode sleep_mode_offload_cudagraph enable_cumem_allocator "
        "sleep_preserve_parameter_names enable_eplb eplb_config enable_elastic_ep elastic_ep_max_dp_size enable_lora "
        "max_loras max_cpu_loras max_lora_rank lora_target_modules fully_sharded_loras lora_dtype default_mm_loras",
        "the weight bus replaces weights in place, and must be the only one that moves them",
    ),
    **_each(
        "skip_tokenizer_init tokenizer_mode tokens_only worker_cls worker_extension_cls distributed_executor_backend "
        "scheduling_policy scheduler_cls disable_log_stats max_logprobs use_tqdm_on_load ir_op_priority "
        "io_processor_plugin",
        "rollmesh sets it, for its calls between two steps",
    ),
    "kv_transfer_config": "keys and values of another engine may be of another version",
    "kv_events_config": "nobody reads them",
}
"""vLLM's name → why it is no setting of ours."""


def check_vllm(settings: VllmSettings) -> None:
    """Raises UsageError for an argument that would break a promise, with the reason. Whether vLLM has the others is not
    looked at."""
    for name, value in settings.arguments().items():
        why = REFUSED.get(name) or _refused_value(name, value)
        if why is not None:
            raise UsageError(f"rollout.vllm.{name}={value} cannot be: {why}", "leave it out")


def _refused_value(name: str, value: object) -> str | None:
    if name == "data_parallel_size" and value != 1:
        return _ONE_CORE
    if name == "async_scheduling" and value:
        return "a commit between two steps that overlap would stamp one of them with a wrong version"
    if name == "load_format" and value == "dummy":
        return "a policy version is one set of bytes, and these would be random"
    return None

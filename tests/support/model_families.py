"""Model families, tiny and random, and what the trainer makes of each: the table of docs/models.md.

python -m tests.support.model_families      prints the table
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel

from trainer.model.forward import PackedForward, freeze_beside_text
from trainer.model.learner import named_weights
from weight_bus.manifest.published import PublishedNames

VOCABULARY = 64
WINDOW = 12
"""Tokens of each window and chunk: fewer than the tests' rows."""

Sizes = Mapping[str, Any]
SMALL: Sizes = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
FOR_VLLM: Sizes = dict(SMALL) | {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
"""vLLM's attention on a CPU knows no smaller heads."""

_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LOCAL_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_SECOND_LAYER_SLIDES = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
_FIRST_LAYER_SLIDES = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}


def _no_head_dim(sizes: Sizes) -> dict[str, Any]:
    """For families whose heads share the hidden size."""
    return {name: size for name, size in sizes.items() if name != "head_dim"}


def _gemma3(sizes: Sizes) -> PreTrainedModel:
    text = {**sizes, **_FIRST_LAYER_SLIDES}
    tokens = {"boi_token_index": 60, "eoi_token_index": 61, "image_token_index": 62, "mm_tokens_per_image": 4}
    config = transformers.Gemma3Config(text_config=text, vision_config=_VISION, **tokens, eos_token_id=1)
    return transformers.Gemma3ForConditionalGeneration(config)


def _llama4(sizes: Sizes) -> PreTrainedModel:
    chunks = {"attention_chunk_size": WINDOW, "layer_types": ["chunked_attention", "full_attention"]}
    experts = {"num_local_experts": 4, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2}
    return transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**sizes, **chunks, **experts))


def _qwen3_next(sizes: Sizes) -> PreTrainedModel:
    heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    linear = {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8, **heads}
    config = transformers.Qwen3NextConfig(
        **sizes, **_EXPERTS, **linear, linear_value_head_dim=8, shared_expert_intermediate_size=16
    )
    return transformers.Qwen3NextForCausalLM(config)


_MADE: dict[str, Callable[[Sizes], PreTrainedModel]] = {
    "Qwen3": lambda sizes: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, tie_word_embeddings=True)),
    "Qwen2.5": lambda sizes: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(**(_SECOND_LAYER_SLIDES | _no_head_dim(sizes)))
    ),
    "Llama": lambda sizes: transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)),
    "Mistral": lambda sizes: transformers.MistralForCausalLM(
        transformers.MistralConfig(**sizes, sliding_window=WINDOW)
    ),
    "Gemma 2": lambda sizes: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**sizes, sliding_window=WINDOW, query_pre_attn_scalar=8)
    ),
    "Gemma 3, text": lambda sizes: transformers.Gemma3ForCausalLM(
        transformers.Gemma3TextConfig(**sizes, **_FIRST_LAYER_SLIDES, query_pre_attn_scalar=8)
    ),
    "Gemma 3": _gemma3,
    "Qwen3-MoE": lambda sizes: transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **_EXPERTS)),
    "Qwen2-MoE": lambda sizes: transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(
            **_no_head_dim(sizes), **_EXPERTS, **_SECOND_LAYER_SLIDES, shared_expert_intermediate_size=16
        )
    ),
    "Mixtral": lambda sizes: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**sizes, **_LOCAL_EXPERTS, sliding_window=WINDOW)
    ),
    "Phi-3.5-MoE": lambda sizes: transformers.PhimoeForCausalLM(
        transformers.PhimoeConfig(**_no_head_dim(sizes), **_LOCAL_EXPERTS, sliding_window=WINDOW)
    ),
    "gpt-oss": lambda sizes: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(**sizes, **_LOCAL_EXPERTS, **_FIRST_LAYER_SLIDES, rope_parameters=_YARN)
    ),
    "Llama 4, text": _llama4,
    "Qwen3-Next": _qwen3_next,
}

FAMILIES = tuple(_MADE)
DENSE = tuple(name for name in FAMILIES if not re.search("MoE|Mixtral|oss|Llama 4|Next", name))


def make_family(name: str, sizes: Sizes = SMALL) -> PreTrainedModel:
    """A model of the family, in float32; the same bytes each time. Weights are large enough for tokens to matter to each
    other, and for routers to prefer an expert."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = _MADE[name](sizes).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(3.0 if weight.ndim > 1 else 1.0)
    return model


def table() -> list[str]:
    """Lines of the table, in Markdown; without what vLLM says where it is not installed."""
    served = _served_by_vllm()
    head = ["family", "`model_type`", "packed rows", "shared stems", "LoRA", "MoE", "vLLM"]
    lines = [head, ["---"] * len(head)]
    for name in FAMILIES:
        model = make_family(name)
        freeze_beside_text(model)
        packed = PackedForward(model)
        vllm = "?" if served is None else "yes" if type(model).__name__ in served else "no"
        kind = f"`{model.config.model_type}`"
        stems = "no" if packed.stem_width is None else "yes"
        lines.append([name, kind, packed.separation, stems, _adaptable(model), _experts(model), vllm])
    return [f"| {' | '.join(line)} |" for line in lines]


def _adaptable(model: PreTrainedModel) -> str:
    """Whether LoRA reaches all that is trained: adapters stand beside linear layers."""
    held = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        for weight in module.parameters(recurse=False)
        if weight.requires_grad and weight.ndim > 1 and not isinstance(module, nn.Linear | nn.Embedding)
    }
    return f"all but {', '.join(sorted(held))}" if held else "yes"


def _experts(model: PreTrainedModel) -> str:
    weights = named_weights(model)
    fused = [name for name, weight in weights.items() if weight.ndim == 3 and "experts" in name]
    if not fused:
        return "–"
    return "published fused" if fused[0] in PublishedNames(model, weights).views(weights) else "published by expert"


def _served_by_vllm() -> set[str] | None:
    """The architectures that the installed vLLM names, by its source: importing it takes seconds. None: not installed."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:
        return None
    registry = Path(found.origin).parent / "model_executor/models/registry.py"
    return set(re.findall(r'^\s+"(\w+)": \(', registry.read_text(), flags=re.MULTILINE))


if __name__ == "__main__":
    print("\n".join(table()))  # noqa: T201

"""Small models, and what a loss on some rows gives of them: in one process, and on the ranks of a mesh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.support.trajectories import a_rollout, a_segment, grouped
from trainer.data.packing import MicroBatch, micro_batch
from trainer.data.rows import rows_of
from trainer.model.forward import PackedForward
from trainer.model.logprobs import sampled_terms
from trainer.model.precision import Precision

Arrays = dict[str, npt.NDArray[Any]]

SIZES = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48}
HEADS = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**HEADS, tie_word_embeddings=False)),
    "qwen3, tied": lambda: Qwen3ForCausalLM(Qwen3Config(**HEADS, tie_word_embeddings=True, pad_token_id=0)),
    "qwen3, 4 heads for keys": lambda: Qwen3ForCausalLM(Qwen3Config(**HEADS | {"num_key_value_heads": 4})),
    "llama, biases": lambda: LlamaForCausalLM(LlamaConfig(**HEADS, attention_bias=True, mlp_bias=True)),
    "llama, 12 heads of 6": lambda: LlamaForCausalLM(
        LlamaConfig(**HEADS | {"hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 4})
    ),
    "mistral, a window": lambda: MistralForCausalLM(MistralConfig(**HEADS, sliding_window=6)),
    "gemma2, capped": lambda: Gemma2ForCausalLM(Gemma2Config(**HEADS, sliding_window=6)),
    "qwen3, experts": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**HEADS, **EXPERTS, num_experts=4, norm_topk_prob=True, tie_word_embeddings=False)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**HEADS, num_local_experts=4, num_experts_per_tok=2)),
    "gpt-oss, sinks": lambda: GptOssForCausalLM(
        GptOssConfig(
            **HEADS,
            num_local_experts=2,
            num_experts_per_tok=1,
            sliding_window=6,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            tie_word_embeddings=False,
        )
    ),
}


def a_model(name: str) -> PreTrainedModel:
    """Freshly initialised, the same each time, with weights large enough for tokens to matter to each other."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name]().eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.mul_(4.0)
                else:
                    weight.add_(0.1 * torch.randn(weight.shape))
    return model


def micro_batches() -> list[MicroBatch]:
    """Three passes: siblings and branches, two short rows, two equal ones of which 2 tokens are computed."""
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [7, 7, 8]]
    answers = [[[5, 6, 7, 8], [5, 6, 7, 8, 9], [9], [1, 2, 3, 4, 5, 6]], [[3], [4, 4], [4, 4, 5], [8]]]
    families = [prompts, answers], [[[2, 9]], [[[4, 5], [6]]]], [[[11, 12]], [[[13], [13]]]]
    made = []
    for asked, given in families:
        played = [
            a_rollout(
                [a_segment(prompt, answer, [-0.5] * len(answer), [0] * len(answer))], float(i), group=f"g{g}", member=i
            )
            for g, prompt in enumerate(asked)
            for i, answer in enumerate(given[g])
        ]
        micro = micro_batch(rows_of(grouped(played), 0, 0, skip_idle=False)[0])
        warm = torch.linspace(0.7, 1.3, len(micro.places))
        made.append(replace(micro, temperature=warm))
    return made


def found_by(
    model: PreTrainedModel,
    context: DeviceMesh | None = None,
    *,
    shares: bool = True,
    entropy: bool = True,
    passes: Sequence[int] = (0, 1, 2),
    precision: Precision = "float32",
) -> Arrays:
    """Logprobs of all sampled tokens, and what a loss of them leaves in `model`'s gradients; not yet summed over ranks."""
    policy = PackedForward(model, precision, context)
    if policy.stem_width is not None:
        # So wide that whatever can be shared is.
        policy.stem_width = 1 << 20 if shares else None
    logprobs = []
    micros = micro_batches()
    for micro in (micros[number] for number in passes):
        loss, said = loss_of(policy, micro, entropy=entropy)
        loss.backward()  # type: ignore[no-untyped-call]
        logprobs.append(said.detach())
    return {"logprobs": torch.cat(logprobs).numpy()} | gradients(model)


def loss_of(policy: PackedForward, micro: MicroBatch, *, entropy: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss in which no two tokens have the same part, and the logprobs."""
    said, of_entropy = sampled_terms(policy, micro, entropy=entropy)
    loss = (said * torch.linspace(-1.0, 1.0, len(said))).sum()
    return (loss if of_entropy is None else loss + 0.3 * of_entropy.sum()), said


def gradients(model: torch.nn.Module) -> Arrays:
    """Of each parameter by its name; shards put together."""
    found = {}
    for name, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().numpy().copy()
    return found


def summed(found: Arrays, mesh: DeviceMesh) -> Arrays:
    """Gradients as their sums over the ranks of `mesh`."""
    for name, array in found.items():
        if name != "logprobs":
            tensor = torch.from_numpy(array).clone()
            dist.all_reduce(tensor, group=mesh.get_group())
            found[name] = tensor.numpy()
    return found


def largest_error(found: Arrays, wanted: Arrays) -> float:
    """The largest difference, of each array's own largest entry; of 1 where all are 0."""
    assert set(found) == set(wanted)
    return max(
        float(np.abs(found[name] - array).max() / (np.abs(array).max() or 1.0)) for name, array in wanted.items()
    )

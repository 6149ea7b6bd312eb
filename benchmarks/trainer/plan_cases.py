"""The models and settings whose plans of memory are held against processes (`benchmarks.trainer.planned`) and the formula.

EVERY    six small models under each option, alone and on two ranks        SOME    each of these once
LARGE    known models on GPUs, that only plans are made of
"""

from __future__ import annotations

from typing import Any

import msgspec

from services.wire.errors import UsageError
from trainer.memory.options import Machine


class Case(msgspec.Struct, frozen=True):
    """`configuration`: of config.json, in `transformers`' words; `overrides`: settings; `ranks`: processes, on a CPU."""

    name: str
    configuration: dict[str, Any]
    overrides: list[str] = []
    ranks: int = 1


def sized(
    hidden: int,
    layers: int,
    heads: tuple[int, int, int],
    feed_forward: int,
    vocabulary: int,
    *,
    tied: bool = False,
    kind: str = "qwen3",
    **others: int,
) -> dict[str, Any]:
    """A configuration. `heads`: of queries, of keys, and their dimension."""
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "intermediate_size": feed_forward,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 40_960,
        **others,
    }


QWEN3 = {
    "Qwen3-0.6B": sized(1024, 28, (16, 8, 128), 3072, 151_936, tied=True),
    "Qwen3-1.7B": sized(2048, 28, (16, 8, 128), 6144, 151_936, tied=True),
    "Qwen3-4B": sized(2560, 36, (32, 8, 128), 9728, 151_936, tied=True),
    "Qwen3-8B": sized(4096, 36, (32, 8, 128), 12_288, 151_936),
    "Qwen3-32B": sized(5120, 64, (64, 8, 128), 25_600, 151_936),
    "Qwen3-30B-A3B": sized(
        2048,
        48,
        (32, 4, 128),
        6144,
        151_936,
        kind="qwen3_moe",
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
    ),
    "Llama-3-70B": sized(8192, 80, (64, 8, 128), 28_672, 128_256, kind="llama"),
}
"""Shapes of known models, for plans."""

_SMALL = {
    "deep": sized(256, 12, (8, 4, 32), 768, 4096, tied=True),
    "wide": sized(768, 4, (12, 4, 64), 2304, 8192),
    "vocabulary": sized(256, 4, (8, 8, 32), 768, 65_536, tied=True),
    "llama": sized(512, 6, (8, 8, 64), 1536, 8192, kind="llama"),
    "qwen2": sized(512, 6, (8, 2, 64), 1536, 8192, kind="qwen2", use_sliding_window=False),
    "experts": sized(
        256, 6, (8, 4, 32), 768, 8192, kind="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=256
    ),
}
"""Six that a CPU trains in seconds."""
_OPTIONS = {
    "": ["trainer.micro_batch_tokens=2048"],
    "selective": ["trainer.micro_batch_tokens=2048", "trainer.activation_checkpointing=selective"],
    "full": ["trainer.micro_batch_tokens=2048", "trainer.activation_checkpointing=full"],
    "adapters": ["trainer.micro_batch_tokens=2048", "trainer.lora.rank=16"],
    "8 bits": ["trainer.micro_batch_tokens=2048", "trainer.optimizer.state_bits=8"],
    "critic, reference": [
        "trainer.micro_batch_tokens=1024",
        "trainer.advantage.estimator=gae",
        "trainer.loss.kl=0.1",
        "trainer.activation_checkpointing=full",
    ],
    "bfloat16": ["trainer.micro_batch_tokens=2048", "trainer.dtype=bfloat16"],
    "tensor": ["trainer.micro_batch_tokens=2048", "trainer.parallel.tensor=2"],
    "context": ["trainer.micro_batch_tokens=2048", "trainer.parallel.context=2"],
    "split": ["trainer.micro_batch_tokens=2048", "trainer.parallel.expert=2"],
    "split, tensor": [
        "trainer.micro_batch_tokens=2048",
        "trainer.parallel.tensor=2",
        "trainer.parallel.expert=2",
    ],
}
_ALONE = frozenset({"8 bits"})
_SPLIT = frozenset({"split", "split, tensor"})
_TOGETHER = frozenset({"tensor", "context"}) | _SPLIT
"""Options that one rank alone has, that mixtures of experts have, and that two ranks have."""


def _case(model: str, option: str, ranks: int) -> Case:
    name = f"{model}, {option}".removesuffix(", ") + (f", {ranks} ranks" if ranks > 1 else "")
    return Case(name, _SMALL[model], _OPTIONS[option], ranks)


EVERY = tuple(
    _case(model, option, ranks)
    for ranks, others in ((1, _TOGETHER), (2, _ALONE))
    for model in _SMALL
    for option in _OPTIONS
    if option not in others and (option not in _SPLIT or model == "experts")
)
"""92 of them: half an hour."""
SOME = tuple(
    _case(model, option, ranks)
    for model, option, ranks in (
        ("deep", "selective", 1),
        ("wide", "full", 1),
        ("vocabulary", "", 1),
        ("llama", "adapters", 1),
        ("qwen2", "8 bits", 1),
        ("experts", "critic, reference", 1),
        ("deep", "", 2),
        ("wide", "bfloat16", 2),
        ("vocabulary", "full", 2),
        ("llama", "tensor", 2),
        ("qwen2", "context", 2),
        ("experts", "critic, reference", 2),
        ("experts", "split", 2),
        ("experts", "split, tensor", 2),
    )
)
"""Each model alone and on two ranks, each option once: minutes."""


_GPU_BYTES = 80 << 30


def _large(name: str, ranks: int, *overrides: str, layers: int = 6) -> tuple[Case, Machine]:
    """Of a known model, on so many GPUs; a few of its layers, for the sake of time."""
    configuration = {**QWEN3[name], "num_hidden_layers": layers}
    split = next((f", experts split by {each.rpartition('=')[2]}" for each in overrides if ".expert=" in each), "")
    case = Case(f"{name} on {ranks}{split}", configuration, ["trainer.micro_batch_tokens=4096", *overrides])
    return case, Machine(ranks, _GPU_BYTES)


_FULL, _SELECTIVE = (f"trainer.activation_checkpointing={which}" for which in ("full", "selective"))
LARGE = (
    _large("Qwen3-0.6B", 1),
    _large("Qwen3-1.7B", 1, "trainer.lora.rank=16", _FULL),
    _large("Qwen3-4B", 4, _SELECTIVE),
    _large("Qwen3-8B", 8),
    _large("Qwen3-30B-A3B", 8, _FULL),
    _large("Qwen3-30B-A3B", 8, _FULL, "trainer.parallel.expert=8"),
    _large("Qwen3-30B-A3B", 16, "trainer.parallel.expert=8"),
    _large("Qwen3-32B", 16, _FULL),
    _large("Llama-3-70B", 32, _FULL),
)
"""Nine that only plans are made of."""
SOME_LARGE = (*LARGE[:3], LARGE[5])


def named(words: str) -> tuple[list[Case], list[tuple[Case, Machine]]]:
    """Of EVERY and LARGE, those with `words` in their name. Raises UsageError where there are none."""
    cases, large = [case for case in EVERY if words in case.name], [each for each in LARGE if words in each[0].name]
    if not cases and not large:
        raise UsageError(f"no plan has '{words}' in its name", f"there are {', '.join(case.name for case in EVERY)}")
    return cases, large

"""The trainer's step on a GPU: how much of the card's arithmetic it uses, against float32; a long row of a large model.

    full       all weights of a 1.7B model, 8,192 packed tokens          bfloat16, also with `trainer.compile`, and
                                                                         float32 as before there was any other
    adapters   an 8B model with adapters of rank 16, 8,192 tokens; then one row of 32,768, every layer checkpointed

Floating-point operations are those of `services.policies.training.flops`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.trainer.report import Measured
from benchmarks.trainer.step_speed import HeavyTail, as_groups
from services.config.settings import TrainerSettings
from services.config.training.lora import LoraSettings
from services.policies.training.flops import StepCost, peak_flops
from trainer.data.packing import pack
from trainer.data.rows import rows_of
from trainer.model import packed_attention
from trainer.model.adapters import Adapters
from trainer.model.learner import Learner

FIGURES = ("mfu_full", "mfu_compiled", "mfu_adapters", "vs_float32", "long_row_gb")


@dataclass(frozen=True)
class Shape:
    """Of a model of the Qwen3 type."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int = 151_936
    head_dim: int = 128
    tied: bool = True

    @property
    def weights(self) -> int:
        """That products are made with."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.feed_forward) + self.hidden * self.vocabulary

    def flops(self, tokens: int, row: int, *, frozen: bool) -> float:
        """Of a step of so many tokens in rows of `row`."""
        cost = StepCost(self.weights, self.layers * self.heads * self.head_dim, frozen)
        return cost.flops([(row, 0, tokens // row)])

    def model(self, device: torch.device) -> Qwen3ForCausalLM:
        """With random weights, made on the device."""
        config = Qwen3Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.feed_forward,
            tie_word_embeddings=self.tied,
            max_position_embeddings=40_960,
        )
        with device:
            return Qwen3ForCausalLM(config)


OF_1_7B = Shape(2048, 28, 16, 8, 6144)
OF_8B = Shape(4096, 36, 32, 8, 12_288, tied=False)


def measure_device(rounds: int, say: Callable[[str], None]) -> Measured:
    """`rounds` steps of each arm, after two that are not counted. Without a GPU nothing is measured."""
    if not torch.cuda.is_available():
        return Measured(missing=dict.fromkeys(FIGURES, "not measured: no GPU"))
    device, card = torch.device("cuda"), torch.cuda.get_device_name()
    peak = peak_flops(card)
    half = TrainerSettings(dtype="bfloat16", micro_batch_tokens=8192)
    found: dict[str, list[float]] = {name: [] for name in FIGURES}
    times: dict[str, float] = {}
    for name, shape, settings in (
        ("bfloat16", OF_1_7B, half),
        ("compiled", OF_1_7B, half.model_copy(update={"compile": True})),
        ("float32", OF_1_7B, half.model_copy(update={"dtype": "float32"})),
        (
            "adapters",
            OF_8B,
            half.model_copy(update={"lora": LoraSettings(rank=16), "activation_checkpointing": "full"}),
        ),
    ):
        steps = _steps(shape, settings, device, rounds, rows=4, row=2048)
        times[name] = statistics.median(steps)
        say(f"{name}: {times[name]:.2f} s a step of 8,192 tokens on {card}")
        figure = {"bfloat16": "mfu_full", "compiled": "mfu_compiled", "adapters": "mfu_adapters"}.get(name)
        if figure is not None and peak is not None:
            work = shape.flops(8192, 2048, frozen=name == "adapters")
            found[figure] = [work / seconds / peak for seconds in steps]
    found["vs_float32"] = [times["float32"] / times["bfloat16"]]
    long = half.model_copy(
        update={"lora": LoraSettings(rank=16), "activation_checkpointing": "full", "micro_batch_tokens": 32_768}
    )
    torch.cuda.reset_peak_memory_stats()
    _steps(OF_8B, long, device, 1, rows=1, row=32_768)
    found["long_row_gb"] = [torch.cuda.max_memory_allocated() / 1e9]
    missing = {name: f"not measured: the peak of {card} is not known here" for name, each in found.items() if not each}
    return Measured(rounds={name: each for name, each in found.items() if each}, missing=missing, seen={"card": card})


def _steps(
    shape: Shape, settings: TrainerSettings, device: torch.device, rounds: int, *, rows: int, row: int
) -> list[float]:
    """Seconds of each step on the same batch: `rows` of `row` tokens, nearly all of them sampled, no two alike."""
    model = shape.model(device)
    adapters = Adapters(model, settings.lora, 1) if settings.lora.rank else None
    learner = Learner(model, settings, adapters=adapters)
    tail = HeavyTail(1, max(2, rows), float(row - 1), 0.0, row - 1, vocabulary=shape.vocabulary, prompt=1)
    groups = as_groups(tail.answers(1), tail.group_size)
    found = []
    for number in range(rounds + 2):
        judged, tally = rows_of(groups, learner.version, rounds + 2)
        batch = pack(judged[:rows], tally, settings.micro_batch_tokens, device, learner.stem_width)
        torch.cuda.synchronize()
        began = time.perf_counter()
        learner.step(batch)
        torch.cuda.synchronize()
        if number >= 2:
            found.append(time.perf_counter() - began)
    del model, adapters, learner
    if settings.compile:
        # What follows is not compiled, nor is its attention left out of graphs.
        torch.compiler.reset()
        packed_attention.register()
    torch.cuda.empty_cache()
    return found

"""The trainer's step on a GPU: how much of the card's arithmetic it uses, against float32; a long row of a large model.

    full       all weights of a 1.7B model, 8,192 packed tokens          bfloat16, and float32 as before there was any other
    adapters   an 8B model with adapters of rank 16, 8,192 tokens; then one row of 32,768, every layer checkpointed

Floating-point operations of a step of T tokens in rows of n, with P weights that products are made with (the head, not the
embedding), L layers of H heads of D (Kaplan et al. 2020, arXiv:2001.08361, section 2.1; causal attention halves its part):

    forward 2·P·T + 2·L·H·D·n·T, backward twice that; frozen weights have no gradient: backward 2·P·T + 4·L·H·D·n·T

What checkpointing computes once more is not counted (PaLM, arXiv:2204.02311, appendix B: model FLOPs utilisation).
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
from services.config.lora import LoraSettings
from services.config.settings import TrainerSettings
from trainer.data.packing import pack
from trainer.data.rows import rows_of
from trainer.model.adapters import Adapters
from trainer.model.learner import Learner

FIGURES = ("mfu_full", "mfu_adapters", "vs_float32", "long_row_gb")
_PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "B200": 2250e12, "A100": 312e12, "L40S": 362e12, "RTX 4090": 165e12}
"""Dense bfloat16 with sums in float32, by the makers' data sheets."""


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
        products, attention = 2 * self.weights, 2 * self.layers * self.heads * self.head_dim * row
        return float(tokens) * (2 * products + 3 * attention if frozen else 3 * (products + attention))

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


def peak_flops(card: str) -> float | None:
    """Of a card by its name; None for one that is not known here."""
    return next((peak for name, peak in _PEAK_FLOPS.items() if name in card), None)


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
        figure = {"bfloat16": "mfu_full", "adapters": "mfu_adapters"}.get(name)
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
    torch.cuda.empty_cache()
    return found

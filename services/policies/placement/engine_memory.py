"""Memory of an engine as a sum, in bytes of one of its ranks. Pure.

    weights     bytes of a weight · weights ÷ ranks
    update      what a version is staged in on the device: `SETS` of the weights; of adapters alone their slots, twice
    keys        keys and values of one request of the longest context: with less, vLLM does not start
    step        activations of a step's tokens, and logits of its requests in float32
    runtime     CUDA's context, kernels, captured graphs: 2 GiB

What a GPU has beyond that is more room for keys and values. The sum is the least that an engine starts with; it was set
against no GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.policies.training.memory import Estimate
from services.policies.training.model_shape import ModelShape

RUNTIME = 2 << 30
SETS = {"device": 1.0, "pinned": 0.0, "sparse": 0.1}
"""Sets of weights on the device beside those that are served, by `weights.shadow` (`weight_bus.vllm.sets`)."""


@dataclass(frozen=True)
class EngineOptions:
    """`ranks` that the model is split over; `item_bytes` of a weight, `kv_bytes` of a number in the KV cache.

    `context`: longest, in tokens; `batched`: tokens of a step; `running`: requests of a step; `sets`: of weights that are
    held beside those that are served. `adapter_rank`: of versions that are adapters, served by their own low-rank layers;
    0: they are whole weights, or are merged with them.
    """

    context: int
    ranks: int = 1
    item_bytes: float = 2.0
    kv_bytes: float = 2.0
    batched: int = 8192
    running: int = 256
    sets: float = 1.0
    adapter_rank: int = 0


def engine_estimate(shape: ModelShape, options: EngineOptions) -> Estimate:
    """The least that one rank takes."""
    weights = options.item_bytes * shape.parameters / options.ranks
    # Ranks beyond the number of key heads hold copies.
    heads = max(1.0, shape.kv_heads / options.ranks)
    token = 2 * shape.layers * heads * shape.head_dim * options.kv_bytes
    widest = shape.expert_width * shape.chosen if shape.experts else shape.feed_forward
    step = options.batched * (8.0 * shape.hidden + 4.0 * widest / options.ranks)
    logits = 8.0 * min(options.running, options.batched) * shape.vocabulary
    update = options.sets * weights
    if options.adapter_rank:
        # What is served, and what is staged. Of each A or B that is split a rank has a part; here it counts as whole.
        update = 2 * options.item_bytes * shape.layers * shape.adapters(options.adapter_rank)
    parts = {
        "weights": weights,
        "update": update,
        "keys": token * options.context,
        "step": step + logits,
        "runtime": RUNTIME,
    }
    return Estimate("engine", {part: int(size) for part, size in parts.items()})

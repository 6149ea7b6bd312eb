"""Options under which a step fits the memory that there is, by the formula. Pure.

    as asked ─► selective ─► full checkpointing ─► optimizer offloaded ─► checkpoints offloaded       the first that fits;
       each with 1, 2, 4 or 8 tensor ranks                                                            then longer passes

Each costs more time than the one before it. Tensor ranks come last: they talk within every layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from services.policies.training.layout import Layout
from services.policies.training.memory import Checkpointing, Estimate, MemoryOptions, estimate
from services.policies.training.model_shape import ModelShape

MOST_TOKENS = 32_768
"""Of a pass: longer ones are no faster on known cards."""
_WAYS: tuple[tuple[Checkpointing, bool, bool], ...] = (
    ("none", False, False),
    ("selective", False, False),
    ("full", False, False),
    ("full", False, True),
    ("full", True, True),
)
"""Checkpointing; activation and optimizer offload."""
_TENSOR = (1, 2, 4, 8)


@dataclass(frozen=True)
class Fitted:
    options: MemoryOptions
    estimate: Estimate


def fit(shape: ModelShape, asked: MemoryOptions, device_bytes: float) -> Fitted | None:
    """The first way that fits with the tokens that `asked` names, then with twice as many, and so on; None where none does.

    What `asked` offloads or checkpoints stays so.
    """
    for options in _ways(shape, asked):
        found = estimate(shape, options)
        if found.total > device_bytes:
            continue
        while options.tokens * 2 <= MOST_TOKENS:
            longer = replace(options, tokens=options.tokens * 2)
            its = estimate(shape, longer)
            if its.total > device_bytes:
                break
            options, found = longer, its
        return Fitted(options, found)
    return None


def smallest(shape: ModelShape, asked: MemoryOptions) -> Fitted:
    """The way of the least memory, with the tokens that `asked` names."""
    found = (Fitted(options, estimate(shape, options)) for options in _ways(shape, asked))
    return min(found, key=lambda fitted: fitted.estimate.total)


def _ways(shape: ModelShape, asked: MemoryOptions) -> Iterator[MemoryOptions]:
    rank = [way for way, _, _ in _WAYS].index(asked.checkpointing)
    for layout in _layouts(shape, asked.layout):
        for checkpointing, activations, optimizer in _WAYS[rank:]:
            if optimizer and layout.ranks > 1:
                # Refused by the trainer (`services.config.checks.check_ranks`).
                continue
            yield replace(
                asked,
                layout=layout,
                checkpointing=checkpointing,
                activation_offload=activations or (asked.activation_offload and checkpointing != "none"),
                optimizer_offload=optimizer or asked.optimizer_offload,
            )


def _layouts(shape: ModelShape, asked: Layout) -> Iterator[Layout]:
    """That which was asked for, then with more tensor ranks in place of data ranks; those that split experts are kept."""
    yield asked
    if asked.expert > 1:
        return
    for tensor in _TENSOR:
        if tensor > asked.tensor and asked.data % (tensor // asked.tensor) == 0 and shape.kv_heads % tensor == 0:
            yield replace(asked, tensor=tensor, data=asked.data * asked.tensor // tensor)

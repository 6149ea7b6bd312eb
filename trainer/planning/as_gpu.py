"""What a GPU would do that a CPU does not, for plans that are made on a CPU.

attention     16-bit floats go through one kernel, which keeps no copies        run as fake, on any device
head          chunks of logits are larger                                       counted: `larger_chunks`
offload       state, checkpoints, idle models are in the host's memory          counted: `placed`
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from services.config.settings import RunSettings
from services.policies.training.memory import HEAD_CHUNK, MemoryOptions
from trainer.memory.tracker import Event
from trainer.model import packed_attention
from trainer.parallel.ulysses import ContextSlice
from trainer.planning.timeline import HEAD


def for_cpu(settings: RunSettings, options: MemoryOptions, kept: bool) -> RunSettings:
    """The settings without what needs a GPU, and with the passes' dtype that one would have. `kept`: whether layers stay
    collected there until their backward pass."""
    trainer = settings.trainer.model_copy(
        update={
            "activation_offload": False,
            "offload_idle": False,
            "compile": False,
            "tf32": False,
            "dtype": "bfloat16" if options.half else "float32",
            "optimizer": settings.trainer.optimizer.model_copy(update={"offload": False}),
            "parallel": settings.trainer.parallel.model_copy(update={"reshard_after_forward": not kept}),
        }
    )
    return settings.model_copy(update={"trainer": trainer})


@contextmanager
def attention_of_gpu(wanted: bool) -> Iterator[None]:
    """Packed rows of 16-bit floats are kept as a GPU's kernel keeps them meanwhile: the models of this process alone."""
    if not wanted:
        yield
        return
    AttentionInterface.register(packed_attention.NAME, _attention)
    try:
        yield
    finally:
        packed_attention.register()


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    _: Tensor | None,
    *,
    context_slice: ContextSlice | None = None,
    scaling: float | None = None,
    **__: Any,
) -> tuple[Tensor, None]:
    """As `trainer.model.packed_attention` on a GPU, one row after the other taken for one."""
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if query.dtype not in (torch.float16, torch.bfloat16):
        attended: tuple[Tensor, None] = sdpa_attention_forward(module, query, key, value, None, scaling=scaling)
        return attended
    if context_slice is None:
        found = _Kernel.apply(query, key, value)  # type: ignore[no-untyped-call]
        return found, None
    of_heads = context_slice.to_heads(*(tensor[0].transpose(0, 1) for tensor in (query, key, value)))
    found = _Kernel.apply(*(tensor.transpose(0, 1)[None] for tensor in of_heads))  # type: ignore[no-untyped-call]
    return context_slice.to_tokens(found[0])[None], None


class _Kernel(torch.autograd.Function):
    """What it keeps: queries, keys, values, its output, and a float32 a query."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))
        sums = query.new_empty(query.shape[:3], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(each) for each in ctx.saved_tensors[:3])


def larger_chunks(vocabulary: int, options: MemoryOptions) -> int:
    """Bytes by which a GPU's chunk of logits is larger than a CPU's, as the head holds them at once. Tensor ranks share the
    vocabulary, context ranks the tokens."""
    tokens, width = -(-options.tokens // options.layout.context), vocabulary // options.layout.tensor
    few, many = (min(tokens, max(1, HEAD_CHUNK[gpu] // width)) for gpu in (False, True))
    return width * (many - few) * (10 if options.half else 8)


def placed(
    events: Sequence[Event], known: Mapping[int, str], options: MemoryOptions, stem: int
) -> tuple[list[Event], list[str]]:
    """The events with no bytes of what is not on the device, and what that is in words. `stem`: bytes of a
    layer's input."""
    away: set[int] = set()
    said = []
    if options.optimizer_offload:
        away |= {number for number, part in known.items() if part == "optimizer"}
        said.append("the optimizer's state is in the host's memory between steps")
    if options.offload_idle:
        away |= {number for number, part in known.items() if part == "reference"}
        said.append("the reference is in the host's memory while it is not used")
    if options.activation_offload:
        made = {event.storage for event in events if event.nbytes == stem and event.where.startswith("forward, layer")}
        dead = {event.storage for event in events if event.nbytes < 0 and event.where.startswith(("forward", HEAD))}
        away |= made - dead - known.keys()
        said.append("what checkpointed layers keep is in the host's memory")
    return [Event(each.storage, 0, each.where) if each.storage in away else each for each in events], said

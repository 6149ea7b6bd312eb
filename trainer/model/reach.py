"""How far back a model's attention sees, and the same model seeing little, for a moment.

How a model behaves at the edge of its window shows in rows longer than the window: thousands of tokens. So the window is
made short instead, in the model itself, where a configuration or a module names it: what is tried is the model's own code
with its own weights, on a dozen tokens, without a second model. Whether the model's own results change tells whether it
reads its window there; where they do not, nothing is learnt by trying.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import PreTrainedModel

SHORT = 3
"""Tokens that a window or chunk is given to try with."""

_LIMITS = ("sliding_window", "attention_chunk_size")
"""What `transformers.masking_utils` reads at each call, from the configuration; some modules keep the window, too."""
_TRIED_KINDS = {"full_attention": None, "sliding_attention": _LIMITS[0], "chunked_attention": _LIMITS[1]}
"""Kinds of layers that short rows tell about, and the limit that each obeys."""
_OTHER_LIMITS = (
    "attention_window",
    "compress_rates",
    "index_topk",
    "keep_window_size",
    "sliding_window_size",
    "window_size",
)
"""What other models call a number of tokens beyond which their attention changes, each in a way of its own."""


def untried(model: PreTrainedModel) -> str | None:
    """Why short rows do not tell how the model treats long ones; None where they do."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    if unknown := sorted(kinds - _TRIED_KINDS.keys()):
        return f"layers of kind {', '.join(unknown)}"
    if other := [name for name in _OTHER_LIMITS if getattr(config, name, None) is not None]:
        return f"a limit that is not known here: {', '.join(other)}"
    if varying := sorted(kind for kind in _rope_types(config) if "dynamic" in kind or kind == "longrope"):
        return f"positions of kind {', '.join(varying)}, which depend on the longest row of a pass"
    return None


def limited(model: PreTrainedModel) -> bool:
    """Whether some layer's attention ends at a window or a chunk, by the configuration."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    names = _LIMITS if kinds is None else [_TRIED_KINDS.get(kind) for kind in kinds]
    return any(name is not None and getattr(config, name, None) is not None for name in names)


@contextmanager
def short_reach(model: PreTrainedModel) -> Iterator[None]:
    """Each window and chunk of the model is of `SHORT` tokens meanwhile."""
    holders: dict[int, Any] = {id(model.config.get_text_config()): model.config.get_text_config()}
    for module in model.modules():
        config = getattr(module, "config", None)
        holders |= {id(holder): holder for holder in (module, config) if holder is not None}
    kept = [
        (holder, name, getattr(holder, name))
        for holder in holders.values()
        for name in _LIMITS
        if isinstance(getattr(holder, name, None), int)
    ]
    try:
        for holder, name, _ in kept:
            setattr(holder, name, SHORT)
        yield
    finally:
        for holder, name, limit in kept:
            setattr(holder, name, limit)


def _rope_types(config: Any) -> set[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    each = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {str(one["rope_type"]) for one in each if "rope_type" in one}

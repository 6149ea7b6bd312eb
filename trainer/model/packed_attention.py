"""Attention within each row of a packed one: no token sees another row.

    on a GPU, 16-bit floats      one kernel over all rows (`torch.nn.attention.varlen`)
    else                         one causal `scaled_dot_product_attention` a run of rows of one length: what each row gives
                                 alone, and no work is done for pairs of rows
    with sinks (gpt-oss)         the same row by row, its scores written out: the kernels know no sinks

Rows that share a stem (`trainer.data.sharing`) see its keys, computed once, before their own. Where several ranks hold the
row's tokens (`trainer.parallel.ulysses`), each attends for some heads.

It stands in the place that `transformers` keeps for attention functions. What is not packed gets that library's own
attention and masks, so the model answers ordinary calls as before. Models whose attention cannot be replaced see the block
mask that `transformers` makes from restarting positions: exact too, at T² pairs (measured: docs/benchmarks.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from trainer.data.packing import PackedRow
from trainer.parallel.ulysses import ContextSlice

NAME = "rollmesh_packed"
_UNKNOWN = ("softcap", "position_bias")
"""What some models add to attention, and this function does not do."""
_LARGEST_VARLEN_HEAD = 256


def register(*, compiled: bool = False) -> None:
    """Make the name known to `transformers`; again is harmless. `compiled`: layers are, and this is no part of it."""
    AttentionInterface.register(NAME, torch.compiler.disable(_attention) if compiled else _attention)  # type: ignore[no-untyped-call]
    AttentionMaskInterface.register(NAME, sdpa_mask)


def keywords(row: PackedRow, context_slice: ContextSlice | None = None) -> dict[str, Any]:
    """What a model whose attention is this one is called with beside tokens and positions.

    `context_slice`: where these are only some of the row's.

    The mask is a blank: with one of four axes `transformers` does not make the T² one.
    """
    blank = torch.zeros((1, 1, 1, 1), dtype=torch.bool, device=row.input_ids.device)
    return {"attention_mask": blank, "packed_row": row, "context_slice": context_slice}


def _attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_row: PackedRow | None = None,
    context_slice: ContextSlice | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """`query` `[1, H, T, D]`, `key`, `value` `[1, H_kv, T, D]`; returns `[1, T, H, D]`. `s_aux` `[H]`: the heads' sinks.
    With a `context_slice` all of that rank's `t` tokens instead of `T`.

    Raises NotImplementedError for attention that this function does not compute.
    """
    if packed_row is None:
        if attention_mask is not None and attention_mask.shape[-1] != key.shape[2]:
            raise NotImplementedError("the model does not pass on what packed rows need")
        if s_aux is not None:
            return _with_sinks(query, key, value, attention_mask, s_aux, dropout, scaling), None
        attended: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
        )
        return attended
    unknown = [name for name in _UNKNOWN if others.get(name) is not None]
    if unknown or not getattr(module, "is_causal", True) or others.get("is_causal") is False:
        raise NotImplementedError(
            f"attention with {', '.join(unknown) or 'both directions'} is not done in packed rows"
        )
    # Norms of queries and keys leave float32 behind, in a pass of 16 bits too.
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    # Tokens first: [T, H, D].
    queries, keys, values = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    if context_slice is None:
        return _of_rows(queries, keys, values, packed_row, scaling, sliding_window, dropout, s_aux)[None], None
    queries, keys, values = context_slice.to_heads(queries, keys, values)
    sinks = None if s_aux is None else context_slice.own_heads(s_aux)
    of_heads = _of_rows(queries, keys, values, packed_row, scaling, sliding_window, dropout, sinks)
    return context_slice.to_tokens(of_heads)[None], None


@dataclass(frozen=True)
class _Heads:
    """What `transformers`' function asks of an attention module. A context rank's heads are not grouped as the module's."""

    num_key_value_groups: int
    is_causal: bool = True


def _of_rows(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    packed_row: PackedRow,
    scaling: float | None,
    sliding_window: int | None,
    dropout: float,
    s_aux: Tensor | None,
) -> Tensor:
    """`[T, H, D]` of `[T, H, D]`, `[T, H_kv, D]`: each row of `packed_row` for itself."""
    shared = packed_row.shared
    if shared is not None:
        both = torch.cat([keys, values], dim=-1).index_select(0, shared.seen)
        keys, values = both.split_with_sizes([keys.shape[-1], values.shape[-1]], dim=-1)
    fits_varlen = s_aux is None and queries.shape[-1] == values.shape[-1] <= _LARGEST_VARLEN_HEAD
    if fits_varlen and queries.is_cuda and queries.dtype in (torch.float16, torch.bfloat16):
        return _in_one_kernel(queries, keys, values, packed_row, scaling, sliding_window)
    heads = _Heads(queries.shape[1] // keys.shape[1])
    if queries.is_cuda and queries.dtype == torch.float32 and s_aux is None:
        # No kernel of a GPU shares heads of keys in float32: torch would write out all scores, 34 times the memory.
        keys, values = (tensor.repeat_interleave(heads.num_key_value_groups, dim=1) for tensor in (keys, values))
        heads = _Heads(1)
    before = (0,) * len(packed_row.runs) if shared is None else shared.before
    own = [length * count for length, count in packed_row.runs]
    seen = [(length + stem) * count for (length, count), stem in zip(packed_row.runs, before, strict=True)]
    # Splits, not slices: the gradient of a slice is as large as the whole, for each run anew.
    split = (tensor.split_with_sizes(sizes) for tensor, sizes in ((queries, own), (keys, seen), (values, seen)))
    pieces = []
    for (length, count), stem, *part in zip(packed_row.runs, before, *split, strict=True):
        rows = [tensor.view(count, -1, *tensor.shape[1:]).transpose(1, 2) for tensor in part]
        mask = _mask(length, stem, sliding_window, queries.device)
        if s_aux is not None:
            output = _with_sinks(rows[0], rows[1], rows[2], mask, s_aux, dropout, scaling)
        else:
            output, _ = sdpa_attention_forward(heads, *rows, mask, dropout=dropout, scaling=scaling)
        pieces.append(output.flatten(0, 1))
    return torch.cat(pieces)


def _mask(length: int, stem: int, sliding_window: int | None, device: torch.device) -> Tensor | None:
    """Bool `[1, 1, length, stem + length]`, which tokens each of a row sees that goes on from a stem.

    None where the kernel does the same without it: for a whole row that no sliding window cuts, for one token.
    """
    whole = stem + length
    if (stem == 0 or length == 1) and (sliding_window is None or whole <= sliding_window):
        return None
    places = torch.arange(whole, device=device)
    behind = places[stem:, None] - places[None]
    return ((behind >= 0) & (behind < (sliding_window or whole)))[None, None]


def _with_sinks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, sinks: Tensor, dropout: float, scaling: float | None
) -> Tensor:
    """Attention in which part of the weight goes to nothing (gpt-oss, arXiv:2508.10925): `[B, L, H, D]`.

        p = softmax([q·k₁ …, q·k_S, sink_h])          its last entry is left out

    `query` `[B, H, L, D]`, `key`, `value` `[B, H_kv, S, D]`, `sinks` `[H]`; `mask`: bool, or added to the scores,
    broadcast to `[B, H, L, S]`; None: causal, the last query sees the last key.
    """
    groups, length, seen = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    scores = query @ repeat_kv(key, groups).transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if mask is None:
        mask = torch.ones((length, seen), dtype=torch.bool, device=query.device).tril(seen - length)
    scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min) if mask.dtype == torch.bool else scores + mask
    sink = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(scores.shape[0], -1, length, 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(-1, dtype=torch.float32)[..., :-1].to(value.dtype)
    attended: Tensor = torch.nn.functional.dropout(weights, dropout) @ repeat_kv(value, groups)
    return attended.transpose(1, 2)


def _in_one_kernel(
    queries: Tensor, keys: Tensor, values: Tensor, row: PackedRow, scaling: float | None, sliding_window: int | None
) -> Tensor:
    """All `[tokens, H, D]`. A row's last query sees its last key: what stands before its own tokens comes first."""
    shared = row.shared
    output = varlen_attn(
        queries,
        keys,
        values,
        row.starts,
        row.starts if shared is None else shared.starts,
        row.longest,
        row.longest if shared is None else shared.longest,
        scale=scaling,
        # The kernel counts the tokens before this one.
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=queries.shape[1] != keys.shape[1],
    )
    assert isinstance(output, Tensor)
    return output

"""Forward pass of a transformers model over `KvCache`: token ids in, next-token logits out.

    ids, starts, columns ─► positions, mask ─► model (writes its keys and values into the window) ─► logits

The model's own code runs, traced once (`record`). At start the engine checks that decoding with our cache, masks and
positions gives the plain model's logits, and that the trace gives the same: a model that cannot be traced runs untraced,
one that would not decode exactly is refused.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import structlog
import torch
from torch.jit._trace import TracerWarning
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from rollout_server.engines.torch.kv_cache import KvCache, KvShape, KvWindow
from services.wire.errors import UsageError

_log = structlog.get_logger()

Step = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class PolicyForward:
    """Call it with ids `[rows, q]` and the window that they extend: float32 logits `[rows, vocabulary]` of the last one.

    Raises UsageError, when made, for an architecture whose cache is not plain keys and values.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.shape = _kv_shape(model)
        self.recorded = False
        self._step: Step = _choose_masks(model, self.shape)
        self._must_match(self._plain_logits, "the plain model")
        self._record()

    def __call__(self, ids: torch.Tensor, window: KvWindow) -> torch.Tensor:
        return self._step(ids, window.starts, window.columns, window.keys, window.values)

    def _plain_logits(self, sequence: list[int]) -> torch.Tensor:
        ids = torch.tensor([sequence], device=self._model.device)
        logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits[0, -1]
        return logits.float()

    def _must_match(self, reference: Callable[[list[int]], torch.Tensor], what: str) -> None:
        for sequences, ours in _rehearse(self, self._model, self.shape):
            theirs = torch.stack([reference(sequence) for sequence in sequences])
            if not _close(ours, theirs, self._model.dtype):
                raise UsageError(
                    f"a {self._model.config.model_type} model decoded with a cache does not match {what} "
                    f"(off by {float((ours - theirs).abs().max()):.1e})",
                    "use the vllm engine for this architecture",
                )

    def _record(self) -> None:
        plain = self._step
        # An embedding with a padding index looks at a value when it is called. The index matters to gradients alone.
        embedding = self._model.get_input_embeddings()
        if isinstance(embedding, torch.nn.Embedding):
            embedding.padding_idx = None
        expected = [logits for _, logits in _rehearse(self, self._model, self.shape)]
        window = _slots(self.shape, self._model).scratch([3, 2, 3])
        ids = torch.zeros(3, 2, dtype=torch.int64, device=self._model.device)
        example = (ids, window.starts, window.columns, window.keys, window.values)
        try:
            self._step = record(_Recordable(plain, self._model), example)
            found = [logits for _, logits in _rehearse(self, self._model, self.shape)]
            self.recorded = all(_close(a, b, self._model.dtype) for a, b in zip(expected, found, strict=True))
            why = "the recording gives other logits"
        except (RecordingError, RuntimeError) as error:
            why = str(error).strip().partition("\n")[0]
        if not self.recorded:
            self._step = plain
            _log.warning("decode_step_not_recorded", model_type=self._model.config.model_type, why=why)


class _WindowLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of the window, as the model's attention sees it."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = keys, values
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Memory is there from the start."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        del args, kwargs
        last = slice(-key_states.shape[2], None)
        self.keys[:, :, last].copy_(key_states)
        self.values[:, :, last].copy_(value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        del query_length
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1


class _Stepper:
    """The step in plain Python. `mask_kinds`: None hands one mask to all layers, else one by each layer type's name."""

    def __init__(self, model: PreTrainedModel, mask_kinds: dict[str, int | None] | None, window: int | None) -> None:
        self._model = model
        self._mask_kinds = mask_kinds
        self._window = window

    def __call__(
        self,
        ids: torch.Tensor,
        starts: torch.Tensor,
        columns: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        queries = columns[-ids.shape[1] :]
        positions = (queries.unsqueeze(0) - starts.unsqueeze(1)).clamp_min(0)
        mask: Any
        if self._mask_kinds is None:
            mask = self._mask(starts, columns, queries, self._window)
        else:
            mask = {kind: self._mask(starts, columns, queries, size) for kind, size in self._mask_kinds.items()}
        cache = Cache(layers=[_WindowLayer(keys[layer], values[layer]) for layer in range(keys.shape[0])])
        output = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits.float()

    def _mask(
        self, starts: torch.Tensor, columns: torch.Tensor, queries: torch.Tensor, window: int | None
    ) -> torch.Tensor:
        """Additive `[rows, 1, q, columns]`: 0 for own tokens up to the query, the dtype's lowest number elsewhere.

        Not −inf: a padded query sees nothing at all, and its softmax must stay finite.
        """
        visible = (columns >= starts.unsqueeze(1)).unsqueeze(1) & (columns <= queries.unsqueeze(1)).unsqueeze(0)
        if window is not None:
            visible = visible & (columns > queries.unsqueeze(1) - window).unsqueeze(0)
        mask = torch.zeros(visible.shape, dtype=self._model.dtype, device=columns.device)
        return mask.masked_fill(~visible, torch.finfo(self._model.dtype).min).unsqueeze(1)


class _Recordable(torch.nn.Module):
    """The parameters must belong to the traced module, so that a flip of their storage reaches the trace."""

    def __init__(self, step: Step, model: PreTrainedModel) -> None:
        super().__init__()
        self._step = step
        self.model = model

    def forward(
        self,
        ids: torch.Tensor,
        starts: torch.Tensor,
        columns: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        return self._step(ids, starts, columns, keys, values)


def _choose_masks(model: PreTrainedModel, shape: KvShape) -> Step:
    """Newer models take a ready mask for each kind of layer in a dict, older ones a single ready mask."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    sliding = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if unknown := kinds - {"full_attention", "sliding_attention"}:
        raise UsageError(
            f"a {config.model_type} model has layers of kind {', '.join(sorted(unknown))}, which keep no plain KV cache",
            "use the vllm engine for this architecture",
        )
    if not kinds:
        return _Stepper(model, None, sliding)
    by_kind = _Stepper(model, {kind: sliding if kind == "sliding_attention" else None for kind in kinds}, None)
    try:
        window = _slots(shape, model).scratch([1])
        ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
        by_kind(ids, window.starts, window.columns, window.keys, window.values)
    except (AttributeError, TypeError):
        # It wants a tensor. Layers of one kind can share it.
        if len(kinds) > 1:
            raise UsageError(
                f"a {config.model_type} model takes no ready mask for each kind of layer",
                "use the vllm engine for this architecture",
            ) from None
        return _Stepper(model, None, sliding if kinds == {"sliding_attention"} else None)
    return by_kind


@torch.no_grad()
def _kv_shape(model: PreTrainedModel) -> KvShape:
    cache = DynamicCache()
    ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    model(input_ids=ids, past_key_values=cache, use_cache=True)
    shapes = {
        (layer.keys.shape[1], layer.keys.shape[3], layer.values.shape[3])
        for layer in cache.layers
        if isinstance(getattr(layer, "keys", None), torch.Tensor) and layer.keys.ndim == 4
    }
    if len(shapes) != 1:
        raise UsageError(
            f"a {model.config.model_type} model does not cache keys and values of one shape in every layer",
            "use the vllm engine for this architecture",
        )
    heads, key_dim, value_dim = shapes.pop()
    return KvShape(layers=len(cache.layers), heads=heads, key_dim=key_dim, value_dim=value_dim)


def _slots(shape: KvShape, model: PreTrainedModel) -> KvCache:
    return KvCache(shape, max_rows=4, dtype=model.dtype, device=model.device)


def _rehearse(
    forward: Callable[[torch.Tensor, KvWindow], torch.Tensor], model: PreTrainedModel, shape: KvShape
) -> list[tuple[list[list[int]], torch.Tensor]]:
    """Sequences and their logits, for a prefill of unequal prompts and for some decode steps after it."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    token = itertools.count(7, 3)
    sequences = [[next(token) % vocabulary for _ in range(length)] for length in (9, 4, 6)]
    lengths = [len(sequence) for sequence in sequences]
    padded = [[0] * (max(lengths) - len(sequence)) + sequence for sequence in sequences]
    slots = _slots(shape, model)
    prompts = slots.scratch(lengths)
    seen = [([*sequences], forward(torch.tensor(padded, device=model.device), prompts))]
    slots.place(prompts, lengths, [1, 1, 1])
    for step in range(4):
        if step == 3:
            # The last row takes the place of one that has finished.
            slots.remove([0])
            sequences = [sequences[2], sequences[1]]
        sequences = [[*sequence, next(token) % vocabulary] for sequence in sequences]
        ids = torch.tensor([[sequence[-1]] for sequence in sequences], device=model.device)
        seen.append(([*sequences], forward(ids, slots.window())))
        slots.tick()
    return seen


def _close(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> bool:
    tolerance = _TOLERANCE.get(dtype, 1e-4) * (1.0 + float(theirs.abs().max()))
    return bool(((ours - theirs).abs() <= tolerance).all())


Recorded = Callable[..., torch.Tensor]


class RecordingError(Exception):
    """The code cannot be traced: it branches on values, or does what torch.jit does not support."""


def record(code: Callable[..., torch.Tensor], example: tuple[torch.Tensor, ...]) -> Recorded:
    """`torch.jit.trace` of a function or module: one call from Python instead of hundreds.

    On a small model more than half of a decode step is Python (batch 1: 1.6 ms → 0.55 traced, batch 128: 3.3 → 1.8). And
    each long torch call gives up the interpreter lock: beside a busy event loop a step of hundreds of calls took 38 ms,
    one of a dozen 6 ms. Sizes that `code` takes from its arguments' shapes stay free; the caller checks the trace against
    `code` on other shapes and values. Raises RecordingError if it cannot be made.
    """
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        try:
            recorded = torch.jit.trace(  # type: ignore[no-untyped-call]
                code, example, check_trace=False
            )
        except (RuntimeError, TypeError, ValueError) as error:
            raise RecordingError(str(error).strip().partition("\n")[0]) from error
    if where := _frozen_value(caught):
        raise RecordingError(f"{where} depends on a value")
    return cast(Recorded, recorded)


def _frozen_value(caught: list[warnings.WarningMessage]) -> str:
    """Where Python branched on a tensor's value, which the trace would freeze."""
    for warning in caught:
        file = Path(warning.filename).name
        # There only the number of queries is looked at, and only for a forward without a mask.
        if issubclass(warning.category, TracerWarning) and file != "sdpa_attention.py":
            return f"{file}:{warning.lineno}"
    return ""

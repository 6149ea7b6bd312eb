"""Forward pass of a `Decoder` over `KvCache`: token ids in, next-token logits out.

    ids, starts, columns ─► Decoder (writes its keys and values into the window) ─► logits

The decoder's own code runs, traced once (`record`). At start the engine checks that decoding with our cache, masks and
positions gives the plain model's logits, and that the trace gives the same: a model that cannot be traced runs untraced,
one that would not decode exactly is refused.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import structlog
import torch
from torch.jit._trace import TracerWarning

from rollout_server.engines.torch.decoder import Decoder
from rollout_server.engines.torch.kv_cache import KvCache, KvWindow
from services.wire.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_log = structlog.get_logger()

Step = Callable[..., torch.Tensor]
"""Of ids and the parts of a window."""
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class PolicyForward:
    """Call it with ids `[rows, q]` and the window that they extend: float32 logits `[rows, outputs]` of the last one.

    Raises UsageError, when made, for an architecture whose cache is not plain keys and values.
    """

    @torch.no_grad()
    def __init__(self, model: Decoder | PreTrainedModel) -> None:
        self._decoder = decoder = model if isinstance(model, Decoder) else _of_transformers(model)
        self.shape, self.outputs = decoder.shape, decoder.outputs
        self.recorded = False
        self._step: Step = decoder
        self._step_of_one: Step = decoder.of_one if decoder.single else decoder
        self._every: Step = decoder.logits_of_all
        rehearsed = _rehearse(self, decoder)
        self._must_match_plain(rehearsed)
        self._record([logits for _, logits in rehearsed])

    def __call__(self, ids: torch.Tensor, window: KvWindow) -> torch.Tensor:
        step = self._step_of_one if ids.shape[1] == 1 else self._step
        return step(ids, window.starts, window.columns, *window.memories)

    def logits_of_all(self, ids: torch.Tensor, window: KvWindow) -> torch.Tensor:
        """As a call, but float32 `[rows, q, outputs]`: of every one of `ids`. Not recorded: prompts are long."""
        return self._every(ids, window.starts, window.columns, *window.memories)

    def _must_match_plain(self, rehearsed: Rehearsed) -> None:
        decoder = self._decoder
        for sequences, ours in rehearsed:
            theirs = torch.cat([decoder.plain(torch.tensor([each], device=decoder.device)) for each in sequences])
            if not _close(ours, theirs, decoder.dtype):
                raise UsageError(
                    f"a {decoder.kind} model decoded with a cache does not match the plain model "
                    f"(off by {float((ours - theirs).abs().max()):.1e})",
                    "use the vllm engine for this architecture",
                )

    def _record(self, expected: list[torch.Tensor]) -> None:
        decoder = self._decoder
        window = _slots(decoder).scratch([3, 2, 3])
        ids = torch.zeros(3, 2, dtype=torch.int64, device=decoder.device)
        parts, plain = (window.starts, window.columns, *window.memories), (self._step, self._step_of_one)
        try:
            # The parameters belong to the traced module, so that a flip of their storage reaches the trace.
            self._step = self._step_of_one = record(decoder, (ids, *parts))
            if decoder.single:
                self._step_of_one = record(_OfOne(decoder), (ids[:, :1], *parts))
            found = [logits for _, logits in _rehearse(self, decoder)]
            self.recorded = all(_close(a, b, decoder.dtype) for a, b in zip(expected, found, strict=True))
            why = "the recording gives other logits"
        except (RecordingError, RuntimeError) as error:
            why = str(error).strip().partition("\n")[0]
        if not self.recorded:
            self._step, self._step_of_one = plain
            _log.warning("decode_step_not_recorded", model_type=decoder.kind, why=why)


class _OfOne(torch.nn.Module):
    """`Decoder.of_one` as the forward of a module: so it is traced with its parameters."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self,
        ids: torch.Tensor,
        starts: torch.Tensor,
        columns: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        return self.decoder.of_one(ids, starts, columns, keys, values)


def _of_transformers(model: PreTrainedModel) -> Decoder:
    # Here, so that a process without such a model does not import transformers.
    from rollout_server.engines.torch.transformers_decoder import TransformersDecoder

    return TransformersDecoder(model)


def _slots(decoder: Decoder) -> KvCache:
    return KvCache(decoder.shape, max_rows=4, dtype=decoder.dtype, device=decoder.device)


Rehearsed = list[tuple[list[list[int]], torch.Tensor]]
"""Sequences and the logits after them."""


def _rehearse(forward: Callable[[torch.Tensor, KvWindow], torch.Tensor], decoder: Decoder) -> Rehearsed:
    """A prefill of unequal prompts, and some decode steps after it."""
    token = itertools.count(7, 3)
    sequences = [[next(token) % decoder.vocabulary for _ in range(length)] for length in (9, 4, 6)]
    lengths = [len(sequence) for sequence in sequences]
    padded = [[0] * (max(lengths) - len(sequence)) + sequence for sequence in sequences]
    slots = _slots(decoder)
    prompts = slots.scratch(lengths)
    seen = [([*sequences], forward(torch.tensor(padded, device=decoder.device), prompts))]
    slots.place(prompts, lengths, [1, 1, 1])
    for step in range(4):
        if step == 3:
            # The last row takes the place of one that has finished.
            slots.remove([0])
            sequences = [sequences[2], sequences[1]]
        sequences = [[*sequence, next(token) % decoder.vocabulary] for sequence in sequences]
        ids = torch.tensor([[sequence[-1]] for sequence in sequences], device=decoder.device)
        seen.append(([*sequences], forward(ids, slots.window())))
        slots.tick()
    return seen


def _close(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> bool:
    tolerance = _TOLERANCE.get(dtype, 1e-4) * (1.0 + float(theirs.abs().max()))
    return bool(((ours - theirs).abs() <= tolerance).all())


Recorded = Callable[..., Any]
"""Returns what the code that was recorded returns."""


class RecordingError(Exception):
    """The code cannot be traced: it branches on values, or does what torch.jit does not support."""


def record(code: Callable[..., Any], example: tuple[torch.Tensor, ...]) -> Recorded:
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

"""Token sampling for a batch, each row by its own parameters: temperature, min-p, top-k, top-p, seed, penalties.

    logits ─► ÷ temperature ─► min-p, top-k, top-p ─► cumulative distribution ─► first entry above a uniform number

Each token takes one uniform number (inverse-transform sampling, in float64, over the vocabulary in its own order), so a
seeded request's samples do not depend on the other rows of its batch. The sort for min-p, top-k and top-p is done only
while a row asks for it.

Logprobs are those of the distribution really sampled from, float32 from a float32 log-softmax; for greedy rows those of the
plain softmax of the logits that come in (penalties and bounds have changed them where a row asked for it).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from rollout_server.engines.torch.forward import record
from rollout_server.engines.torch.kv_cache import on_device
from services.wire.sampling import SamplingParams


class UniformSource(Protocol):
    """Where a seeded sample's uniform numbers come from (`numpy.random.Generator`)."""

    def random(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Sampled:
    """One token and its logprob a row. `likeliest`: for each row the (id, logprob) asked for, best first. `kept`: for each
    row the ids that it was sampled from, uint32 packed little-endian, where they were asked for; empty for the others."""

    tokens: list[int]
    logprobs: list[float]
    likeliest: list[list[tuple[int, float]]] | None = None
    kept: list[bytes] | None = None


class RowParameters:
    """The parameters of the rows of one batch, as tensors. Made anew when rows come or go.

    `likeliest`: how many alternatives each row wants told; none for any row, if left out. `kept`: which rows want told
    what they are sampled from.
    """

    def __init__(
        self,
        rows: Sequence[SamplingParams],
        vocabulary: int,
        device: torch.device,
        likeliest: Sequence[int] = (),
        kept: Sequence[bool] = (),
    ) -> None:
        self.likeliest = [min(count, vocabulary) for count in likeliest] if any(likeliest) else []
        self.kept = [
            row for row, wanted in enumerate(kept) if wanted and rows[row].cuts and rows[row].temperature > 0.0
        ]
        greedy = [row.temperature == 0.0 for row in rows]
        free = [no_sampling or not row.cuts for row, no_sampling in zip(rows, greedy, strict=True)]
        self.all_greedy = all(greedy) and not self.likeliest
        self.plain = all(free) and not any(greedy) and not self.likeliest
        self.temperature = _column([row.temperature or 1.0 for row in rows], np.float32, device)
        if self.plain or self.all_greedy:
            return
        pairs = list(zip(rows, free, strict=True))
        self.greedy = _column(greedy, np.bool_, device)
        self.floor = _column(
            [-math.inf if whole or row.min_p <= 0.0 else math.log(row.min_p) for row, whole in pairs],
            np.float32,
            device,
        )
        self.top_k = _column(
            [vocabulary if whole or row.top_k < 1 else min(row.top_k, vocabulary) for row, whole in pairs],
            np.int64,
            device,
        )
        # Above 1, so that rounding in the cumulative sum cannot cut the tail of a row that wants all of it.
        self.top_p = _column(
            [2.0 if whole or row.top_p >= 1.0 else row.top_p for row, whole in pairs], np.float64, device
        )


class Sampler:
    """Samples for the rows of a batch; unseeded rows share the engine's generator, seeded by `seed`."""

    def __init__(self, seed: int, vocabulary: int, device: torch.device) -> None:
        self._generator = np.random.Generator(np.random.PCG64(seed))
        self._device = device
        logits = torch.zeros(3, vocabulary, device=device)
        uniforms = torch.full((3, 1), 0.5, dtype=torch.float64, device=device)
        ones = torch.ones(3, 1, device=device)
        self._greedy = record(sample_greedy, (logits,))
        self._plain = record(sample_plain, (logits, uniforms, ones))
        self._restricted = record(
            sample_restricted, (logits, uniforms, ones, ones.bool(), -ones, ones.long(), ones.double())
        )

    def sample(self, logits: torch.Tensor, rows: RowParameters, seeded: Sequence[tuple[int, UniformSource]]) -> Sampled:
        """Tokens and logprobs from float32 logits `[rows, vocabulary]`. `seeded`: (row, its source)."""
        likeliest = kept = None
        if rows.all_greedy:
            sampled = self._greedy(logits)
        else:
            uniforms = self._generator.random(logits.shape[0])
            for row, source in seeded:
                uniforms[row] = source.random()
            column = on_device(uniforms[:, None], self._device)
            if rows.plain:
                sampled = self._plain(logits, column, rows.temperature)
            else:
                sampled, restricted = self._restricted(
                    logits, column, rows.temperature, rows.greedy, rows.floor, rows.top_k, rows.top_p
                )
                likeliest = _likeliest(restricted, rows) if rows.likeliest else None
                kept = _kept(restricted, rows.kept) if rows.kept else None
        both: npt.NDArray[np.float64] = (sampled if sampled.device.type == "cpu" else sampled.cpu()).numpy()
        return Sampled(both[0].astype(np.int64).tolist(), both[1].tolist(), likeliest, kept)


def seeded_source(seed: int, index: int, sampled: int = 0) -> UniformSource:
    """The uniform numbers of sample `index` of a request with this seed, after the first `sampled` of them."""
    source = np.random.Generator(np.random.Philox(key=np.array([seed % (1 << 64), index], dtype=np.uint64)))
    source.random(sampled)
    return source


def sample_greedy(logits: torch.Tensor) -> torch.Tensor:
    """float64 `[2, rows]`: token ids (exact up to 2^53) and logprobs."""
    tokens = logits.argmax(dim=-1, keepdim=True)
    return _pair(tokens, logits.log_softmax(dim=-1).gather(1, tokens))


def sample_plain(logits: torch.Tensor, uniforms: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """As `sample_greedy`, from the whole distribution. `uniforms`: float64 `[rows, 1]` in [0, 1); `temperature` > 0."""
    logprobs = (logits / temperature).log_softmax(dim=-1)
    tokens = _invert(logprobs, uniforms)
    return _pair(tokens, logprobs.gather(1, tokens))


def sample_restricted(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    temperature: torch.Tensor,
    greedy: torch.Tensor,
    floor: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `sample_plain`, from what `restricted_logprobs` leaves; and that. `greedy`: bool `[rows, 1]`: the likeliest."""
    logprobs = restricted_logprobs(logits, temperature, floor, top_k, top_p)
    tokens = torch.where(greedy, logits.argmax(dim=-1, keepdim=True), _invert(logprobs, uniforms))
    return _pair(tokens, logprobs.gather(1, tokens)), logprobs


def restricted_logprobs(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    floor: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """Logprobs `[rows, vocabulary]` of the tokens less than −`floor` (a log) under the likeliest, of these the `top_k`
    likeliest, of these the fewest that hold `top_p` of their probability; −inf for the others. Parameters are `[rows, 1]`.

    A row that cuts nothing comes out as `sample_plain` has it, to the bit: a neighbour's cuts must not shift its samples.
    """
    scaled = logits / temperature
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    # Tokens as likely as the last one of the k stay with it, as in vLLM.
    cut = (ordered - ordered[:, :1] < floor) | (ordered < ordered.gather(1, top_k - 1))
    share = ordered.masked_fill(cut, float("-inf")).softmax(dim=-1, dtype=torch.float64)
    # A token stays while the likelier ones do not yet hold top_p, so the likeliest always stays.
    cut = cut | (share.cumsum(dim=-1) - share >= top_p)
    return scaled.masked_fill(torch.zeros_like(cut).scatter(1, order, cut), float("-inf")).log_softmax(dim=-1)


def _kept(logprobs: torch.Tensor, wanted: Sequence[int]) -> list[bytes]:
    """Of each row the ids that `restricted_logprobs` left a chance; nothing of rows that are not wanted."""
    kept = [b""] * len(logprobs)
    left: npt.NDArray[np.bool_] = logprobs[list(wanted)].isfinite().cpu().numpy()
    for row, chances in zip(wanted, left, strict=True):
        kept[row] = np.flatnonzero(chances).astype("<u4").tobytes()
    return kept


def _likeliest(logprobs: torch.Tensor, rows: RowParameters) -> list[list[tuple[int, float]]]:
    """What each row wants told of the distribution it samples from; tokens without a chance are left out."""
    values, ids = logprobs.topk(max(rows.likeliest), dim=-1)
    told = []
    for count, row_ids, row_values in zip(rows.likeliest, ids.tolist(), values.tolist(), strict=True):
        pairs = zip(row_ids[:count], row_values[:count], strict=True)
        told.append([(token, logprob) for token, logprob in pairs if math.isfinite(logprob)])
    return told


def _invert(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first place where the cumulative probability exceeds the uniform number: never one of probability 0."""
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    places = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    # Not `clamp_max`: a recorded size is a tensor of the host's memory, which it does not take for places on a GPU.
    return places.minimum(torch.full_like(places, logprobs.shape[-1] - 1))


def _pair(tokens: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    return torch.cat((tokens.double(), logprobs.double()), dim=1).t()


def _column(values: Sequence[float], dtype: npt.DTypeLike, device: torch.device) -> torch.Tensor:
    return on_device(np.array(values, dtype=dtype)[:, None], device)


@dataclass(frozen=True)
class ShapedRow:
    """A row of the batch whose parameters shift its logits. `sampled`: its tokens so far; `stops`: what may end it."""

    row: int
    sampling: SamplingParams
    prompt: Sequence[int]
    sampled: Sequence[int]
    stops: Collection[int]


class LogitShaping:
    """Logits processors by the tokens so far: `min_tokens`, then the penalties, in vLLM's order.

        logits ─► stop tokens to −inf until min_tokens ─► repetition ─► frequency, presence ─► the sampler

    Made for one composition of the batch; only rows that ask for it are touched. Call `apply` before each step and
    `after_sampling` with its tokens.
    """

    def __init__(self, rows: Sequence[ShapedRow], vocabulary: int, device: torch.device) -> None:
        def column(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

        def table(ids: Sequence[Collection[int]]) -> torch.Tensor:
            return torch.from_numpy(np.stack([_counts(each, vocabulary) for each in ids])).to(device)

        self._rows = torch.tensor([each.row for each in rows], device=device)
        self._places = [each.row for each in rows]
        self._until = [each.sampling.min_tokens - len(each.sampled) for each in rows]
        self._in_prompt = table([each.prompt for each in rows]) > 0
        self._sampled = table([each.sampled for each in rows])
        self._stops = table([each.stops for each in rows]) > 0
        self._presence = column([each.sampling.presence_penalty for each in rows])
        self._frequency = column([each.sampling.frequency_penalty for each in rows])
        self._repetition = column([each.sampling.repetition_penalty for each in rows])

    def apply(self, logits: torch.Tensor) -> None:
        """Shape float32 `logits` `[rows of the batch, vocabulary]` in place."""
        own = logits.index_select(0, self._rows)
        if any(left > 0 for left in self._until):
            early = torch.tensor([left > 0 for left in self._until], device=own.device).unsqueeze(1)
            own = own.masked_fill(self._stops & early, float("-inf"))
        sampled = self._sampled > 0
        factor = torch.where(self._in_prompt | sampled, self._repetition, torch.ones_like(self._repetition))
        own = torch.where(own > 0, own / factor, own * factor)
        own = own - self._frequency * self._sampled - self._presence * sampled
        logits.index_copy_(0, self._rows, own)

    def after_sampling(self, tokens: Sequence[int]) -> None:
        """Every row of the batch sampled a token."""
        own = torch.tensor([[tokens[row]] for row in self._places], device=self._sampled.device)
        self._sampled.scatter_add_(1, own, torch.ones_like(own, dtype=torch.float32))
        self._until = [left - 1 for left in self._until]


def _counts(ids: Collection[int], vocabulary: int) -> npt.NDArray[np.float32]:
    """How often each token of the vocabulary is among `ids`."""
    found = np.bincount(np.fromiter(ids, dtype=np.int64, count=len(ids)), minlength=vocabulary)
    return found[:vocabulary].astype(np.float32)

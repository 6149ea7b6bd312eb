"""Drawing tokens for all rows at once, each row by its own parameters.

    logits ─► ÷ temperature ─► top-k ─► top-p ─► cumulative distribution ─► first entry above a uniform number

One uniform number a token (inverse-transform sampling, in float64) makes a seeded request's draws its own: no neighbour
can shift them. The work of top-k and top-p (a sort) is done only while a row asks for it.

Logprobs are those of the distribution really drawn from, float32 from a float32 log-softmax; for greedy rows those of the
plain softmax.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from rollout_server.engines.recording import record
from services.wire.sampling import SamplingParams


class UniformSource(Protocol):
    """Where a seeded sample's uniform numbers come from (`numpy.random.Generator`)."""

    def random(self) -> float: ...


class RowParameters:
    """The parameters of the rows of one batch, as tensors. Made anew when rows come or go."""

    def __init__(self, rows: Sequence[SamplingParams], vocabulary: int, device: torch.device) -> None:
        self.all_greedy = all(row.temperature == 0.0 for row in rows)
        restricted = any(row.top_p < 1.0 or 0 < row.top_k < vocabulary for row in rows)
        self.plain = not restricted and not any(row.temperature == 0.0 for row in rows)
        self.temperature = _column([row.temperature or 1.0 for row in rows], np.float32, device)
        if self.plain or self.all_greedy:
            return
        self.greedy = _column([row.temperature == 0.0 for row in rows], np.bool_, device)
        whole = [row.temperature == 0.0 for row in rows]
        self.top_k = _column(
            [vocabulary if all_of or row.top_k < 1 else row.top_k for row, all_of in zip(rows, whole, strict=True)],
            np.int64,
            device,
        )
        # Above 1, so that rounding in the cumulative sum cannot cut the tail of a row that wants all of it.
        self.top_p = _column(
            [2.0 if all_of or row.top_p >= 1.0 else row.top_p for row, all_of in zip(rows, whole, strict=True)],
            np.float64,
            device,
        )


class Sampler:
    """Draws for the rows of a batch; unseeded rows share the engine's generator, seeded by `seed`."""

    def __init__(self, seed: int, vocabulary: int, device: torch.device) -> None:
        self._generator = np.random.Generator(np.random.PCG64(seed))
        self._device = device
        logits = torch.zeros(3, vocabulary, device=device)
        uniforms = torch.full((3, 1), 0.5, dtype=torch.float64, device=device)
        ones = torch.ones(3, 1, device=device)
        everything = (ones.bool(), ones.long(), ones.double())
        self._greedy = record(draw_greedy, (logits,))
        self._plain = record(draw_plain, (logits, uniforms, ones))
        self._restricted = record(draw_restricted, (logits, uniforms, ones, *everything))

    def draw(
        self, logits: torch.Tensor, rows: RowParameters, seeded: Sequence[tuple[int, UniformSource]]
    ) -> tuple[list[int], list[float]]:
        """Token ids and logprobs, one a row, from float32 logits `[rows, vocabulary]`. `seeded`: (row, its source)."""
        if rows.all_greedy:
            drawn = self._greedy(logits)
        else:
            uniforms = self._generator.random(logits.shape[0])
            for row, source in seeded:
                uniforms[row] = source.random()
            column = torch.from_numpy(uniforms).to(self._device).unsqueeze(1)
            if rows.plain:
                drawn = self._plain(logits, column, rows.temperature)
            else:
                drawn = self._restricted(logits, column, rows.temperature, rows.greedy, rows.top_k, rows.top_p)
        both: npt.NDArray[np.float64] = drawn.cpu().numpy()
        return both[0].astype(np.int64).tolist(), both[1].tolist()


def seeded_source(seed: int, index: int) -> UniformSource:
    """The uniform numbers of sample `index` of a request with this seed."""
    return np.random.Generator(np.random.Philox(key=np.array([seed % (1 << 64), index], dtype=np.uint64)))


def draw_greedy(logits: torch.Tensor) -> torch.Tensor:
    """float64 `[2, rows]`: token ids (exact up to 2^53) and logprobs."""
    tokens = logits.argmax(dim=-1, keepdim=True)
    return _pair(tokens, logits.log_softmax(dim=-1).gather(1, tokens))


def draw_plain(logits: torch.Tensor, uniforms: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """As `draw_greedy`, from the whole distribution. `uniforms`: float64 `[rows, 1]` in [0, 1); `temperature` > 0."""
    logprobs = (logits / temperature).log_softmax(dim=-1)
    tokens = _invert(logprobs, uniforms)
    return _pair(tokens, logprobs.gather(1, tokens))


def draw_restricted(
    logits: torch.Tensor,
    uniforms: torch.Tensor,
    temperature: torch.Tensor,
    greedy: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """As `draw_plain`, from the `top_k` likeliest tokens and of these the fewest that hold `top_p` of their probability.

    `greedy`: bool `[rows, 1]`, rows that take the likeliest instead. All parameters are columns `[rows, 1]`.
    """
    ordered, order = (logits / temperature).sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(rank >= top_k, float("-inf"))
    share = ordered.softmax(dim=-1, dtype=torch.float64)
    # A token stays while the likelier ones do not yet hold top_p, so the likeliest always stays.
    ordered = ordered.masked_fill(share.cumsum(dim=-1) - share >= top_p, float("-inf"))
    logprobs = ordered.log_softmax(dim=-1)
    places = _invert(logprobs, uniforms).masked_fill(greedy, 0)
    return _pair(order.gather(1, places), logprobs.gather(1, places))


def _invert(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The first place where the cumulative probability exceeds the uniform number: never one of probability 0."""
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    places = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    return places.clamp_max(logprobs.shape[-1] - 1)


def _pair(tokens: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    return torch.cat((tokens.double(), logprobs.double()), dim=1).t()


def _column(values: Sequence[float], dtype: npt.DTypeLike, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=dtype)).to(device).unsqueeze(1)

"""How tokens are drawn, recorded with every trajectory so that the trainer can reproduce or refuse it."""

from __future__ import annotations

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Names and meanings are vLLM's. `temperature` 0 is greedy; `top_k` −1 and `top_p` 1 leave the distribution whole.

    Behaviour logprobs are those of the distribution really sampled from; for greedy decoding, of the plain softmax.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    """Besides the model's own end-of-sequence ids. The stop token itself is part of the output."""
    ignore_eos: bool = False

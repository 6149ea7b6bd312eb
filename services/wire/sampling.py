"""How tokens are sampled, recorded with every trajectory so that the trainer can reproduce or refuse it."""

from __future__ import annotations

import math
from typing import Literal

import msgspec


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Names, meanings and defaults are vLLM's; the defaults leave the distribution whole. `temperature` 0 is greedy.

    Order, vLLM's too: `min_tokens` and the penalties change the logits, then temperature divides them, then `min_p`,
    `top_k` and `top_p` cut. Behaviour logprobs are those of the distribution really sampled from, after all of it. Greedy
    decoding takes the likeliest token and ignores the cuts: its logprobs are of the softmax at temperature 1 after
    `min_tokens` and the penalties.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """Below 1: no cut."""
    min_p: float = 0.0
    """Cut tokens less likely than this share of the likeliest one's probability."""
    presence_penalty: float = 0.0
    """Taken off the logits of tokens that were sampled already."""
    frequency_penalty: float = 0.0
    """Taken off the logits of sampled tokens as often as they were sampled."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies other logits of tokens in the prompt or sampled already."""
    min_tokens: int = 0
    """No stop token is sampled before so many others."""
    seed: int | None = None
    """None or −1: the engine's own random numbers."""
    stop_token_ids: tuple[int, ...] = ()
    """Besides the model's own end-of-sequence ids. The stop token itself is part of the output."""
    ignore_eos: bool = False

    @property
    def shifts(self) -> bool:
        """Logits are changed by what the sequence holds so far (penalties) or by its length (`min_tokens`)."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
            or self.min_tokens > 0
        )

    @property
    def cuts(self) -> bool:
        """Some tokens are given no chance (by `top_p`, `top_k` or `min_p`)."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def only_cuts(self) -> bool:
        """Tokens come from what the cuts leave of the plain softmax: reproducible if it is known what that is."""
        return 0.0 < self.temperature < math.inf and self.cuts and not self.shifts

    @property
    def whole(self) -> bool:
        """Tokens come from the plain softmax at `temperature` > 0: what a trainer can reproduce from token ids alone."""
        return 0.0 < self.temperature < math.inf and not self.cuts and not self.shifts


# What a new policy version does to the keys and values that an engine holds.

KvPolicy = Literal["keep", "recompute", "salt"]
"""No policy lets a request read keys and values that another version computed for another request.

`keep`: running requests go on with theirs; nothing is shared. `salt`: running requests go on with theirs; prefixes are
shared within a version. `recompute`: running requests have theirs computed anew; prefixes are shared within a version.
"""


def sibling_seed(seed: int | None, member: int) -> int | None:
    """The seed of sibling `member` of a group opened with `seed`: its own, or all answers would be drawn alike."""
    return seed if seed is None or seed == -1 or member == 0 else (seed + member) % (1 << 63)

"""Sampling parameters of a call: the session's settings win over the call's, those over OpenAI's defaults. Pure.

A trainer opens a session and needs its answers sampled in a way that it can train on; an agent that hard-codes a
temperature must not be able to undo that. Of two limits on tokens the smaller holds.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from services.wire.errors import RollmeshError
from services.wire.rollout_api import SamplingFields, SamplingLimits
from services.wire.sampling import SamplingParams
from services.wire.vllm_api import SamplingCall


class BudgetSpentError(RollmeshError):
    """The session's `max_tokens` are used up."""

    status = 400
    code = "token_budget_exhausted"

    def __init__(self, budget: int) -> None:
        super().__init__(f"the session's {budget} tokens are used up", "open sessions with more max_tokens")


_PLAIN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "seed",
    "ignore_eos",
)


def choose_sampling(
    limits: SamplingLimits,
    asked: SamplingFields | SamplingCall,
    max_tokens: int | None,
    stop_token_ids: Iterable[int],
    longest: int,
) -> SamplingParams:
    """The sampling of one call. `max_tokens`: the call's own; `stop_token_ids`: the chat template's own ends.

    `ignore_eos` leaves these ends out too, as in vLLM. `longest`: tokens a model's sequence may have, which bounds a call
    that names no limit.
    """
    chosen = {}
    for name in _PLAIN:
        value = getattr(limits, name)
        value = getattr(asked, name) if value is None else value
        if value is not None:
            chosen[name] = value
    stops = limits.stop_token_ids if limits.stop_token_ids is not None else asked.stop_token_ids or []
    ends = () if chosen.get("ignore_eos") else stop_token_ids
    bounds = [bound for bound in (limits.max_tokens, max_tokens, longest) if bound is not None]
    return SamplingParams(max_tokens=min(bounds), stop_token_ids=tuple(dict.fromkeys([*stops, *ends])), **chosen)


def within(sampling: SamplingParams, max_tokens: int) -> SamplingParams:
    """The same with at most `max_tokens` tokens. What is recorded is the sampling asked for, what is sampled may be cut."""
    if sampling.max_tokens <= max_tokens:
        return sampling
    return msgspec.structs.replace(sampling, max_tokens=max_tokens, min_tokens=min(sampling.min_tokens, max_tokens))

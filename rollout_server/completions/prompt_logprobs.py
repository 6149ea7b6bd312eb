"""Logprobs of a prompt's own tokens on the wire: what may be asked for, and how vLLM writes the answer. Pure."""

from __future__ import annotations

import math

from rollout_server.completions.chunks import TokenTexts
from rollout_server.engines.base import GenerationDelta, GenerationRequest
from services.wire.errors import UnsupportedParameterError
from services.wire.openai_api import PromptLogprob
from services.wire.vllm_api import PromptLogprobs

_NO_CHANCE = -9999.0
"""vLLM's number for minus infinity, which JSON has none for."""


def check_scored(prompt_logprobs: int | None, *, n: int, stream: bool, session: bool) -> None:
    """Raise UnsupportedParameterError for logprobs of a prompt that are asked for where, or as, nobody tells them."""
    if prompt_logprobs is None:
        return
    if prompt_logprobs != 0:
        raise UnsupportedParameterError(
            f"prompt_logprobs is {prompt_logprobs}: of a prompt only its own tokens' are told", "send 0"
        )
    for asked, what in ((session, "in a session"), (stream, "in a stream"), (n > 1, f"with n = {n}")):
        if asked:
            raise UnsupportedParameterError(
                f"prompt_logprobs {what}: not supported here", "ask for one whole answer, outside sessions"
            )


def told_logprobs(
    request: GenerationRequest, answer: GenerationDelta, texts: TokenTexts | None = None
) -> PromptLogprobs | None:
    """The `prompt_logprobs` of an answer; None where it has none. Without `texts` there is no `decoded_token`."""
    scores = answer.prompt_logprobs
    if scores is None:
        return None
    told: PromptLogprobs = [None]
    for token, logprob, rank in zip(request.prompt_token_ids[1:], scores.logprobs, scores.ranks, strict=True):
        text = None if texts is None else texts.text(token)
        told.append({token: PromptLogprob(logprob if math.isfinite(logprob) else _NO_CHANCE, rank, text)})
    return told

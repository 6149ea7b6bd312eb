"""Validation of a generation request, before it is queued, so that it cannot harm others in its batch. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rollout_server.engines.base import GenerationRequest
from services.wire.errors import ContextLengthError, UsageError
from services.wire.sampling import SamplingParams

MAX_TOP_LOGPROBS = 20
# vLLM's bounds for every engine. Its core checks them again and stops listening for good when they do not hold.
_TEMPERATURE = (0.01, 2.0)
# A bound of ours: outside it, float32 logits may overflow, which would end the requests beside it too.
_REPETITION = (0.01, 100.0)
_PENALTY = (-2.0, 2.0)
_SEEDS = (-(1 << 63), (1 << 63) - 1)


def check_request(
    request: GenerationRequest, *, max_model_len: int, vocabulary: int, eos_token_ids: Iterable[int]
) -> None:
    """Raise UsageError, or ContextLengthError for a prompt that leaves no room, unless an engine can do `request`."""
    prompt, sampling = request.prompt_token_ids, request.sampling
    if request.n < 1 or sampling.max_tokens < 1:
        raise UsageError(f"n={request.n}, max_tokens={sampling.max_tokens}", "ask for at least one token")
    if request.prompt_logprobs and request.n != 1:
        raise UsageError(f"prompt_logprobs with n={request.n}", "ask for one sample: all have the same prompt")
    if not prompt:
        raise UsageError("the prompt is empty", f"give 1 to {max_model_len - 1} tokens")
    if len(prompt) >= max_model_len:
        raise ContextLengthError(len(prompt), max_model_len)
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        raise UsageError(
            f"the prompt has token ids from {min(prompt)} to {max(prompt)}", f"the vocabulary ends at {vocabulary - 1}"
        )
    _within("top_logprobs", request.top_logprobs, (0, MAX_TOP_LOGPROBS))
    _within("delta_every", request.delta_every, (1, math.inf))
    _within("first_index", request.first_index, (0, math.inf))
    _within("resumed", request.resumed, (0, len(prompt) - 1), "the first prompt token was never sampled")
    _check_sampling(sampling)
    _within("min_tokens", sampling.min_tokens, (0, sampling.max_tokens + request.resumed), "at most max_tokens")
    if sampling.min_tokens and len(reachable_stops(sampling, vocabulary, eos_token_ids)) >= vocabulary:
        raise UsageError(
            f"every token is a stop token and min_tokens is {sampling.min_tokens}", "leave a token that can be sampled"
        )


def reachable_stops(sampling: SamplingParams, vocabulary: int, eos_token_ids: Iterable[int]) -> frozenset[int]:
    """The tokens that end a sample. Ids outside the vocabulary are left out: they are never sampled."""
    stops = sampling.stop_token_ids if sampling.ignore_eos else (*sampling.stop_token_ids, *eos_token_ids)
    return frozenset(token for token in stops if 0 <= token < vocabulary)


def _check_sampling(sampling: SamplingParams) -> None:
    if sampling.temperature != 0.0:
        _within("temperature", sampling.temperature, _TEMPERATURE, "or 0 for greedy decoding")
    if not 0.0 < sampling.top_p <= 1.0:
        raise UsageError(f"top_p is {sampling.top_p}", "give a number above 0, at most 1")
    if sampling.top_k < -1:
        raise UsageError(f"top_k is {sampling.top_k}", "give at least 1, or -1 for no limit")
    _within("min_p", sampling.min_p, (0.0, 1.0))
    _within("presence_penalty", sampling.presence_penalty, _PENALTY)
    _within("frequency_penalty", sampling.frequency_penalty, _PENALTY)
    _within("repetition_penalty", sampling.repetition_penalty, _REPETITION)
    if sampling.seed is not None:
        _within("seed", sampling.seed, _SEEDS)


def _within(name: str, value: float, bounds: tuple[float, float], more: str = "") -> None:
    """Raise UsageError unless `value` is a number (not NaN) between the bounds."""
    lowest, highest = bounds
    if not lowest <= value <= highest:
        raise UsageError(f"{name} is {value}", ", ".join(filter(None, (f"give {lowest} to {highest}", more))))


def eos_token_ids(model: Path) -> tuple[int, ...]:
    """The model's end-of-sequence ids, from generation_config.json and config.json (torch is not imported)."""
    found: dict[int, None] = {}
    for name in ("generation_config.json", "config.json"):
        ids = read_json(model / name).get("eos_token_id") if (model / name).exists() else None
        for token in ids if isinstance(ids, list) else [ids]:
            if isinstance(token, int):
                found[token] = None
    return tuple(found)


def vocabulary_size(model: Path) -> int:
    """How many token ids the model has. Raises UsageError for a folder that does not tell."""
    try:
        config = read_json(model / "config.json")
        return int(config.get("text_config", config)["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{model} is no model folder ({error!r})", "give the folder of what the engine serves"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded

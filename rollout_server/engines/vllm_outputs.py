"""From vLLM's outputs to deltas: token ids, logprobs of the sampled tokens, and a version for every token. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

from rollout_server.engines.base import FinishReason, GenerationDelta
from services.wire.errors import RollmeshError
from services.wire.trajectory import VersionSpan

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def version_number(label: str) -> int:
    """vLLM's label for the weights: `default` before the first commit, then the number as text."""
    return 0 if label == "default" else int(label)


def spans_between(starts: Sequence[tuple[str, int]], begin: int, end: int) -> list[VersionSpan]:
    """The version spans of tokens `begin … end − 1`, positions counted from `begin`.

    `starts`: (label, position of its first token) for all tokens of the sample so far, in order.
    """
    spans = []
    edges = [*(start for _, start in starts), end]
    for (label, _), (first, after) in zip(starts, pairwise(edges), strict=True):
        first, after = max(first, begin), min(after, end)
        if after > first:
            spans.append(VersionSpan(first - begin, after - first, version_number(label)))
    return spans


def sampled_logprobs(logprobs: Any, count: int) -> list[float]:
    """`count` logprobs out of vLLM's flat form, where `logprobs=0` leaves one entry a position: the sampled token's."""
    if logprobs is None:
        return [0.0] * count
    values = cast(list[float], logprobs.logprobs)
    if len(values) == count:
        return values
    return [values[start] for start in logprobs.start_indices[:count]]


def likeliest(logprobs: Any, count: int, wanted: int) -> list[list[tuple[int, float]]]:
    """For each of `count` positions the `wanted` likeliest (id, logprob), best first; those of probability 0 left out.

    A position of the flat form holds the sampled token and after it the likeliest ones, best first, among which the
    sampled one is named again only sometimes: not in an output that vLLM joined of several.
    """
    found = []
    for start, end in zip(logprobs.start_indices[:count], logprobs.end_indices[:count], strict=True):
        told = dict(zip(logprobs.token_ids[start:end], logprobs.logprobs[start:end], strict=True))
        ordered = sorted(told.items(), key=lambda entry: -entry[1])[:wanted]
        found.append([(token, logprob) for token, logprob in ordered if math.isfinite(logprob)])
    return found


def to_delta(
    request_id: str, output: Any, starts: Sequence[tuple[str, int]], begin: int, top_logprobs: int = 0
) -> GenerationDelta:
    """One CompletionOutput whose tokens begin at position `begin` of the sample."""
    tokens = list(output.token_ids)
    reason: FinishReason | None = None
    if output.finish_reason is not None:
        reason = _FINISH.get(output.finish_reason)
        if reason is None:
            raise RollmeshError(
                f"vLLM ended request {request_id} with {output.finish_reason!r}", "see the engine's log"
            )
    spans = spans_between(starts, begin, begin + len(tokens))
    if sum(span.length for span in spans) != len(tokens):
        raise RollmeshError(f"request {request_id}: vLLM named no version for some of {len(tokens)} tokens")
    alternatives = None
    if top_logprobs:
        alternatives = likeliest(output.logprobs, len(tokens), top_logprobs) if tokens else []
    return GenerationDelta(
        request_id=request_id,
        index=output.index,
        token_ids=tokens,
        logprobs=sampled_logprobs(output.logprobs, len(tokens)),
        versions=spans,
        finish_reason=reason,
        top_logprobs=alternatives,
    )

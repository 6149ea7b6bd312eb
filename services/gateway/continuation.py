"""Continuing a draw that was broken off: what is left to ask for, and how the parts become one sample. Pure.

    asked: token_ids, max_tokens     ──► drawn k tokens, then `abort` (or the server died)
    left : token_ids + drawn, max_tokens − k, resumed + k      ──► joined: drawn + the rest, versions moved on by k

`resumed` tells the engine that the last k tokens of the prompt are output, so penalties, `min_tokens` and a seed go on as
in an unbroken draw; so does `first_index` for one of several samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from services.wire.engine_api import Choice, Logprobs, Usage, WeightVersionSpan

Call = dict[str, Any]
"""A decoded `GenerateCall`, with all that its sender wrote."""
Versions = Sequence[tuple[int, int]]
"""(policy version, the first output token that it drew), in order."""


def asks_for_one(call: Call) -> bool:
    """Whether it wants a single sample. One that is not even well formed does not: the server refuses it."""
    sampling = call.get("sampling_params")
    return isinstance(sampling, dict) and sampling.get("n", 1) == 1 and isinstance(call.get("token_ids"), list)


def what_is_left(call: Call, drawn: Choice) -> Call | None:
    """The call for the rest of one sample; None where `drawn` has all the tokens that were asked for."""
    sampling = {**call["sampling_params"], "n": 1}
    count = len(drawn.token_ids)
    if sampling.get("max_tokens") is not None:
        sampling["max_tokens"] -= count
        if sampling["max_tokens"] <= 0:
            return None
    left = {
        **call,
        "token_ids": [*call["token_ids"], *drawn.token_ids],
        "sampling_params": sampling,
        "resumed": call.get("resumed", 0) + count,
        "first_index": call.get("first_index", 0) + drawn.index,
        # The agent has its prompt already.
        "return_token_ids": False,
    }
    # The engine may still know a request of this name.
    left.pop("request_id", None)
    return left


def join(drawn: Choice, more: Choice) -> Choice:
    """One sample of two parts that follow each other; `more` says how it ends."""
    versions = joined_versions(drawn.policy_versions, len(drawn.token_ids), more.policy_versions)
    token_ids = [*drawn.token_ids, *more.token_ids]
    return Choice(
        index=drawn.index,
        token_ids=token_ids,
        logprobs=_joined_logprobs(drawn, more),
        finish_reason=more.finish_reason,
        stop_reason=more.stop_reason,
        weight_versions=weight_spans(versions, len(token_ids)),
        policy_versions=versions,
    )


def ended(drawn: Choice, reason: Literal["stop", "length"]) -> Choice:
    """The sample as it is, whole."""
    return join(drawn, Choice(index=drawn.index, token_ids=[], finish_reason=reason, policy_versions=[]))


def joined_versions(earlier: Versions | None, count: int, starts: Versions | None) -> list[tuple[int, int]] | None:
    """Versions over the whole of a sample: `earlier` of its first `count` tokens, `starts` of the part behind them.

    None where those of a part are not known.
    """
    if not count:
        earlier = []
    if earlier is None or starts is None:
        return None
    joined = list(earlier)
    for version, start in starts:
        if not joined or joined[-1][0] != version:
            joined.append((version, start + count))
    return joined


def weight_spans(versions: Versions | None, length: int) -> list[WeightVersionSpan] | None:
    """The same in vLLM's words, for a sample of `length` tokens."""
    if versions is None:
        return None
    ends = [*(start for _, start in versions), length][1:]
    return [WeightVersionSpan(str(version), start, end) for (version, start), end in zip(versions, ends, strict=True)]


def usage(prompt_tokens: int, samples: Sequence[Choice]) -> Usage:
    """Of the whole answer, as if it had been drawn in one go."""
    drawn = sum(len(sample.token_ids) for sample in samples)
    return Usage(prompt_tokens=prompt_tokens, total_tokens=prompt_tokens + drawn, completion_tokens=drawn)


def _joined_logprobs(drawn: Choice, more: Choice) -> Logprobs | None:
    if drawn.logprobs is None and more.logprobs is None:
        return None
    parts = [part.logprobs.content for part in (drawn, more) if part.logprobs is not None]
    return Logprobs([entry for part in parts for entry in part])

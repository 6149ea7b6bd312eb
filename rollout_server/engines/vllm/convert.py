"""Convert between the engine interface and vLLM: outputs to deltas with version spans, requests to SamplingParams."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from rollout_server.engines.base import FinishReason, GenerationDelta, GenerationRequest, PromptLogprobs
from rollout_server.engines.request_check import MAX_TOP_LOGPROBS, check_request, reachable_stops
from services.config.engines.vllm import MOST_LOGPROBS
from services.wire.errors import RollmeshError, UsageError
from services.wire.packed import pack_kept
from services.wire.sampling import KvPolicy
from services.wire.trajectory import ExpertChoices, VersionSpan

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


def version_number(label: str) -> int:
    """vLLM's label for the weights: `default` before the first commit, then the number as text."""
    return 0 if label == "default" else int(label)


def spans_between(
    starts: Sequence[tuple[str, int]],
    begin: int,
    end: int,
    kv_policy: KvPolicy = "keep",
    computed_anew: Sequence[int] = (),
    resumed: bool = False,
) -> list[VersionSpan]:
    """The version spans of tokens `begin … end − 1`, positions counted from `begin`.

    `starts`: (label, position of its first token) for all tokens of the sample so far, in order. `computed_anew`: at which
    positions, ascending, the keys and values of all before were computed anew, for the engine had taken the memory back.
    `resumed`: an earlier try sampled the end of the prompt, under whichever versions.
    """
    spans = []
    edges = [*(start for _, start in starts), end]
    for (label, _), (first, after) in zip(starts, pairwise(edges), strict=True):
        # What the first version computes anew comes out as it was.
        anew = () if first == edges[0] else computed_anew
        own: KvPolicy = "recompute" if resumed and first == edges[0] else kv_policy
        for start, stop, kv in _cut(first, min(after, end), own, anew):
            start = max(start, begin)
            if stop > start:
                spans.append(VersionSpan(start - begin, stop - start, version_number(label), kv=kv))
    return spans


def _cut(
    first: int, after: int, kv_policy: KvPolicy, computed_anew: Sequence[int]
) -> Iterator[tuple[int, int, KvPolicy]]:
    """One version's tokens, cut where it first computed anew what others had left it: from there on all is its own."""
    anew = after
    if kv_policy != "recompute":
        anew = next((place for place in computed_anew if first <= place < after), after)
    yield first, anew, kv_policy
    yield anew, after, "recompute"


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


def kept_tokens(logprobs: Any, count: int, asked: int) -> list[bytes]:
    """For each of `count` positions the ids that the cuts left a chance, as `GenerationDelta.kept` has them.

    vLLM's logprobs are those after its cuts. Where fewer than the `asked` likeliest ones have a chance, these are all that
    do; else it is not known.
    """
    found = likeliest(logprobs, count, asked)
    return [pack_kept(sorted(token for token, _ in told)) if len(told) < asked else b"" for told in found]


def asked_kept(request: GenerationRequest) -> int:
    """How many of the likeliest tokens vLLM is asked for, to tell which ones the cuts left: one more than they can leave.

    Where `top_k` does not say how many that are, or too many, it is known of tokens of which they leave few.
    """
    if not request.kept:
        return 0
    return max(MAX_TOP_LOGPROBS, request.sampling.top_k + 1 if request.sampling.top_k < MOST_LOGPROBS else 0)


def asked_likeliest(request: GenerationRequest, vocabulary: int) -> int:
    """How many of the likeliest tokens vLLM is asked for."""
    return min(max(request.top_logprobs, asked_kept(request)), vocabulary)


def prompt_logprobs(request: GenerationRequest, logprobs: Any) -> PromptLogprobs:
    """Of the prompt's own tokens, out of vLLM's flat form: no entry for the first token, then one each.

    Raises RollmeshError where these are not all.
    """
    starts = [] if logprobs is None else logprobs.start_indices[1:]
    if [logprobs.token_ids[start] for start in starts] != request.prompt_token_ids[1:]:
        raise RollmeshError(
            f"request {request.request_id}: vLLM told {len(starts)} logprobs of a prompt of "
            f"{len(request.prompt_token_ids)} tokens, or those of others"
        )
    return PromptLogprobs([logprobs.logprobs[start] for start in starts], [logprobs.ranks[start] for start in starts])


def take_rows(chunks: list[npt.NDArray[Any]], count: int) -> npt.NDArray[Any] | None:
    """The first `count` rows out of vLLM's own list, which keeps the others for its last output; None where it has none."""
    if not chunks:
        return None
    rows: npt.NDArray[Any] = np.concatenate(chunks)
    chunks[:] = [rows[count:]] if len(rows) > count else []
    return rows[:count]


def chosen_experts(rows: npt.NDArray[Any], computed: int) -> ExpertChoices:
    """`rows`: of the last of `computed` tokens `[tokens, layers, top]`."""
    tokens, layers, top = rows.shape
    return ExpertChoices(layers, top, rows.dtype.itemsize, rows.tobytes(), computed - tokens)


def to_delta(
    request_id: str,
    output: Any,
    starts: Sequence[tuple[str, int]],
    begin: int,
    top_logprobs: int = 0,
    kv_policy: KvPolicy = "keep",
    computed_anew: Sequence[int] = (),
    resumed: bool = False,
    kept: int = 0,
) -> GenerationDelta:
    """One CompletionOutput whose tokens begin at position `begin` of the sample; the rest as in `spans_between`.

    `kept`: how many of the likeliest tokens vLLM was asked for, to tell which ones the cuts left; 0 for nothing to tell.
    """
    tokens = list(output.token_ids)
    reason: FinishReason | None = None
    if output.finish_reason is not None:
        reason = _FINISH.get(output.finish_reason)
        if reason is None:
            raise RollmeshError(
                f"vLLM ended request {request_id} with {output.finish_reason!r}", "see the engine's log"
            )
    spans = spans_between(starts, begin, begin + len(tokens), kv_policy, computed_anew, resumed)
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
        kept=kept_tokens(output.logprobs, len(tokens), kept) if kept and tokens else None,
    )


def vllm_parameters(
    request: GenerationRequest, *, max_model_len: int, vocabulary: int, eos_token_ids: tuple[int, ...]
) -> Any:
    """The request's vLLM parameters. Raises as `check_request` does."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmSampling

    check_request(request, max_model_len=max_model_len, vocabulary=vocabulary, eos_token_ids=eos_token_ids)
    sampling = request.sampling
    limit = min(sampling.max_tokens, max_model_len - len(request.prompt_token_ids))
    try:
        parameters = VllmSampling(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=max(sampling.top_k, 0),
            min_p=sampling.min_p,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            repetition_penalty=sampling.repetition_penalty,
            min_tokens=min(max(sampling.min_tokens - request.resumed, 0), limit),
            seed=sampling.seed,
            max_tokens=limit,
            # All of them: vLLM has no tokenizer here and does not know the end-of-sequence ids by itself.
            stop_token_ids=sorted(reachable_stops(sampling, vocabulary, eos_token_ids)),
            ignore_eos=True,
            logprobs=asked_likeliest(request, vocabulary),
            # With it vLLM reads no cached prefix: there are no logits of tokens that are not computed.
            prompt_logprobs=0 if request.prompt_logprobs else None,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
            stream_interval=request.delta_every,
            skip_clone=True,
        )
    except ValueError as error:
        raise UsageError(f"vLLM refuses the sampling parameters ({error})") from error
    # Set afterwards: vLLM refuses several greedy samples when asked for them at once, and generates them all the same.
    parameters.n = request.n
    return parameters

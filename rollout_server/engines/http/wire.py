"""Request and response format of an external engine's token route. Pure: no socket, no clock.

    GenerationRequest ── generate_body ──► POST /inference/v1/generate
    GenerationDelta … ◄── to_delta ── EngineChoice … ◄── read_chunk ── events
    GenerationDelta   ◄── to_delta ── EngineChoice   ◄── read_answer ── a whole answer, for logprobs of the prompt

Tokens are named by number or as `token_id:N`, as vLLM does; rollmesh's own fields are read where the engine sends them.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from rollout_server.engines.base import FinishReason, GenerationDelta, GenerationRequest, PromptLogprobs, join
from rollout_server.engines.request_check import MAX_TOP_LOGPROBS, reachable_stops
from rollout_server.engines.vllm.convert import version_number
from services.wire.errors import UNDECODABLE, NotReadyError, RollmeshError, WireError
from services.wire.trajectory import VersionSpan

_FINISH: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
# vLLM writes logprobs that JSON has no number for (minus infinity, not a number) as this one.
_NO_NUMBER = -9999.0
_PREFIX = "token_id:"


class EngineLogprob(msgspec.Struct):
    """One candidate; its id comes as a number, as `token_id:N`, or both."""

    logprob: float
    token_id: int | None = None
    token: str = ""

    @property
    def id(self) -> int:
        """Raises WireError where neither tells it."""
        if self.token_id is not None:
            return self.token_id
        number = self.token.removeprefix(_PREFIX)
        if not number.isdecimal():
            raise WireError(f"the engine names a token {self.token!r}", f"its logprobs must say {_PREFIX}N")
        return int(number)


class EngineSampled(EngineLogprob):
    """A sampled token; `top_logprobs` names it first, then the likeliest others."""

    top_logprobs: list[EngineLogprob] = []


class EngineLogprobs(msgspec.Struct):
    content: list[EngineSampled] | None = None


class EngineSpan(msgspec.Struct):
    version: str
    start: int
    end: int


class EngineChoice(msgspec.Struct):
    """New tokens of one sample.

    `weight_versions`: vLLM's, over the whole sample, with its final chunk. `version_spans`: rollmesh's, over these tokens.
    """

    index: int
    token_ids: list[int] | None = None
    logprobs: EngineLogprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[EngineSpan] | None = None
    version_spans: list[VersionSpan] | None = None


class EnginePromptLogprob(msgspec.Struct):
    logprob: float
    rank: int | None = None


class EngineChunk(msgspec.Struct):
    """One event, or a whole answer. `error`: what went wrong after the stream began, as it was sent.

    `prompt_logprobs`: of a whole answer, for each token of the prompt by id; None for the first.
    """

    choices: list[EngineChoice] = []
    error: msgspec.Raw | None = None
    prompt_logprobs: list[dict[int, EnginePromptLogprob] | None] | None = None


_encoder = msgspec.json.Encoder()
_chunks = msgspec.json.Decoder(EngineChunk)


def generate_body(
    request: GenerationRequest, *, name: str, limit: int, ours: bool, vocabulary: int, eos_token_ids: Sequence[int]
) -> bytes:
    """The call for `request`, in a stream, but for one that asks for logprobs of its prompt: they come in whole answers.

    `limit`: tokens that fit; `ours`: the engine is a rollout server.
    """
    sampling = request.sampling
    # vLLM cannot be told that some tokens were sampled before: all that can be done is to lower `min_tokens`.
    barred = sampling.min_tokens if ours else max(sampling.min_tokens - request.resumed, 0)
    parameters: dict[str, Any] = {
        # Greedy samples are all alike, and vLLM refuses to generate more than one.
        "n": 1 if sampling.temperature == 0.0 else request.n,
        "max_tokens": limit,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": max(sampling.top_k, 0),
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "min_tokens": min(barred, limit + (request.resumed if ours else 0)),
        "seed": sampling.seed,
        # All of them: a server without a tokenizer does not know the end-of-sequence ids by itself.
        "stop_token_ids": sorted(reachable_stops(sampling, vocabulary, eos_token_ids)),
        "ignore_eos": True,
        # One more than wanted: the sampled token is always among those that are told.
        "logprobs": min(request.top_logprobs + 1, MAX_TOP_LOGPROBS) if request.top_logprobs else 0,
        "detokenize": False,
    }
    call: dict[str, Any] = {
        "request_id": name,
        "token_ids": request.prompt_token_ids,
        "sampling_params": parameters,
        # The tokens received are known when the engine dies, and silence tells one that hangs.
        "stream": not request.prompt_logprobs,
    }
    if request.cache_salt is not None:
        call["cache_salt"] = request.cache_salt
    if request.prompt_logprobs:
        parameters["prompt_logprobs"] = 0
    else:
        # Other servers ignore what they do not know.
        call["stream_options"] = {"version_spans": True}
    if ours:
        call["resumed"], call["first_index"] = request.resumed, request.first_index
    return _encoder.encode(call)


def read_chunk(event: bytes) -> EngineChunk:
    """An event's data. Raises WireError for anything else than a chunk."""
    try:
        return _chunks.decode(event)
    except UNDECODABLE as error:
        raise WireError(f"the engine sent {event[:200]!r}, which is no chunk of an answer ({error})") from error


def read_answer(content: bytes, ours: bool) -> EngineChunk:
    """A whole answer as one chunk. `ours`: of a rollout server, whose `weight_versions` are true of every token.

    Raises WireError for anything else.
    """
    answer = read_chunk(content)
    for choice in answer.choices if ours else ():
        choice.version_spans = [
            VersionSpan(span.start, span.end - span.start, int(span.version)) for span in choice.weight_versions or ()
        ]
    return answer


def prompt_logprobs(
    request: GenerationRequest, told: list[dict[int, EnginePromptLogprob] | None] | None
) -> PromptLogprobs:
    """Of the prompt's own tokens. Raises WireError where one is missing or is no logprob."""
    prompt = request.prompt_token_ids
    if told is None or len(told) != len(prompt):
        raise WireError(
            f"request {request.request_id}: {0 if told is None else len(told)} prompt_logprobs came for a prompt of "
            f"{len(prompt)} tokens",
            "use an engine that answers them on /inference/v1/generate (vLLM 0.32, a rollout server of this version)",
        )
    own = []
    for place, (token, entries) in enumerate(zip(prompt[1:], told[1:], strict=True), start=1):
        entry = (entries or {}).get(token)
        if entry is None or not entry.logprob <= 0.0:
            raise WireError(f"request {request.request_id}: prompt token {token} at {place} came with {entries}")
        own.append(entry)
    return PromptLogprobs([entry.logprob for entry in own], [entry.rank for entry in own])


def to_delta(request: GenerationRequest, choice: EngineChoice, version: int) -> GenerationDelta:
    """A choice's tokens. `version`: theirs, where the engine names none. Raises WireError for an inconsistent one."""
    tokens = choice.token_ids or []
    content = [] if choice.logprobs is None or choice.logprobs.content is None else choice.logprobs.content
    if [entry.id for entry in content] != tokens:
        raise WireError(f"request {request.request_id}: {len(tokens)} tokens came with {len(content)} logprobs")
    for entry in content:
        if not _NO_NUMBER < entry.logprob <= 0.0:
            raise WireError(f"request {request.request_id}: token {entry.id} came with logprob {entry.logprob}")
    return GenerationDelta(
        request_id=request.request_id,
        index=choice.index,
        token_ids=tokens,
        logprobs=[entry.logprob for entry in content],
        versions=_spans(request, choice, version),
        finish_reason=_reason(request, choice),
        top_logprobs=[_likeliest(entry, request.top_logprobs) for entry in content] if request.top_logprobs else None,
    )


def _spans(request: GenerationRequest, choice: EngineChoice, version: int) -> list[VersionSpan]:
    count, end = len(choice.token_ids or []), 0
    if choice.version_spans is None:
        return [VersionSpan(0, count, version)] if count else []
    for span in choice.version_spans:
        if span.start != end or span.length < 1:
            raise WireError(f"request {request.request_id}: version spans {choice.version_spans} are no partition")
        end += span.length
    if end != count:
        raise WireError(f"request {request.request_id}: version spans cover {end} of {count} tokens")
    return choice.version_spans


def _reason(request: GenerationRequest, choice: EngineChoice) -> FinishReason | None:
    if choice.finish_reason is None:
        return None
    reason = _FINISH.get(choice.finish_reason)
    if reason is None:
        raise RollmeshError(
            f"the engine ended request {request.request_id} with {choice.finish_reason!r}", "see the engine's log"
        )
    return reason


def _likeliest(entry: EngineSampled, wanted: int) -> list[tuple[int, float]]:
    """Best first; those of probability 0 left out."""
    told = {other.id: other.logprob for other in entry.top_logprobs}
    ordered = sorted(told.items(), key=lambda each: -each[1])[:wanted]
    return [(token, logprob) for token, logprob in ordered if math.isfinite(logprob) and logprob > _NO_NUMBER]


class OtherWeightsError(NotReadyError):
    """The engine sampled with weights that nobody committed through this server."""

    code = "other_weights"


class Flow:
    """Turns an external engine's chunks into the deltas of one request, and checks their versions. Pure.

    `version`: what its tokens are sampled with, where the engine does not say.

    `known`: the versions that may be seen; it grows while requests run. `older`: those among them that the engine was
    rolled back to; any other that is older than `version` is an error.
    """

    def __init__(
        self, request: GenerationRequest, version: int, known: Collection[int], older: Collection[int] = ()
    ) -> None:
        self._request = request
        self._version = version
        self._known = known
        self._older = older
        # Greedy samples are equal and are generated once (`generate_body`).
        self._copies = request.n if request.sampling.temperature == 0.0 else 1
        self._sampled = [0] * (request.n // self._copies)
        self._buffered: dict[int, GenerationDelta] = {}
        self._open = set(range(request.n))
        self.tokens = 0
        """Sampled so far, over all samples."""

    @property
    def ended(self) -> bool:
        """Every sample has its last delta."""
        return not self._open

    @property
    def begun(self) -> int:
        """Samples that have tokens and are not finished."""
        generating = [index for index, count in enumerate(self._sampled) if count]
        return min(len(generating) * self._copies, len(self._open))

    def take(self, chunk: EngineChunk) -> list[GenerationDelta]:
        """The deltas that are due. Raises OtherWeightsError and WireError."""
        deltas = [delta for choice in chunk.choices for delta in self._choice(choice)]
        if not self._request.prompt_logprobs:
            return deltas
        # Of one sample, in a whole answer. Where it was broken off before its first token, there are none.
        return [
            replace(delta, prompt_logprobs=prompt_logprobs(self._request, chunk.prompt_logprobs))
            if delta.token_ids
            else delta
            for delta in deltas
        ]

    def abort(self) -> list[GenerationDelta]:
        """The last delta of every unfinished sample: the buffered tokens, and `abort`."""
        return [self._end(index) for index in sorted(self._open)]

    def _choice(self, choice: EngineChoice) -> list[GenerationDelta]:
        if not 0 <= choice.index < len(self._sampled) or choice.index * self._copies not in self._open:
            raise WireError(f"request {self._request.request_id}: the engine answered a sample {choice.index} too much")
        self._check_versions(choice)
        sampled = to_delta(self._request, choice, self._version)
        self._sampled[choice.index] += len(sampled.token_ids)
        copies = range(choice.index, choice.index + 1) if self._copies == 1 else range(self._copies)
        self.tokens += len(sampled.token_ids) * len(copies)
        return [due for index in copies if (due := self._buffer(replace(sampled, index=index))) is not None]

    def _buffer(self, delta: GenerationDelta) -> GenerationDelta | None:
        """Add to a sample's buffered tokens; all of them once a delta is due."""
        buffered = self._buffered.pop(delta.index, None)
        whole = delta if buffered is None else join(buffered, delta)
        if whole.finish_reason is not None:
            self._open.discard(whole.index)
            return whole
        if self._request.stream and whole.token_ids and len(whole.token_ids) >= self._request.delta_every:
            return whole
        self._buffered[whole.index] = whole
        return None

    def _end(self, index: int) -> GenerationDelta:
        self._open.discard(index)
        buffered = self._buffered.pop(index, None)
        if buffered is not None:
            return replace(buffered, finish_reason="abort")
        nothing: list[list[tuple[int, float]]] | None = [] if self._request.top_logprobs else None
        return GenerationDelta(self._request.request_id, index, [], [], [], "abort", nothing)

    def _check_versions(self, choice: EngineChoice) -> None:
        """The versions that the engine reports must be those that were committed."""
        if choice.version_spans is not None:
            seen = {span.version for span in choice.version_spans}
            strange = {str(version) for version in seen if not self._expected(version)}
        else:
            labels = {span.version for span in choice.weight_versions or ()}
            strange = {label for label in labels if not _is(label, self._version)}
        if strange:
            raise OtherWeightsError(
                f"the engine sampled with version {', '.join(sorted(strange))} where {self._version} was committed",
                "send the request to another server; this one takes none until a commit",
            )

    def _expected(self, version: int) -> bool:
        return version in self._known and (version >= self._version or version in self._older)


def _is(label: str, version: int) -> bool:
    try:
        return version_number(label) == version
    except ValueError:
        return False

"""vLLM's token route (tokens in, tokens out): captured in a session, and how calls and engine requests translate.

GenerateCall ── to_request ──► GenerationRequest ──► engine ──► deltas ──► full_answer | StreamEncoder ──► bytes
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import msgspec

from rollout_server.completions.base import AnswerContext, Context, fit, why_no_prefix, written
from rollout_server.completions.prompt_logprobs import check_scored, told_logprobs
from rollout_server.completions.samples import Sample, collect_samples
from rollout_server.completions.sampling import choose_sampling
from rollout_server.engines.base import Engine, GenerationDelta, GenerationRequest
from services.http.app import DONE, error_event
from services.policies.continuation import Versions, joined_versions
from services.wire import vllm_api
from services.wire.errors import ContextLengthError, RollmeshError, UnsupportedParameterError
from services.wire.sampling import SamplingParams
from services.wire.trajectory import VersionSpan


class GenerateCalls:
    """Answers token calls over one engine. `model`: the name that answers carry."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model

    async def produce(self, call: vllm_api.GenerateCall, answer_context: AnswerContext) -> None:
        """Generate and capture the answer to `call`.

        Raises UnsupportedParameterError, ContextLengthError, BudgetSpentError, and what the engine raises.
        """
        session, call_id, answer = answer_context.session, answer_context.call_id, answer_context.answer
        wished = call.sampling_params
        check_scored(wished.prompt_logprobs, n=wished.n, stream=bool(call.stream), session=True)
        longest = self._engine.max_model_len
        asked = to_request(call, call_id, longest)
        parent = session.capture.find(call.token_ids)
        context = Context(
            call.token_ids, parent, None if parent is not None else why_no_prefix(session, call.token_ids)
        )
        sampling = choose_sampling(session.terms.sampling, wished, wished.max_tokens, (), longest)
        request = replace(asked, sampling=fit(session, sampling, [context], asked.n, longest))
        fields = AnswerFields.of(call, self._model, self._engine.eos_token_ids)
        encoder = StreamEncoder(request, fields) if request.stream else None

        def piece(sample: Sample[None], _: None, grown: int) -> None:
            # The last chunk of a sample waits until the sample is captured: the next call may follow it at once.
            if encoder is not None and sample.finish_reason is None:
                answer_context.show(encoder.chunk(_delta(call_id, sample, len(sample.token_ids) - grown)))
                sent[sample.index] = len(sample.token_ids)

        sent = [0] * request.n
        with session.reserving(request.n * request.sampling.max_tokens):
            samples = await collect_samples(answer_context.generate(request), request.n, _Unread, piece)
            # Captured only once a client listens: this one, or its retry.
            await answer.heard()
        if encoder is None:
            whole = [_delta(call_id, sample, 0) for sample in samples]
            answer.stage(encode_answer(full_answer(request, whole, fields, answer_context.created)))
        else:
            for sample in samples:
                answer.stage(encoder.chunk(_delta(call_id, sample, sent[sample.index])))
            answer.stage(encoder.end())
        await answer_context.settle(written(context, samples), sampling, samples[0].finish_reason)


class _Unread:
    """Tokens are answered as they are: no text is made of them, and none ends an answer."""

    consumed = 0
    stopped: str | None = None

    def feed(self, token_ids: Sequence[int]) -> None:
        """Nothing to read."""


def _delta(call_id: str, sample: Sample[None], start: int) -> GenerationDelta:
    """What a sample holds from token `start` on."""
    return GenerationDelta(
        request_id=call_id,
        index=sample.index,
        token_ids=sample.token_ids[start:],
        logprobs=sample.logprobs[start:],
        versions=[_after(span, start) for span in sample.versions if span.start + span.length > start],
        finish_reason=sample.finish_reason,
        top_logprobs=sample.top_logprobs[start:] or None,
    )


def _after(span: VersionSpan, start: int) -> VersionSpan:
    """The part of a span from token `start` on, counted from there."""
    begin = max(span.start, start)
    return span.over(begin - start, span.start + span.length - begin)


_UNSUPPORTED_SAMPLING = (
    "stop",
    "structured_outputs",
    "guided_decoding",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logprob_token_ids",
    "prompt_logprob_token_ids",
    "thinking_token_budget",
    "repetition_detection",
    "trace_decode_token_ids",
    "extra_args",
    "watermarking",
)
_UNSUPPORTED = ("features", "content_parts", "kv_transfer_params", "ec_transfer_params")
_encoder = msgspec.json.Encoder()
_Choice = TypeVar("_Choice", bound=vllm_api.Choice)


@dataclass(frozen=True)
class AnswerFields:
    """Which fields the answer to a call has besides tokens. `eos_token_ids`: the model's own."""

    model: str
    eos_token_ids: tuple[int, ...]
    logprobs: int | None
    prompt: bool
    usage: bool = False
    usage_always: bool = False
    spans: bool = False

    @classmethod
    def of(cls, call: vllm_api.GenerateCall, model: str, eos_token_ids: tuple[int, ...]) -> AnswerFields:
        options = call.stream_options
        usage = options is not None and bool(options.include_usage)
        return cls(
            model=model,
            eos_token_ids=eos_token_ids,
            logprobs=call.sampling_params.logprobs,
            prompt=bool(call.return_token_ids),
            usage=usage,
            usage_always=usage and options is not None and bool(options.continuous_usage_stats),
            spans=options is not None and bool(options.version_spans),
        )


def to_request(call: vllm_api.GenerateCall, request_id: str, max_model_len: int) -> GenerationRequest:
    """The engine's request. Raises UnsupportedParameterError, and ContextLengthError for a prompt that leaves no room."""
    _refuse_unsupported(call)
    asked = call.sampling_params
    check_scored(asked.prompt_logprobs, n=asked.n, stream=bool(call.stream), session=False)
    room = max_model_len - len(call.token_ids)
    if room < 1:
        raise ContextLengthError(len(call.token_ids), max_model_len)
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=call.token_ids,
        sampling=_sampling(asked, room),
        n=asked.n,
        stream=bool(call.stream),
        # With one entry of `top_logprobs` it is the sampled token's: nothing to ask the engine for.
        top_logprobs=asked.logprobs if asked.logprobs is not None and asked.logprobs > 1 else 0,
        cache_salt=call.cache_salt,
        resumed=call.resumed,
        first_index=call.first_index,
        prompt_logprobs=asked.prompt_logprobs is not None,
    )


def full_answer(
    request: GenerationRequest, samples: Sequence[GenerationDelta], fields: AnswerFields, created: int
) -> vllm_api.GenerateAnswer:
    """The answer in one piece. `samples`: one whole delta a sample (`engines.base.collect`); `created`: Unix seconds."""
    sampled = sum(len(sample.token_ids) for sample in samples)
    return vllm_api.GenerateAnswer(
        request_id=request.request_id,
        created=created,
        model=fields.model,
        choices=[
            _choice(vllm_api.Choice, request, sample, fields, _starts(sample.versions), len(sample.token_ids))
            for sample in samples
        ],
        usage=_usage(len(request.prompt_token_ids), sampled),
        prompt_token_ids=request.prompt_token_ids if fields.prompt else None,
        prompt_logprobs=told_logprobs(request, samples[0]) if request.prompt_logprobs else None,
    )


def encode_answer(body: vllm_api.GenerateAnswer) -> bytes:
    return _encoder.encode(body)


class StreamEncoder:
    """Server-sent events of one request: `chunk` for each delta, then `end`; after an error, `failure` instead."""

    def __init__(self, request: GenerationRequest, fields: AnswerFields) -> None:
        self._request = request
        self._fields = fields
        self._prompt_due = fields.prompt
        self._versions: list[Versions] = [[] for _ in range(request.n)]
        self._sampled = [0] * request.n

    def chunk(self, delta: GenerationDelta) -> bytes:
        """One event, or none for a delta that says nothing."""
        if not delta.token_ids and delta.finish_reason is None:
            return b""
        before = self._sampled[delta.index]
        versions = joined_versions(self._versions[delta.index], before, _starts(delta.versions))
        self._versions[delta.index] = versions
        self._sampled[delta.index] = sampled = before + len(delta.token_ids)
        whole = versions if delta.finish_reason is not None else None
        choice = _choice(vllm_api.ChunkChoice, self._request, delta, self._fields, whole, sampled)
        if self._fields.spans:
            choice.version_spans = delta.versions
        body = vllm_api.GenerateChunk(request_id=self._request.request_id, choices=[choice])
        if self._prompt_due:
            body.prompt_token_ids, self._prompt_due = self._request.prompt_token_ids, False
        if self._fields.usage_always:
            body.usage = _usage(len(self._request.prompt_token_ids), self._sampled[delta.index])
        return _event(_encoder.encode(body))

    def end(self) -> bytes:
        """The usage, if asked for, and the end of the stream."""
        if not self._fields.usage:
            return DONE
        usage = _usage(len(self._request.prompt_token_ids), sum(self._sampled))
        body = vllm_api.GenerateChunk(request_id=self._request.request_id, choices=[], usage=usage)
        return _event(_encoder.encode(body)) + DONE

    def failure(self, error: RollmeshError) -> bytes:
        """What went wrong after the stream began, and its end."""
        return error_event(error) + DONE


def _refuse_unsupported(call: vllm_api.GenerateCall) -> None:
    found = [name for name in _UNSUPPORTED if getattr(call, name) is not None]
    for name in _UNSUPPORTED_SAMPLING:
        value = getattr(call.sampling_params, name)
        # Empty lists, texts and objects ask for nothing; a zero may well.
        if value is not None and value is not False and value not in ("", [], {}):
            found.append(f"sampling_params.{name}")
    if call.output_mode not in (None, "tokens"):
        found.append("output_mode")
    if found:
        raise UnsupportedParameterError(f"{', '.join(found)}: not supported here", "leave it out")


def _sampling(asked: vllm_api.SamplingCall, room: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=room if asked.max_tokens is None else asked.max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k or -1,
        min_p=asked.min_p,
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=asked.repetition_penalty,
        min_tokens=asked.min_tokens,
        seed=None if asked.seed == -1 else asked.seed,
        stop_token_ids=tuple(asked.stop_token_ids or ()),
        ignore_eos=asked.ignore_eos,
    )


def _choice(
    kind: type[_Choice],
    request: GenerationRequest,
    delta: GenerationDelta,
    fields: AnswerFields,
    versions: Versions | None,
    sampled: int,
) -> _Choice:
    """`versions`: of the sample from its first token on, once it has ended with `sampled` tokens in all."""
    choice = kind(index=delta.index, token_ids=delta.token_ids, finish_reason=delta.finish_reason)
    if fields.logprobs is not None:
        choice.logprobs = _logprobs(delta, max(fields.logprobs, 1))
    if versions is not None:
        choice.stop_reason = _stop_reason(request, delta, fields.eos_token_ids)
        choice.weight_versions = vllm_api.weight_spans(versions, sampled)
        choice.policy_versions = list(versions)
    return choice


def _stop_reason(request: GenerationRequest, delta: GenerationDelta, eos_token_ids: Iterable[int]) -> int | None:
    if delta.finish_reason != "stop" or not delta.token_ids:
        return None
    last = delta.token_ids[-1]
    return None if last in eos_token_ids and not request.sampling.ignore_eos else last


def _logprobs(delta: GenerationDelta, entries: int) -> vllm_api.Logprobs:
    if delta.top_logprobs is None:
        content = []
        for token, logprob in zip(delta.token_ids, delta.logprobs, strict=True):
            name = f"token_id:{token}"
            own = vllm_api.TokenLogprob(name, token, logprob, None)
            content.append(vllm_api.SampledLogprob(name, token, logprob, None, [own]))
        return vllm_api.Logprobs(content)
    return vllm_api.Logprobs(
        [
            _with_alternatives(token, logprob, likeliest, entries)
            for token, logprob, likeliest in zip(delta.token_ids, delta.logprobs, delta.top_logprobs, strict=True)
        ]
    )


def _with_alternatives(
    token: int, logprob: float, likeliest: Sequence[tuple[int, float]], entries: int
) -> vllm_api.SampledLogprob:
    """In vLLM's order: the sampled token first, then the others by rank, `entries` in all."""
    rank = None
    others = []
    for place, (other, chance) in enumerate(likeliest, start=1):
        if other == token:
            rank = place
        else:
            others.append(vllm_api.TokenLogprob(f"token_id:{other}", other, chance, place))
    name = f"token_id:{token}"
    return vllm_api.SampledLogprob(
        name, token, logprob, rank, [vllm_api.TokenLogprob(name, token, logprob, rank), *others][:entries]
    )


def _starts(spans: Sequence[VersionSpan]) -> list[tuple[int, int]]:
    return [(span.version, span.start) for span in spans]


def _usage(prompt: int, sampled: int) -> vllm_api.Usage:
    return vllm_api.Usage(prompt_tokens=prompt, total_tokens=prompt + sampled, completion_tokens=sampled)


def _event(body: bytes) -> bytes:
    return b"data: " + body + b"\n\n"

"""One call of vLLM's token route in a session: the client's tokens are the prompt, what is drawn is captured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollout_server.dialect.caller import Context, fit, why_no_prefix, written
from rollout_server.dialect.drawing import Sample, draw
from rollout_server.dialect.making import Making
from rollout_server.dialect.sampling_choice import choose_sampling
from rollout_server.engines.base import Engine, GenerationDelta
from rollout_server.generate_wire import StreamEncoder, Wanted, encode_answer, full_answer, to_request
from services.wire.engine_api import GenerateCall
from services.wire.trajectory import VersionSpan


class GenerateCalls:
    """Answers token calls over one engine. `model`: the name that answers carry."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._engine = engine
        self._model = model

    async def produce(self, call: GenerateCall, making: Making) -> None:
        """Draw and capture the answer to `call`.

        Raises UnsupportedParameterError, ContextLengthError, BudgetSpentError, and what the engine raises.
        """
        session, call_id, answer = making.session, making.call_id, making.answer
        longest = self._engine.max_model_len
        asked = to_request(call, call_id, longest)
        parent = session.capture.find(call.token_ids)
        context = Context(
            call.token_ids, parent, None if parent is not None else why_no_prefix(session, call.token_ids)
        )
        wished = call.sampling_params
        sampling = choose_sampling(session.terms.sampling, wished, wished.max_tokens, (), longest)
        request = replace(asked, sampling=fit(session, sampling, [context], asked.n, longest))
        wanted = Wanted.of(call, self._model, self._engine.eos_token_ids)
        encoder = StreamEncoder(request, wanted) if request.stream else None

        def piece(sample: Sample[None], _: None, grown: int) -> None:
            # The last chunk of a sample waits until the sample is captured: the next call may follow it at once.
            if encoder is not None and sample.finish_reason is None:
                answer.put(encoder.chunk(_delta(call_id, sample, len(sample.token_ids) - grown)))
                sent[sample.index] = len(sample.token_ids)

        sent = [0] * request.n
        with session.reserving(request.n * request.sampling.max_tokens):
            samples = await draw(making.draw(request), request.n, _Unread, piece)
            # An answer that nobody hears is none: it is captured for whoever asks for it again.
            await answer.heard()
        if encoder is None:
            whole = [_delta(call_id, sample, 0) for sample in samples]
            answer.stage(encode_answer(full_answer(request, whole, wanted, making.created)))
        else:
            for sample in samples:
                answer.stage(encoder.chunk(_delta(call_id, sample, sent[sample.index])))
            answer.stage(encoder.end())
        await making.settle(written(context, samples), sampling, samples[0].finish_reason)


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

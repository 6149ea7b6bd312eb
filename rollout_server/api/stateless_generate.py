"""vLLM's token route outside any session: tokens in, tokens out, nothing of it is captured or trained."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, cast

from fastapi import Request, Response

from rollout_server.api.routes import ERRORS
from rollout_server.completions.resumable import UntilAccepting
from rollout_server.completions.scoring import score
from rollout_server.completions.tokens import AnswerFields, StreamEncoder, encode_answer, full_answer, to_request
from rollout_server.engines.base import Engine, EngineCrashedError, GenerationDelta, collect
from services.http.streaming import EventStream, LastChunk
from services.http.struct_answer import schema_of
from services.http.while_connected import while_connected
from services.wire.errors import RollmeshError
from services.wire.vllm_api import GenerateAnswer, GenerateCall

GENERATE_ANSWERS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with `stream`, events that each hold a chunk of it, and `data: [DONE]`",
        "content": {
            "application/json": {"schema": schema_of(GenerateAnswer)},
            "text/event-stream": {},
        },
    },
    **ERRORS,
}


async def generate_stateless(
    engine: Engine,
    model: str,
    on_crash: Callable[[RollmeshError], None],
    until_accepting: UntilAccepting,
    call: GenerateCall,
    request: Request,
) -> Response:
    """Generate continuations of `token_ids`. Hanging up aborts the request. `model`: the name that answers carry."""
    asked = to_request(call, call.request_id or uuid.uuid4().hex, engine.max_model_len)
    fields = AnswerFields.of(call, model, engine.eos_token_ids)
    if asked.prompt_logprobs:
        scored = await while_connected(request, score(engine, asked, until_accepting))
        body = encode_answer(full_answer(asked, [scored], fields, int(time.time())))
        return Response(body, media_type="application/json")
    deltas = cast("AsyncGenerator[GenerationDelta, None]", engine.generate(asked))
    if not asked.stream:
        async with aclosing(deltas):
            samples = await while_connected(request, collect(deltas))
        body = encode_answer(full_answer(asked, samples, fields, int(time.time())))
        return Response(body, media_type="application/json")
    encoder = StreamEncoder(asked, fields)
    try:
        # Before the answer begins: what is refused is refused with its status, not inside a stream.
        first = await while_connected(request, _next(deltas))
    except BaseException:
        await deltas.aclose()
        raise
    return EventStream(_events(encoder, first, deltas, on_crash))


async def _next(deltas: AsyncIterator[GenerationDelta]) -> GenerationDelta:
    return await anext(deltas)


async def _events(
    encoder: StreamEncoder,
    first: GenerationDelta,
    deltas: AsyncGenerator[GenerationDelta, None],
    on_crash: Callable[[RollmeshError], None],
) -> AsyncGenerator[bytes, None]:
    async with aclosing(deltas):
        try:
            yield encoder.chunk(first)
            async for delta in deltas:
                yield encoder.chunk(delta)
        except RollmeshError as error:
            if isinstance(error, EngineCrashedError):
                on_crash(error)
            yield encoder.failure(error)
            return
        yield LastChunk(encoder.end())

"""The OpenAI API's routes: under `/sessions/{session_id}`, and at the root where key or header names the session."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from hashlib import blake2b
from typing import Any

from fastapi import APIRouter, Request, Response

from rollout_server.api.request_names import call_name, name_session
from rollout_server.api.stateless_generate import GENERATE_ANSWERS, generate_stateless
from rollout_server.api.streaming import BrokenOffError, EventStream, while_connected
from rollout_server.api.typed_route import ERRORS, TypedRoute, answer
from rollout_server.completions.base import AnswerContext, new_call_id
from rollout_server.server import RolloutServer
from rollout_server.sessions.responses import Answer, Answers, RequestKey
from rollout_server.sessions.session import Session
from services.http.app import error_event
from services.wire.errors import NotReadyError, RollmeshError, UnauthenticatedError, UsageError
from services.wire.openai_api import ChatCall, ChatCompletion, Completion, CompletionCall
from services.wire.vllm_api import GenerateCall, ModelCard, ModelList

_LONGEST_KEY = 255
_EVENTS: dict[str, Any] = {"text/event-stream": {}}
_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer; with `stream`, server-sent events and `data: [DONE]`", "content": _EVENTS},
    **ERRORS,
}


def completion_routes(server: RolloutServer) -> APIRouter:
    """Chat and text completions, and the token route in a session."""
    router = APIRouter(route_class=TypedRoute, tags=["openai"])
    started = int(time.time())
    patience_s = server.plan.settings.rollout.retry_patience_s

    async def find(request: Request, named: str | None) -> Session:
        parts = server.parts()
        name = parts.access.find_session(request, named)
        if name is None:
            raise UnauthenticatedError(
                "this call names no session",
                "use the base_url or the api_key that POST /sessions answered, or the header X-Session-ID",
            )
        await parts.takeover.hold_session(name)
        server.check_taking_calls()
        name_session(name, parts.engine.policy_version)
        return parts.registry.find_session(name)

    async def respond(
        request: Request,
        session: Session,
        kind: str,
        stream: bool,
        call_id: str,
        produce: Callable[[AnswerContext], Awaitable[None]],
    ) -> Response:
        found = await server.parts().answer_service.ask(session, await _marks(request, kind), call_id, produce)
        answers = session.memory.answers
        if not stream:
            with answers.listening(found, patience_s):
                body = await while_connected(request, found.whole())
            return Response(body, media_type="application/json")
        with answers.listening(found, patience_s):
            # What is refused is refused with its status, not inside a stream.
            await while_connected(request, found.begun())
        return EventStream(_events(answers, found, patience_s, named=call_name(request) is not None))

    async def chat(request: Request, named: str | None, call: ChatCall) -> Response:
        session = await find(request, named)
        calls = await server.parts().completions.chat()
        produce = lambda making: calls.produce(call, making)  # noqa: E731
        return await respond(request, session, "chat", bool(call.stream), new_call_id("chatcmpl"), produce)

    async def complete(request: Request, named: str | None, call: CompletionCall) -> Response:
        session = await find(request, named)
        calls = await server.parts().completions.completions()
        produce = lambda making: calls.produce(call, making)  # noqa: E731
        return await respond(request, session, "text", bool(call.stream), new_call_id("cmpl"), produce)

    @router.post("/v1/chat/completions", response_model=ChatCompletion, responses=_STREAMED)
    async def chat_by_key(call: ChatCall, request: Request) -> Response:
        """A chat completion in the session that the key or `X-Session-ID` names."""
        return await chat(request, None, call)

    @router.post("/sessions/{session_id}/v1/chat/completions", response_model=ChatCompletion, responses=_STREAMED)
    async def chat_in_session(session_id: str, call: ChatCall, request: Request) -> Response:
        """A chat completion. Every sampled token is captured; token fields are answered only when asked for."""
        return await chat(request, session_id, call)

    @router.post("/v1/completions", response_model=Completion, responses=_STREAMED)
    async def complete_by_key(call: CompletionCall, request: Request) -> Response:
        """A text completion in the session that the key or `X-Session-ID` names."""
        return await complete(request, None, call)

    @router.post("/sessions/{session_id}/v1/completions", response_model=Completion, responses=_STREAMED)
    async def complete_in_session(session_id: str, call: CompletionCall, request: Request) -> Response:
        """A text completion. Every sampled token is captured; token fields are answered only when asked for."""
        return await complete(request, session_id, call)

    async def generate(request: Request, session: Session, call: GenerateCall) -> Response:
        calls = server.parts().completions.tokens
        call_id = call.request_id or new_call_id("gen")
        produce = lambda making: calls.produce(call, making)  # noqa: E731
        return await respond(request, session, "tokens", bool(call.stream), call_id, produce)

    @router.post("/inference/v1/generate", response_class=Response, responses=GENERATE_ANSWERS)
    async def generate_by_key(call: GenerateCall, request: Request) -> Response:
        """vLLM's token route. Where the key or `X-Session-ID` names a session here it is captured, elsewhere it is not."""
        parts = server.parts()
        name = parts.access.find_session(request, None, "reading")
        if name is not None:
            await parts.takeover.hold_session(name)
        # Trainers' clients send session ids of their own making: they name nothing here.
        if name is None or parts.registry.get_session(name) is None:
            # A session's key opens that session and nothing else, also when it is forgotten.
            parts.access.require_agent(request, "reading")
            return await generate_stateless(server, call, request)
        parts.access.require_session(request, name)
        server.check_taking_calls()
        return await generate(request, parts.registry.find_session(name), call)

    @router.post("/sessions/{session_id}/inference/v1/generate", response_class=Response, responses=GENERATE_ANSWERS)
    async def generate_in_session(session_id: str, call: GenerateCall, request: Request) -> Response:
        """vLLM's token route, captured: the tokens given are the prompt, those sampled are trained."""
        return await generate(request, await find(request, session_id), call)

    @router.get("/sessions/{session_id}/v1/models", response_model=ModelList, responses=ERRORS)
    async def models_in_session(session_id: str, request: Request) -> Response:
        """The model that answers."""
        await find(request, session_id)
        return answer(model_list(server, started))

    return router


async def _events(answers: Answers, found: Answer, patience_s: float, *, named: bool) -> AsyncGenerator[bytes, None]:
    """`named`: the call came from a gateway, which can ask another server."""
    with answers.listening(found, patience_s):
        try:
            async for chunk in found.stream():
                yield chunk
        except RollmeshError as error:
            if named and isinstance(error, NotReadyError):
                raise BrokenOffError from error
            yield error_event(error)


async def _marks(request: Request, kind: str) -> RequestKey:
    """How the call is marked as one that may be, or is, a repetition."""
    body = blake2b(kind.encode() + b"\0" + await request.body(), digest_size=16).digest()
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= _LONGEST_KEY:
        raise UsageError(f"an Idempotency-Key of {len(key)} characters", f"give 1 to {_LONGEST_KEY}")
    name = call_name(request)
    counted = request.headers.get("x-stainless-retry-count", "0")
    return RequestKey(body, key, int(counted) if counted.isdecimal() and len(counted) < 4 else 0, name)


# `GET /v1/models`: the one model that this server serves, as OpenAI lists models, with vLLM's `max_model_len`.


def model_list(server: RolloutServer, created: int) -> ModelList:
    """The list, also for routes under a session. `created`: Unix seconds. Raises NotReadyError before the engine is up."""
    model = server.plan.model
    card = ModelCard(id=model.name, created=created, root=str(model), max_model_len=server.parts().engine.max_model_len)
    return ModelList(data=[card])


def model_routes(server: RolloutServer) -> APIRouter:
    router = APIRouter(tags=["engine"], responses=ERRORS)
    created = int(time.time())

    @router.get("/v1/models")
    async def models(request: Request) -> ModelList:
        """The model. Its `id` is the folder's name; calls may name any model and get this one."""
        server.parts().access.require_any(request)
        return model_list(server, created)

    return router

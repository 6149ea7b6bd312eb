"""The OpenAI API's routes: under `/sessions/{session_id}`, and at the root where key or header names the session."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response

from rollout_server.api.request_names import call_name, name_session
from rollout_server.api.routes import ERRORS, Ready, checked
from rollout_server.api.stateless_generate import GENERATE_ANSWERS, generate_stateless
from rollout_server.completions.base import AnswerContext, AnswerService, new_call_id
from rollout_server.completions.resumable import UntilAccepting
from rollout_server.completions.service import CompletionServices
from rollout_server.engines.base import Engine
from rollout_server.lifecycle.takeover import Takeover
from rollout_server.sessions.access import Access
from rollout_server.sessions.group import GroupRegistry
from rollout_server.sessions.responses import Answer, Answers, RequestKey
from rollout_server.sessions.session import Session
from services.http.app import error_event
from services.http.streaming import BrokenOffError, EventStream, LastChunk
from services.http.typed_route import answer
from services.http.while_connected import while_connected
from services.wire.errors import NotReadyError, RollmeshError, UnauthenticatedError, UsageError
from services.wire.openai_api import ChatCall, ChatCompletion, Completion, CompletionCall
from services.wire.vllm_api import GenerateCall, ModelCard, ModelList

_LONGEST_KEY = 255
_EVENTS: dict[str, Any] = {"text/event-stream": {}}
_STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer; with `stream`, server-sent events and `data: [DONE]`", "content": _EVENTS},
    **ERRORS,
}


def completion_routes(
    access: Ready[Access],
    takeover: Ready[Takeover],
    groups: Ready[GroupRegistry],
    completions: Ready[CompletionServices],
    answer_service: Ready[AnswerService],
    engine: Engine,
    model: Path,
    check_taking_calls: Callable[[], None],
    until_accepting: UntilAccepting,
    on_crash: Callable[[RollmeshError], None],
    patience_s: float,
    check_body: Callable[[bytes], None],
) -> APIRouter:
    """Chat and text completions, and the token route. `patience_s`: how long an answer waits for its caller's retry.

    `check_body`: refuses bodies before they are parsed.
    """
    router = APIRouter(route_class=checked(check_body), tags=["openai"])
    started = int(time.time())

    async def find(request: Request, named: str | None) -> Session:
        name = access().find_session(request, named)
        if name is None:
            raise UnauthenticatedError(
                "this call names no session",
                "use the base_url or the api_key that POST /sessions answered, or the header X-Session-ID",
            )
        await takeover().hold_session(name)
        check_taking_calls()
        name_session(name, engine.policy_version)
        return groups().find_session(name)

    async def respond(
        request: Request,
        session: Session,
        kind: str,
        stream: bool,
        call_id: str,
        produce: Callable[[AnswerContext], Awaitable[None]],
    ) -> Response:
        found = await answer_service().ask(session, _request_key(request, kind), call_id, produce)
        answers = session.memory.answers
        if not stream:
            with answers.listening(found, patience_s):
                body = await while_connected(request, found.whole())
                found.deliver()
            return Response(body, media_type="application/json")
        with answers.listening(found, patience_s):
            # What is refused is refused with its status, not inside a stream.
            await while_connected(request, found.begun())
        return EventStream(_events(answers, found, patience_s, named=call_name(request) is not None))

    async def chat(request: Request, named: str | None, call: ChatCall) -> Response:
        session = await find(request, named)
        calls = await completions().chat()
        produce = lambda context: calls.produce(call, context)  # noqa: E731
        return await respond(request, session, "chat", bool(call.stream), new_call_id("chatcmpl"), produce)

    async def complete(request: Request, named: str | None, call: CompletionCall) -> Response:
        session = await find(request, named)
        calls = await completions().text()
        produce = lambda context: calls.produce(call, context)  # noqa: E731
        return await respond(request, session, "text", bool(call.stream), new_call_id("cmpl"), produce)

    @router.post("/v1/chat/completions", response_model=ChatCompletion, responses=_STREAMED)
    async def chat_by_key(call: ChatCall, request: Request) -> Response:
        """A chat completion in the session that the key or `X-Session-ID` names."""
        return await chat(request, None, call)

    @router.post("/sessions/{session_id}/v1/chat/completions", response_model=ChatCompletion, responses=_STREAMED)
    async def chat_in_session(session_id: str, call: ChatCall, request: Request) -> Response:
        """A chat completion. Every sampled token is captured; token fields are answered only when asked for."""
        return await chat(request, session_id, call)

    async def named_here(request: Request) -> Session | None:
        """The session here that the key or header names; None for a call outside sessions, once its caller may make it."""
        name = access().find_session(request, None, "reading")
        if name is not None:
            await takeover().hold_session(name)
        # Trainers' clients send session ids of their own making: they name nothing here.
        if name is None or groups().get_session(name) is None:
            # A session's key opens that session and nothing else, also when it is forgotten.
            access().require_agent(request, "reading")
            return None
        access().require_session(request, name)
        return groups().find_session(name)

    @router.post("/v1/completions", response_model=Completion, responses=_STREAMED)
    async def complete_by_key(call: CompletionCall, request: Request) -> Response:
        """A text completion in the session that the key or `X-Session-ID` names, or with `prompt_logprobs` outside any."""
        if call.prompt_logprobs is None or await named_here(request) is not None:
            return await complete(request, None, call)
        check_taking_calls()
        del request.state.body
        scoring = await completions().scoring()
        body = await while_connected(request, scoring.answer(call, until_accepting))
        return Response(body, media_type="application/json")

    @router.post("/sessions/{session_id}/v1/completions", response_model=Completion, responses=_STREAMED)
    async def complete_in_session(session_id: str, call: CompletionCall, request: Request) -> Response:
        """A text completion. Every sampled token is captured; token fields are answered only when asked for."""
        return await complete(request, session_id, call)

    async def generate(request: Request, session: Session, call: GenerateCall) -> Response:
        calls = completions().tokens
        call_id = call.request_id or new_call_id("gen")
        produce = lambda context: calls.produce(call, context)  # noqa: E731
        return await respond(request, session, "tokens", bool(call.stream), call_id, produce)

    @router.post("/inference/v1/generate", response_class=Response, responses=GENERATE_ANSWERS)
    async def generate_by_key(call: GenerateCall, request: Request) -> Response:
        """vLLM's token route. Where the key or `X-Session-ID` names a session here it is captured, elsewhere it is not."""
        session = await named_here(request)
        if session is None:
            return await generate_stateless(engine, model.name, on_crash, until_accepting, call, request)
        check_taking_calls()
        return await generate(request, session, call)

    @router.post("/sessions/{session_id}/inference/v1/generate", response_class=Response, responses=GENERATE_ANSWERS)
    async def generate_in_session(session_id: str, call: GenerateCall, request: Request) -> Response:
        """vLLM's token route, captured: the tokens given are the prompt, those sampled are trained."""
        return await generate(request, await find(request, session_id), call)

    @router.get("/sessions/{session_id}/v1/models", response_model=ModelList, responses=ERRORS)
    async def models_in_session(session_id: str, request: Request) -> Response:
        """The model that answers."""
        await find(request, session_id)
        return answer(model_list(engine, model, started))

    return router


async def _events(answers: Answers, found: Answer, patience_s: float, *, named: bool) -> AsyncGenerator[bytes, None]:
    """`named`: the call came from a gateway, which can ask another server."""
    with answers.listening(found, patience_s):
        try:
            async for chunk in found.stream():
                # What is there of an answer that has ended is all of it.
                yield LastChunk(chunk) if found.ended and found.error is None else chunk
                if not found.delivered:
                    found.deliver()
        except RollmeshError as error:
            if named and isinstance(error, NotReadyError):
                raise BrokenOffError from error
            yield error_event(error)


def _request_key(request: Request, kind: str) -> RequestKey:
    """By what a retry of the call is recognised. Lets go of the body: what is asked for has been read."""
    body = blake2b(kind.encode() + b"\0", digest_size=16)
    body.update(request.state.body)
    del request.state.body
    key = request.headers.get("idempotency-key")
    if key is not None and not 0 < len(key) <= _LONGEST_KEY:
        raise UsageError(f"an Idempotency-Key of {len(key)} characters", f"give 1 to {_LONGEST_KEY}")
    name = call_name(request)
    counted = request.headers.get("x-stainless-retry-count", "0")
    return RequestKey(body.digest(), key, int(counted) if counted.isdecimal() and len(counted) < 4 else 0, name)


def model_list(engine: Engine, model: Path, created: int) -> ModelList:
    """The one model that this server serves, as OpenAI lists models, with vLLM's `max_model_len`.

    `created`: Unix seconds. For an engine that is up.
    """
    card = ModelCard(id=model.name, created=created, root=str(model), max_model_len=engine.max_model_len)
    return ModelList(data=[card])


def model_routes(access: Ready[Access], engine: Engine, model: Path) -> APIRouter:
    """`GET /v1/models`, for every key."""
    router = APIRouter(tags=["engine"], responses=ERRORS)
    created = int(time.time())

    @router.get("/v1/models")
    async def models(request: Request) -> ModelList:
        """The model. Its `id` is the folder's name; calls may name any model and get this one."""
        access().require_any(request)
        return model_list(engine, model, created)

    return router

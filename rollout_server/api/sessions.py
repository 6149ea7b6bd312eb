"""The session API: open, read, reward, finish, abort (bodies in `services.wire.session_api`)."""

from __future__ import annotations

import re
from collections.abc import Callable

from fastapi import APIRouter, Request, Response

from rollout_server.api.request_names import call_name, name_version
from rollout_server.api.routes import ERRORS, Ready, RolloutRoute
from rollout_server.engines.base import Engine
from rollout_server.lifecycle.finish import Finisher
from rollout_server.lifecycle.open import SessionOpener
from rollout_server.lifecycle.takeover import Takeover
from rollout_server.sessions.access import Access
from rollout_server.sessions.group import GroupRegistry
from rollout_server.sessions.session import Session, SessionEnd
from services.http.typed_route import answer
from services.http.while_connected import while_connected
from services.wire.errors import NotFoundError, UsageError
from services.wire.gateway_api import BASE_URL_HEADER
from services.wire.session_api import (
    FinishSession,
    GiveReward,
    OpenSession,
    SessionFinished,
    SessionOpened,
    SessionStatus,
)

_ADDRESS = re.compile(r"https?://[^\s/?#@]{1,255}/?")


def session_routes(
    access: Ready[Access],
    opener: Ready[SessionOpener],
    takeover: Ready[Takeover],
    groups: Ready[GroupRegistry],
    finisher: Ready[Finisher],
    engine: Engine,
    check_taking_calls: Callable[[], None],
    url: str,
) -> APIRouter:
    """Routes that environments call; a session's own key opens its status and heartbeat. `url`: of this server."""
    router = APIRouter(
        prefix="/sessions",
        route_class=RolloutRoute,
        tags=["sessions"],
        responses=ERRORS,
    )

    @router.post(
        "",
        status_code=201,
        response_model=SessionOpened,
        responses={200: {"model": SessionOpened, "description": "This session was opened before with the same body"}},
    )
    async def open_session(call: OpenSession, request: Request) -> Response:
        """Open a session. Its `base_url` and `api_key` let any OpenAI client generate in it."""
        access().require_agent(request)
        check_taking_calls()
        session, new = await while_connected(request, opener().open(call, call_name(request)))
        opened = SessionOpened(
            session_id=session.session_id,
            group_id=session.group_id,
            ordinal=session.ordinal,
            member=session.member,
            base_url=f"{_called_address(request) or url}/sessions/{session.session_id}/v1",
            api_key=access().keys.issue(session.session_id),
            policy_version=engine.policy_version,
        )
        return answer(opened, status_code=201 if new else 200)

    @router.get("/{session_id}", response_model=SessionStatus)
    async def read_session(session_id: str, request: Request) -> Response:
        """The session's status."""
        access().require_session(request, session_id)
        return answer(_status(await _find(takeover(), session_id), engine))

    @router.post("/{session_id}/heartbeat", response_model=SessionStatus)
    async def heartbeat(session_id: str, request: Request) -> Response:
        """Keep an open session from expiring for another idle time."""
        access().require_session(request, session_id)
        session = await takeover().open_session(session_id)
        session.check_open()
        session.touch()
        return answer(_status(session, engine))

    @router.post("/{session_id}/reward", response_model=SessionStatus)
    async def give_reward(session_id: str, call: GiveReward, request: Request) -> Response:
        """Reward the session, or one call of it. Giving a reward again replaces it."""
        access().require_agent(request)
        session = await takeover().open_session(session_id)
        session.check_open()
        if call.call_id is not None and call.call_id not in session.memory.calls:
            raise NotFoundError(f"session {session_id} has no answer {call.call_id!r}", "give the `id` of an answer")
        await finisher().reward(session, call)
        session.touch()
        return answer(_status(session, engine))

    @router.post("/{session_id}/finish", response_model=SessionFinished)
    async def finish_session(session_id: str, call: FinishSession, request: Request) -> Response:
        """Write the trajectory to the stream, exactly once however often this is called."""
        access().require_agent(request)
        name_version(engine.policy_version)
        found = await takeover().session(session_id)
        if isinstance(found, Session):
            await found.memory.answers.give_up_unheard()
            found.check_may_end()
            if call.reward is not None:
                await finisher().reward(found, GiveReward(reward=call.reward, components=call.components))
            elif call.components:
                raise UsageError("components without a reward", "give both, or neither")
            end = await finisher().finish_session(found)
        elif found is None:
            end = await finisher().finished_before(session_id)
        elif found.state == "finished":
            end = found
        else:
            raise found.refuse()
        return answer(
            SessionFinished(
                session_id=session_id,
                stream_id=end.stream_id,
                reward=end.reward or 0.0,
                segments=end.segments,
                sampled_tokens=end.sampled,
                finish_reason=end.finish_reason,
            )
        )

    @router.post("/{session_id}/abort", response_model=SessionStatus)
    async def abort_session(session_id: str, request: Request) -> Response:
        """Give the session up: its calls end, nothing of it is trained. Repeating it changes nothing."""
        access().require_agent(request)
        found = await _find(takeover(), session_id)
        if isinstance(found, Session):
            name_version(engine.policy_version)
            found = await finisher().abort(found)
        if found.state != "aborted":
            raise found.refuse()
        return answer(_status(found, engine))

    @router.delete("/{session_id}", status_code=204)
    async def delete_session(session_id: str, request: Request) -> Response:
        """Forget the session; one that is open is aborted first."""
        access().require_agent(request)
        found = await _find(takeover(), session_id)
        if isinstance(found, Session):
            await finisher().abort(found)
        groups().forget_session(session_id)
        return Response(status_code=204)

    return router


def _called_address(request: Request) -> str | None:
    """Where the agent's call came in, if that was a gateway."""
    address = request.headers.get(BASE_URL_HEADER)
    return address.rstrip("/") if address is not None and _ADDRESS.fullmatch(address) else None


async def _find(takeover: Takeover, session_id: str) -> Session | SessionEnd:
    found = await takeover.session(session_id)
    if found is None:
        raise NotFoundError(f"no session {session_id!r} on this server", "it never was here, or ended long ago")
    return found


def _status(session: Session | SessionEnd, engine: Engine) -> SessionStatus:
    if isinstance(session, SessionEnd):
        return SessionStatus(
            session_id=session.session_id,
            group_id=session.group_id,
            ordinal=session.ordinal,
            member=session.member,
            state=session.state,
            calls=session.answers,
            calls_in_flight=0,
            sampled_tokens=session.sampled,
            segments=session.segments,
            reward=session.reward,
            stream_id=session.stream_id,
            policy_version=engine.policy_version,
            expires_in_s=None,
            metadata=dict(session.metadata),
        )
    expires_in_s = session.expires_in_s()
    return SessionStatus(
        session_id=session.session_id,
        group_id=session.group_id,
        ordinal=session.ordinal,
        member=session.member,
        state="open",
        calls=session.capture.answers,
        calls_in_flight=session.calls_in_flight + session.taking_turn,
        sampled_tokens=session.capture.sampled,
        segments=len(session.capture.segments()),
        reward=session.rewards.total if session.rewards.given else None,
        stream_id=None,
        policy_version=engine.policy_version,
        expires_in_s=expires_in_s if expires_in_s < float("inf") else None,
        metadata=dict(session.terms.metadata),
    )

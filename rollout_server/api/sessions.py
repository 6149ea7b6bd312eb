"""The session API: open, look, reward, finish, give up (bodies in `services.wire.session_api`)."""

from __future__ import annotations

import re

from fastapi import APIRouter, Request, Response

from rollout_server.api.request_names import call_name, name_version
from rollout_server.api.streaming import while_connected
from rollout_server.api.typed_route import ERRORS, TypedRoute, answer
from rollout_server.journal.records import Rewarded
from rollout_server.journal.replay import apply_reward
from rollout_server.server import Parts, RolloutServer
from rollout_server.sessions.session import Session, SessionEnd
from services.wire.errors import ConflictError, NotFoundError, UsageError
from services.wire.gateway_api import BASE_URL_HEADER
from services.wire.session_api import (
    FinishSession,
    GiveReward,
    OpenSession,
    SessionFinished,
    SessionOpened,
    SessionStatus,
)
from services.wire.trajectory import decode_trajectory

_ADDRESS = re.compile(r"https?://[^\s/?#@]{1,255}/?")


def session_routes(server: RolloutServer) -> APIRouter:
    """Routes that environments call; a session's own key opens its status and heartbeat."""
    router = APIRouter(
        prefix="/sessions",
        route_class=TypedRoute,
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
        """Open a session. Its `base_url` and `api_key` make any OpenAI client speak in it."""
        parts = server.parts()
        parts.access.require_agent(request)
        server.check_taking_calls()
        session, new = await while_connected(request, parts.opener.open(call, call_name(request)))
        opened = SessionOpened(
            session_id=session.session_id,
            group_id=session.group_id,
            ordinal=session.ordinal,
            member=session.member,
            base_url=f"{_called_address(request) or server.plan.url}/sessions/{session.session_id}/v1",
            api_key=parts.access.keys.issue(session.session_id),
            policy_version=parts.engine.policy_version,
        )
        return answer(opened, status_code=201 if new else 200)

    @router.get("/{session_id}", response_model=SessionStatus)
    async def read_session(session_id: str, request: Request) -> Response:
        """How the session stands."""
        parts = server.parts()
        parts.access.require_session(request, session_id)
        return answer(_status(parts, await _find(parts, session_id)))

    @router.post("/{session_id}/heartbeat", response_model=SessionStatus)
    async def heartbeat(session_id: str, request: Request) -> Response:
        """Keep an open session from expiring for another idle time."""
        parts = server.parts()
        parts.access.require_session(request, session_id)
        await parts.takeover.hold_session(session_id)
        session = parts.registry.find_session(session_id)
        session.check_open()
        session.touch()
        return answer(_status(parts, session))

    @router.post("/{session_id}/reward", response_model=SessionStatus)
    async def give_reward(session_id: str, call: GiveReward, request: Request) -> Response:
        """Reward the session, or one call of it. Giving a reward again replaces it."""
        parts = server.parts()
        parts.access.require_agent(request)
        await parts.takeover.hold_session(session_id)
        session = parts.registry.find_session(session_id)
        session.check_open()
        if call.call_id is not None and call.call_id not in session.memory.calls:
            raise NotFoundError(f"session {session_id} has no answer {call.call_id!r}", "give the `id` of an answer")
        await _reward(parts, session, call)
        session.touch()
        return answer(_status(parts, session))

    @router.post("/{session_id}/finish", response_model=SessionFinished)
    async def finish_session(session_id: str, call: FinishSession, request: Request) -> Response:
        """Write the trajectory to the stream, exactly once however often this is called."""
        parts = server.parts()
        parts.access.require_agent(request)
        name_version(parts.engine.policy_version)
        await parts.takeover.hold_session(session_id)
        found = parts.registry.get_session(session_id)
        if isinstance(found, Session):
            await found.memory.answers.give_up_unheard()
            found.check_may_end()
            if call.reward is not None:
                await _reward(parts, found, GiveReward(reward=call.reward, components=call.components))
            elif call.components:
                raise UsageError("components without a reward", "give both, or neither")
            end = await parts.finisher.finish_session(found)
        else:
            end = await _finished_before(parts, session_id, found)
        return answer(
            SessionFinished(
                session_id=session_id,
                stream_id=end.stream_id,
                reward=end.reward or 0.0,
                segments=end.segments,
                sampled_tokens=end.sampled,
            )
        )

    @router.post("/{session_id}/abort", response_model=SessionStatus)
    async def abort_session(session_id: str, request: Request) -> Response:
        """Give the session up: its calls end, nothing of it is trained. Repeating it changes nothing."""
        parts = server.parts()
        parts.access.require_agent(request)
        found = await _find(parts, session_id)
        if isinstance(found, Session):
            name_version(parts.engine.policy_version)
            found = await _abort(parts, found)
        if found.state != "aborted":
            raise found.refuse()
        return answer(_status(parts, found))

    @router.delete("/{session_id}", status_code=204)
    async def delete_session(session_id: str, request: Request) -> Response:
        """Forget the session; one that is open is aborted first."""
        parts = server.parts()
        parts.access.require_agent(request)
        found = await _find(parts, session_id)
        if isinstance(found, Session):
            await _abort(parts, found)
        parts.registry.forget_session(session_id)
        return Response(status_code=204)

    return router


def _called_address(request: Request) -> str | None:
    """Where the agent's call came in, if that was a gateway."""
    address = request.headers.get(BASE_URL_HEADER)
    return address.rstrip("/") if address is not None and _ADDRESS.fullmatch(address) else None


async def _reward(parts: Parts, session: Session, given: GiveReward) -> None:
    record = Rewarded(
        session_id=session.session_id, value=given.reward, components=given.components, call_id=given.call_id
    )
    await parts.journal.append(session.group_id, record, lambda: apply_reward(session, record))


async def _find(parts: Parts, session_id: str) -> Session | SessionEnd:
    await parts.takeover.hold_session(session_id)
    found = parts.registry.get_session(session_id)
    if found is None:
        raise NotFoundError(f"no session {session_id!r} on this server", "it never was here, or ended long ago")
    return found


async def _abort(parts: Parts, session: Session) -> SessionEnd:
    if session.ending:
        raise ConflictError(f"session {session.session_id} is being ended", "wait for its answer")
    return await parts.finisher.abandon(session, "aborted")


async def _finished_before(parts: Parts, session_id: str, end: SessionEnd | None) -> SessionEnd:
    """A finish that is repeated, perhaps to a server that was restarted in between."""
    if end is not None:
        if end.state != "finished":
            raise end.refuse()
        return end
    stream_id = await parts.ledger.stream_id_of(session_id)
    if stream_id is None:
        raise NotFoundError(f"no session {session_id!r} on this server", "it never was here, or ended long ago")
    entry = await parts.log.one(stream_id)
    if entry is None:
        raise NotFoundError(f"the trajectory of session {session_id!r} was trimmed", "it was finished long ago")
    trajectory = decode_trajectory(entry.payload)
    return SessionEnd(
        session_id=session_id,
        group_id=trajectory.group_id,
        ordinal=trajectory.group_ordinal,
        member=trajectory.member,
        state="finished",
        reward=trajectory.reward,
        stream_id=stream_id,
        answers=0,
        sampled=trajectory.sampled_tokens(),
        segments=len(trajectory.segments),
        metadata=trajectory.metadata,
        ended_at=0.0,
    )


def _status(parts: Parts, session: Session | SessionEnd) -> SessionStatus:
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
            policy_version=parts.engine.policy_version,
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
        policy_version=parts.engine.policy_version,
        expires_in_s=expires_in_s if expires_in_s < float("inf") else None,
        metadata=dict(session.terms.metadata),
    )

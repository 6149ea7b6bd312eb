"""Routes that read: tokens or messages of a session, the state of a group, finished trajectories in their order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from redis.exceptions import RedisError

from rollout_server.api.routes import ERRORS, Ready
from rollout_server.chat.tokenizer import Renderer
from rollout_server.lifecycle.takeover import Takeover
from rollout_server.sessions.access import Access
from rollout_server.sessions.capture import Node, leaves
from rollout_server.sessions.group import Ended, Group, GroupRegistry
from rollout_server.sessions.session import Session, SessionEnd
from services.run_store.ledger import Ledger
from services.run_store.stream import StreamEntry, TrajectoryLog
from services.wire.errors import NotFoundError, NotReadyError, SessionConcludedError
from services.wire.packed import unpack_logprobs, unpack_mask, unpack_tokens
from services.wire.session_api import (
    GroupState,
    SegmentTokens,
    SiblingState,
    TrajectoryMessages,
    TrajectoryPage,
    TrajectorySummary,
    TrajectoryTokens,
)
from services.wire.trajectory import Segment, Trajectory, decode_trajectory

_POLL_S = 0.05
StreamId = Annotated[
    str, Query(pattern=r"^[0-9]{1,18}-[0-9]{1,18}$", description="A stream id, `0-0` for the beginning")
]


def trajectory_routes(
    access: Ready[Access],
    takeover: Ready[Takeover],
    groups: Ready[GroupRegistry],
    renderer: Ready[Renderer],
    ledger: Ready[Ledger],
    log: Ready[TrajectoryLog],
) -> APIRouter:
    router = APIRouter(tags=["sessions"], responses=ERRORS)

    @router.get("/sessions/{session_id}/trajectory")
    async def read_trajectory(
        session_id: str, request: Request, format: Literal["tokens", "messages"] = "tokens"
    ) -> TrajectoryTokens | TrajectoryMessages:
        """What was captured so far, or what was finished, as token lists; as messages only while the session is open."""
        access().require_session(request, session_id)
        found = await takeover().session(session_id)
        if isinstance(found, Session):
            return (
                as_messages(found, renderer())
                if format == "messages"
                else as_tokens(session_id, found.capture.segments())
            )
        if format == "messages" and found is not None:
            raise SessionConcludedError(f"session {session_id} has ended", "ask for format=tokens")
        stream_id = await ledger().stream_id_of(session_id) if found is None else found.stream_id
        entry = None if stream_id is None else await log().one(stream_id)
        if entry is None:
            raise NotFoundError(f"no tokens of session {session_id!r} are kept", "ask before it ends or is trimmed")
        return as_tokens(session_id, decode_trajectory(entry.payload).segments)

    @router.get("/groups/{group_id}")
    async def read_group(group_id: str, request: Request) -> GroupState:
        """Which siblings of a group there are, and which trajectories are missing."""
        access().require_agent(request)
        await takeover().hold_group(group_id)
        group = groups().get_open(group_id)
        if group is not None:
            return _state(group_id, group, group.sessions.values())
        ended = groups().find_ended(group_id)
        if ended is None:
            raise NotFoundError(f"no group {group_id!r} on this server", "it never was here, or ended long ago")
        return _state(group_id, ended, ended.siblings)

    @router.get("/trajectories")
    async def read_trajectories(
        request: Request,
        after: StreamId = "0-0",
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        wait_s: Annotated[float, Query(ge=0.0, le=60.0, description="Wait so long for a first one")] = 0.0,
    ) -> TrajectoryPage:
        """Finished trajectories of the run, of all its servers, in the order of their completion."""
        access().require_agent(request)
        ends = time.monotonic() + wait_s
        while True:
            entries = await _entries(log(), after, limit)
            if entries or time.monotonic() >= ends or await request.is_disconnected():
                break
            await asyncio.sleep(_POLL_S)
        summaries = [summarise(entry.stream_id, decode_trajectory(entry.payload)) for entry in entries]
        return TrajectoryPage(trajectories=summaries, next_after=entries[-1].stream_id if entries else after)

    return router


async def _entries(log: TrajectoryLog, after: str, limit: int) -> list[StreamEntry]:
    try:
        return await log.after(after, limit)
    except RedisError as error:
        raise NotReadyError(f"the stream cannot be read ({error})", "try again") from error


def _state(group_id: str, group: Group | Ended, sessions: Iterable[Session | SessionEnd]) -> GroupState:
    known = [SiblingState(session_id=each.session_id, member=each.member, state=each.state) for each in sessions]
    never = [SiblingState(session_id=None, member=member, state="missing") for member in range(len(known), group.size)]
    siblings = known + never
    return GroupState(
        group_id=group_id,
        ordinal=group.ordinal,
        group_size=group.size,
        purpose=group.purpose,
        siblings=siblings,
        missing=[sibling.member for sibling in siblings if sibling.state != "finished"],
    )


def as_tokens(session_id: str, segments: Sequence[Segment]) -> TrajectoryTokens:
    return TrajectoryTokens(
        session_id=session_id,
        segments=[
            SegmentTokens(
                token_ids=unpack_tokens(segment.token_ids).tolist(),
                loss_mask=unpack_mask(segment.loss_mask).tolist(),
                logprobs=unpack_logprobs(segment.logprobs).tolist(),
                version_spans=[(span.start, span.length, span.version) for span in segment.version_spans],
                break_reason=segment.break_reason,
            )
            for segment in segments
        ],
    )


def as_messages(session: Session, renderer: Renderer) -> TrajectoryMessages:
    """A conversation for each way through the session's tree. What did not come as messages is shown as text."""
    conversations = [
        [message for node in way for message in _said(session, node, renderer)] for way in leaves(session.capture)
    ]
    return TrajectoryMessages(session_id=session.session_id, conversations=conversations)


def _said(session: Session, node: Node, renderer: Renderer) -> list[dict[str, object]]:
    kept = session.memory.said.get(node)
    if kept is not None:
        return msgspec.json.decode(kept.new, type=list[dict[str, object]])
    return [
        {"role": "user", "content": renderer.decode(node.prompt)},
        {"role": "assistant", "content": renderer.decode(node.sampled)},
    ]


def summarise(stream_id: str, trajectory: Trajectory) -> TrajectorySummary:
    """One line of `GET /trajectories`."""
    versions = [span.version for segment in trajectory.segments for span in segment.version_spans]
    return TrajectorySummary(
        stream_id=stream_id,
        session_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        group_ordinal=trajectory.group_ordinal,
        member=trajectory.member,
        env=trajectory.task,
        task_id=trajectory.task_id,
        reward=trajectory.reward,
        reward_components=trajectory.reward_components,
        segments=len(trajectory.segments),
        sampled_tokens=trajectory.sampled_tokens(),
        oldest_version=min(versions, default=None),
        newest_version=max(versions, default=None),
        finished_at=trajectory.finished_at,
        metadata=trajectory.metadata,
    )

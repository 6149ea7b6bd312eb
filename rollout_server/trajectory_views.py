"""A session's capture for people and tests: segments as plain lists, or as the messages that the agent saw."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rollout_server.capture import Node, leaves
from rollout_server.rendering import Renderer
from rollout_server.sessions import Session
from services.wire.packed import unpack_logprobs, unpack_mask, unpack_tokens
from services.wire.session_api import SegmentTokens, TrajectoryMessages, TrajectorySummary, TrajectoryTokens
from services.wire.trajectory import Segment, Trajectory


def as_tokens(session_id: str, segments: Sequence[Segment]) -> TrajectoryTokens:
    """Segments as lists of numbers."""
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
        {"role": "assistant", "content": renderer.decode(node.drawn)},
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

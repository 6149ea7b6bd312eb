"""A session's trajectory for the stream: its segments, rewards and terms. What no agent got is left out."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rollout_server.sessions.group import Group
from rollout_server.sessions.session import Session, SessionEnd
from services.wire.errors import ConflictError
from services.wire.trajectory import CallTime, RewardSpan, Trajectory


@dataclass(frozen=True)
class Origin:
    """Where trajectories come from. `tokenizer`: digest of the vocabulary that their ids are of."""

    run_id: str
    server_id: str
    tokenizer: str


def trajectory_of(origin: Origin, group: Group, session: Session) -> Trajectory:
    """What the session holds, as `Session.leave_out` left it. Raises ConflictError where no answer of it was given."""
    capture, terms = session.capture, session.terms
    if capture.answers == 0:
        what = "took no turn" if not capture.nodes else "took no turn whose answer anybody got"
        raise ConflictError(f"session {session.session_id} {what}", "let it take one, or give it up")
    layout = capture.layout()
    spans = [
        RewardSpan(*layout.positions[node], len(node.sampled), reward.value, reward.components)
        for call_id, reward in session.rewards.calls.items()
        for node in session.memory.calls.get(call_id, ())
        if node.sampled
    ]
    # Of one call there is nothing to compare; a tenth of what reading an entry costs is saved.
    times = (
        []
        if len(capture.nodes) < 2
        else [
            CallTime(*layout.positions[node], *node.times)
            for node in capture.nodes
            if node.times is not None and node.sampled and node in layout.positions
        ]
    )
    return Trajectory(
        run_id=origin.run_id,
        trajectory_id=session.session_id,
        group_id=group.group_id,
        group_ordinal=group.ordinal,
        group_size=group.size,
        member=session.member,
        task=terms.task,
        task_id=terms.task_id,
        segments=layout.segments,
        reward=session.rewards.total,
        reward_components=session.rewards.components,
        reward_spans=spans,
        call_times=times,
        samplings=capture.samplings,
        tokenizer=origin.tokenizer,
        server_id=origin.server_id,
        opened_at=group.opened_at,
        finished_at=time.time(),
        finish_reason=session.finish_reason,
        unrendered_tools=session.unrendered_tools,
        metadata=dict(terms.metadata),
        trace=terms.trace,
    )


def end_of(session_id: str, stream_id: str, trajectory: Trajectory) -> SessionEnd:
    """The end of a finished session, as its trajectory in the stream tells it."""
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
        finish_reason=trajectory.finish_reason,
    )

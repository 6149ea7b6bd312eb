"""HTTP bodies of the session API: one conversation of an agent with the policy, from its opening to its trajectory.

    POST /sessions ──► base_url + api_key ──► OpenAI API, any number of calls ──► /reward ──► /finish ──► stream id
                                                                              └──► /abort | idle | deadline

A session is a member of a group; `POST /groups` (bodies in `services.wire.rollout_api`) opens a whole group at once.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from services.wire.rollout_api import Body, Purpose, SamplingLimits

SessionId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]
"""Names a session or a group in URLs, headers and keys."""
FiniteFloat = Annotated[float, Field(allow_inf_nan=False)]
SessionState = Literal["open", "finished", "aborted", "expired", "dropped"]


class OpenSession(Body):
    """Open a session. The same `session_id` with the same body again answers 200 and the same session."""

    session_id: SessionId | None = None
    group_id: SessionId | None = None
    """Siblings name the same group; the first of them opens it. Left out: a group of its own."""
    group_size: int = Field(default=1, ge=1, le=1024)
    """Sessions in the group: all siblings say the same."""
    task_id: str = Field(default="", max_length=200)
    """Which problem of the environment this is; the environment's own name for it."""
    env: str = Field(default="agent", min_length=1, max_length=200)
    """The environment's name: the trajectory's `task`."""
    purpose: Purpose = "train"
    sampling_params: SamplingLimits = Field(default_factory=SamplingLimits)
    """What is set here wins over what the agent's calls say; of two `max_tokens` the smaller wins."""
    deadline_s: float | None = Field(default=None, gt=0.0, le=7 * 86400.0)
    """Seconds from now until the session expires, whatever goes on in it."""
    idle_timeout_s: float | None = Field(default=None, gt=0.0, le=86400.0)
    """Seconds without a call or heartbeat until it expires. Left out: the server's `rollout.group_timeout_s`."""
    max_tokens: int | None = Field(default=None, ge=1, le=1 << 30)
    """Tokens that may be sampled in the whole session."""
    metadata: dict[str, str] = Field(default_factory=dict, max_length=64)
    """Carried into the trajectory."""
    wait_s: float = Field(default=0.0, ge=0.0, le=60.0)
    """How long the server may hold the call until admission opens, before it answers 429."""


class SessionOpened(Body):
    session_id: str
    group_id: str
    ordinal: int
    """For `train`: the group's place in the run's order of opening, from 0. For `evaluate`: −1."""
    member: int
    """Which sibling of the group this is, 0 … group_size − 1."""
    base_url: str
    """Give it to an OpenAI client as `base_url`."""
    api_key: str
    """Give it to an OpenAI client as `api_key`; it opens this session and nothing else."""
    policy_version: int


class GiveReward(Body):
    """A reward for the session, or for one call of it. Giving it again replaces it."""

    reward: FiniteFloat
    components: dict[str, FiniteFloat] = Field(default_factory=dict, max_length=64)
    call_id: str | None = Field(default=None, max_length=200)
    """The `id` of a chat completion, completion or generate answer of this session. Left out: the session as a whole."""


class FinishSession(Body):
    """End the session and write its trajectory. A reward given here is the session's."""

    reward: FiniteFloat | None = None
    components: dict[str, FiniteFloat] = Field(default_factory=dict, max_length=64)


class SessionFinished(Body):
    session_id: str
    stream_id: str | None
    """Id of the trajectory's entry in the stream; None for `evaluate`."""
    reward: float
    segments: int
    sampled_tokens: int
    finish_reason: str = "stop"
    """Of its last answer; `length` where the limit of tokens cut it off."""


class SessionStatus(Body):
    """`GET /sessions/{id}`, and the answer to reward, heartbeat and abort."""

    session_id: str
    group_id: str
    ordinal: int
    member: int
    state: SessionState
    calls: int
    """Answers captured so far."""
    calls_in_flight: int
    sampled_tokens: int
    segments: int
    reward: float | None
    """Session reward plus the rewards of its calls; None while none was given."""
    stream_id: str | None
    policy_version: int
    expires_in_s: float | None
    """Seconds until it expires unless something happens; None when it has ended."""
    metadata: dict[str, str]


class SegmentTokens(Body):
    """`services.wire.trajectory.Segment` as lists. All lists but `version_spans` have one length."""

    token_ids: list[int]
    loss_mask: list[int]
    """1 where the policy sampled the token and it is trained in this segment."""
    logprobs: list[float]
    version_spans: list[tuple[int, int, int]]
    """(start, length, policy version)."""
    break_reason: str | None


class TrajectoryTokens(Body):
    """`GET /sessions/{id}/trajectory?format=tokens`."""

    session_id: str
    segments: list[SegmentTokens]


class TrajectoryMessages(Body):
    """`GET /sessions/{id}/trajectory?format=messages`: one conversation a segment, as the agent saw it."""

    session_id: str
    conversations: list[list[dict[str, object]]]


class SiblingState(Body):
    session_id: str | None
    """None: nobody has opened this sibling yet."""
    member: int
    state: SessionState | Literal["missing"]


class GroupState(Body):
    """`GET /groups/{id}`."""

    group_id: str
    ordinal: int
    group_size: int
    purpose: Purpose
    siblings: list[SiblingState]
    missing: list[int]
    """Members without a finished trajectory: never opened, still open, or lost."""


class TrajectorySummary(Body):
    """One finished trajectory, as it stands in the stream."""

    stream_id: str
    session_id: str
    group_id: str
    group_ordinal: int
    member: int
    env: str
    task_id: str
    reward: float
    reward_components: dict[str, float]
    segments: int
    sampled_tokens: int
    oldest_version: int | None
    newest_version: int | None
    finished_at: float
    """Unix seconds."""
    metadata: dict[str, str]


class TrajectoryPage(Body):
    """`GET /trajectories?after=`: in the order of their completion. Ask again with `after = next_after`."""

    trajectories: list[TrajectorySummary]
    next_after: str

"""HTTP bodies of the weight bus, and of the weight routes that every rollout server offers to it.

Weight routes of a rollout server (called by the bus only):

| route                  | body                     | answer        |
|------------------------|--------------------------|---------------|
| `POST /weights/stage`  | encoded Manifest (bytes) | StageAnswer   |
| `POST /weights/commit` | CommitCall               | CommitAnswer  |
| `GET /weights/digest`  |                          | DigestAnswer  |
"""

from __future__ import annotations

from services.policies.commit import EngineState, UpdateState
from services.wire.rollout_api import Body


class RegisterEngine(Body):
    """`POST /v1/engines`, repeated as the heartbeat that keeps the lease."""

    engine_id: str
    url: str
    run_id: str
    policy_version: int


class EngineRegistered(Body):
    lease_s: float
    """Heartbeat well within this, or the bus forgets the engine."""
    latest_version: int | None


class EngineView(Body):
    engine_id: str
    url: str
    policy_version: int
    lease_left_s: float


class EnginesView(Body):
    engines: list[EngineView]


class EngineProgress(Body):
    engine_id: str
    state: EngineState
    bytes_read: int = 0
    stage_ms: float = 0.0
    flip_ms: float = 0.0
    why: str | None = None
    """For `failed`: what the engine said."""


class UpdateView(Body):
    """`GET /v1/updates/{version}` (`?wait_s=` holds the call until the update has settled)."""

    version: int
    state: UpdateState
    root_digest: str
    engines: list[EngineProgress]
    publish_to_commit_ms: float | None = None


class StageAnswer(Body):
    version: int
    root_digest: str
    bytes_read: int
    seconds: float


class CommitCall(Body):
    version: int


class CommitAnswer(Body):
    version: int
    flip_ms: float
    requests_in_flight: int


class DigestAnswer(Body):
    version: int
    root_digest: str


class EngineDigest(Body):
    engine_id: str
    version: int
    """−1 for an engine that did not answer."""
    root_digest: str
    why: str | None = None
    """What an engine that could not be asked said."""


class VerifyView(Body):
    """`POST /v1/verify`: digests of what is really served. `match`: every engine serves the latest published bytes.

    Without a published version, or without an engine, there is nothing that could match.
    """

    version: int | None
    root_digest: str | None
    engines: list[EngineDigest]
    match: bool

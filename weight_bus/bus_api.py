"""HTTP bodies of the weight routes that every engine offers to the bus; the bus's own stand in `services.wire.weights_api`.

Weight routes of an engine (called by the bus only):

| route                    | body                     | answer        |
|--------------------------|--------------------------|---------------|
| `POST /weights/stage`    | encoded Manifest (bytes) | StageAnswer   |
| `POST /weights/commit`   | CommitCall               | CommitAnswer  |
| `POST /weights/rollback` | RollbackCall             | CommitAnswer  |
| `GET /weights/digest`    |                          | DigestAnswer  |
"""

from __future__ import annotations

from services.wire.rollout_api import Body


class StageAnswer(Body):
    """PREPARED. An engine of several ranks answers once all of them have staged the version."""

    version: int
    root_digest: str
    bytes_read: int
    seconds: float
    rank_digests: list[str] | None = None
    """The digest that each rank staged, where there are several; the bus checks that all are there and the same."""


class CommitCall(Body):
    version: int


class CommitAnswer(Body):
    version: int
    flip_ms: float
    requests_in_flight: int


class RollbackCall(Body):
    """`version`: the one to go back to, which must be the one served before."""

    version: int


class DigestAnswer(Body):
    version: int
    root_digest: str

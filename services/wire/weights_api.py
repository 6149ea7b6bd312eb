"""HTTP bodies of the weight bus that its clients need: what operators, the trainer and the engines send and read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from pydantic import Field

from services.wire.rollout_api import NO_OTHER_FIELDS, Body, TokenId

# States of a weight update.

EngineState = Literal[
    "pending", "staging", "prepared", "committing", "committed", "rolling_back", "rolled_back", "failed"
]
"""One engine within one update; `services.policies.fleet.commit` has the state diagram."""

UpdateState = Literal["staging", "held", "prepared", "committed", "failed", "superseded", "cancelled", "rolled_back"]
SETTLED: tuple[UpdateState, ...] = ("committed", "failed", "superseded", "cancelled", "rolled_back")
"""Nothing is being waited for any more."""

LAST_VERSION = (1 << 53) - 1
"""No version is higher: a number that every reader of JSON knows exactly, and that no run comes near."""

MemoryKind = Literal["DRAM", "VRAM"]
"""Where weights lie that an engine reads: the host's memory, or a GPU's, as NIXL calls them."""

FleetPolicyName = Literal["barrier", "rolling", "quorum"]
FLEET_POLICIES: tuple[FleetPolicyName, ...] = get_args(FleetPolicyName)

PauseMode = Literal["abort", "wait", "keep"]
"""vLLM's: end requests with what they have, let them end, or freeze them."""

EventKind = Literal[
    "joined",
    "left",
    "announced",
    "staging",
    "prepared",
    "committed",
    "failed",
    "held",
    "superseded",
    "cancelled",
    "rolled_back",
]


# Weight routes of an engine, which the bus calls. Results are dataclasses: the code that stages or flips
# makes them, msgspec carries them between the processes of an engine, pydantic to the bus; nobody copies their fields.
#
# | route                    | body                     | answer        |
# |--------------------------|--------------------------|---------------|
# | `POST /weights/stage`    | encoded Manifest (bytes) | StageAnswer   |
# | `POST /weights/commit`   | CommitCall               | CommitAnswer  |
# | `POST /weights/rollback` | RollbackCall             | CommitAnswer  |
# | `GET /weights/digest`    |                          | DigestAnswer  |


@dataclass(frozen=True)
class StageAnswer:
    """Result of a stage: the version lies whole and verified in shadow memory. `bytes_read`: what was transferred for it.

    `rank_digests`: the digest that each rank staged, where an engine has several; the bus checks that all are the same.
    `rank_bytes`: what of `bytes_read` each rank transferred.
    """

    __pydantic_config__ = NO_OTHER_FIELDS
    version: int
    root_digest: str
    bytes_read: int
    seconds: float
    rank_digests: list[str] | None = None
    rank_bytes: list[int] | None = None


@dataclass(frozen=True)
class CommitAnswer:
    """Result of a commit or rollback: the version is served. `flip_ms`: how long the engine generated nothing for it."""

    __pydantic_config__ = NO_OTHER_FIELDS
    version: int
    flip_ms: float
    requests_in_flight: int


@dataclass(frozen=True)
class DigestAnswer:
    """Root digest, as in the manifest, of the bytes that are really served as `version`."""

    __pydantic_config__ = NO_OTHER_FIELDS
    version: int
    root_digest: str


class CommitCall(Body):
    version: int


class RollbackCall(Body):
    """`version`: the one to go back to, which must be the one served before."""

    version: int


class RegisterEngine(Body):
    """`POST /v1/engines`, repeated as the heartbeat that keeps the lease."""

    engine_id: str = Field(min_length=1, max_length=256)
    url: str = Field(pattern=r"^https?://")
    """Where its `/weights/…` routes are."""
    run_id: str
    policy_version: int = Field(ge=0, le=LAST_VERSION)
    """What it serves at this moment."""
    staged_version: int | None = Field(default=None, ge=0, le=LAST_VERSION)
    """What lies whole in its shadow memory, ready to be committed."""
    ranks: int = Field(default=1, ge=1, le=1 << 16)
    """Processes that hold a part of the model each. Its answer to a stage speaks for all of them."""


class EngineRegistered(Body):
    lease_s: float
    """Heartbeat well within this, or the bus forgets the engine."""
    latest_version: int | None


class EngineView(Body):
    engine_id: str
    url: str
    policy_version: int
    lease_left_s: float
    staged_version: int | None = None
    ranks: int = 1


class EnginesView(Body):
    engines: list[EngineView]


class EngineProgress(Body):
    engine_id: str
    state: EngineState
    bytes_read: int = 0
    stage_ms: float = 0.0
    flip_ms: float = 0.0
    attempts: int = 0
    """How often it was asked to stage this version."""
    why: str | None = None
    """For `failed`: what the engine said."""


class UpdateView(Body):
    """`GET /v1/updates/{version}` (`?wait_s=` holds the call until nothing is waited for but an operator)."""

    version: int
    state: UpdateState
    root_digest: str
    """Empty where the bus never saw the manifest: a version that was rolled back to, published before the bus began."""
    engines: list[EngineProgress]
    publish_to_commit_ms: float | None = None
    policy: FleetPolicyName = "barrier"
    why: str | None = None
    """What the update as a whole failed of: a roll that stopped, a quorum that was missed."""


class VersionView(Body):
    version: int
    state: UpdateState
    root_digest: str
    kind: Literal["dense", "delta"] = "dense"
    base_version: int | None = None
    nbytes: int = 0
    served_by: list[str] = Field(default_factory=list)
    """Engines that serve it now, as far as the bus knows."""
    withdrawn: bool = False
    """Cancelled or rolled back: it is not offered again unless it is committed by hand."""


class VersionsView(Body):
    """`GET /v1/versions`, newest first; as many as the bus remembers."""

    latest: int | None
    """What engines that join are brought to."""
    versions: list[VersionView]
    newest: int = 0
    """The highest version that the bus has heard of: announced, also before it was started, or served by an engine."""
    newest_digest: str = ""
    """Root digest of `newest`; empty where the bus does not know it."""


class RollbackOrder(Body):
    """`POST /v1/rollback`. `version`: where to go back to; left out, the version that was committed before."""

    version: int | None = None


class RollbackView(Body):
    """`POST /v1/rollback`: how far it is; `GET /v1/updates/{version}` says how it goes on."""

    withdrawn: int
    update: UpdateView
    """The update that brings every engine back to the version before."""


class VerifyOrder(Body):
    """`POST /v1/verify`. Without a body: digests only."""

    canary: bool = False
    """Also generate tokens greedily at every engine and compare them."""
    prompts: list[list[TokenId]] | None = Field(default=None, max_length=64)
    """Token ids of the canary's prompts; left out: three short ones of small ids."""
    max_tokens: int = Field(default=8, ge=1, le=256)


class EngineDigest(Body):
    engine_id: str
    version: int
    """−1 for an engine that did not answer."""
    root_digest: str
    why: str | None = None
    """What an engine that could not be asked said."""


class CanaryTokens(Body):
    engine_id: str
    tokens: list[list[int]]
    """What it generated, prompt by prompt; empty if it could not."""
    why: str | None = None


class CanaryView(Body):
    """`agree`: every engine answered, and all with the same tokens."""

    prompts: list[list[int]]
    engines: list[CanaryTokens]
    agree: bool


class VerifyView(Body):
    """`POST /v1/verify`: digests of what is really served. `match`: every engine serves the latest published bytes.

    Without a published version, or without an engine, there is nothing that could match.
    """

    version: int | None
    root_digest: str | None
    engines: list[EngineDigest]
    match: bool
    canary: CanaryView | None = None


class PauseOrder(Body):
    """`POST /v1/pause`. `keep` freezes requests in flight, `wait` lets them end, `abort` ends them with what they have."""

    mode: PauseMode = "keep"


class EngineAnswer(Body):
    engine_id: str
    done: bool
    why: str | None = None


class FleetAnswer(Body):
    """`POST /v1/pause` and `/v1/resume`, engine by engine."""

    engines: list[EngineAnswer]


class PushSnapshot(Body):
    """`POST /v1/snapshots`: publish a folder of safetensors that the bus and the engines can read.

    Engines read it by path: each must trust the folder (`weights.file_root`) and see it under the same name. Where it fails
    it stays failed: the same version pushed again, or committed, asks for it again.
    """

    folder: str
    """Absolute."""
    version: int | None = Field(default=None, ge=0)
    """Left out: one more than the newest known version."""
    hold: bool = False
    """Stage only; `POST /v1/updates/{version}/commit` flips."""


class WeightEvent(Body):
    """One event of `GET /v1/events`. `id` goes back as `Last-Event-ID`; `at`: Unix seconds."""

    id: str
    at: float
    kind: EventKind
    version: int | None = None
    engine_id: str | None = None
    why: str | None = None

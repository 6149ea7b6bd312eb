"""Status report of a run: what `rollmesh status --json` prints."""

from __future__ import annotations

import msgspec

from services.policies.wait_causes import CauseKind, ProbeOutcome
from services.run_store.discovery import ServerState, ServiceKind
from services.run_store.status import TrainerStatus
from services.wire.run_metrics import EvaluationPoint


class ServiceView(msgspec.Struct, frozen=True, kw_only=True):
    """One service. The last eight are a rollout server's, as it last announced them; None for others."""

    name: str
    kind: ServiceKind
    url: str
    probe: ProbeOutcome
    """What became of asking it `/readyz`: `silent` took the connection or the deadline, and said nothing."""
    reasons: list[str]
    """What it says of not being ready."""
    alive: bool | None
    """Whether its lease lasts; None for one that holds none."""
    last_heard: float
    """Unix seconds."""
    incarnation: str | None = None
    """Another one after each start; None for one that does not announce itself."""
    state: ServerState | None = None
    policy_version: int | None = None
    running: int | None = None
    most_running: int | None = None
    """Samples that it generates at once."""
    kv_use: float | None = None
    """Share of the memory for keys and values that running samples hold; None where its engine does not tell."""
    waiting: int | None = None
    open_sessions: int | None = None
    open_groups: int | None = None


class GroupView(msgspec.Struct, frozen=True, kw_only=True):
    """An open group. `server`: who holds it now. `finished`: siblings that are in the stream."""

    group: str
    ordinal: int
    server: str
    opened_at: float
    finished: int


class CauseView(msgspec.Struct, frozen=True, kw_only=True):
    """Something that holds the run up, or will. `sure`: it was seen; else it is what fits best."""

    kind: CauseKind
    service: str | None
    since: float
    what: str
    sure: bool
    groups: list[GroupView]


class WaitView(msgspec.Struct, frozen=True, kw_only=True):
    """What a component has posted on the wait board. `since`: Unix seconds."""

    component: str
    waiting_for: str
    since: float


class QueueView(msgspec.Struct, frozen=True, kw_only=True):
    """The run's accounts. `in_stream`: trajectories that are neither trained nor dropped yet."""

    opened_groups: int
    open_groups: int
    dropped_groups: int
    published: int
    trained: int
    dropped: int
    in_stream: int
    asking_groups: int
    """That wait for admission."""
    concluded: bool
    unaccounted: int = 0
    """Trajectories and groups by which these accounts were wrong when they were last compared with the step log."""
    corrected: int = 0
    """By how many they were corrected in all."""


class StoreView(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that Redis holds, of all runs, and from how many on no group is admitted."""

    used_bytes: int
    most_bytes: int


class MeshReport(msgspec.Struct, frozen=True, kw_only=True):
    """`at`: Unix seconds. `unread`: parts that could not be had, and why. None for what is not there yet, or unread."""

    run_id: str
    at: float
    services: list[ServiceView]
    queue: QueueView | None
    trainer: TrainerStatus | None
    trainer_waits: WaitView | None
    waits: list[WaitView]
    evaluation: EvaluationPoint | None
    """The newest one beside training."""
    causes: list[CauseView]
    """Why the trainer waits, or will: the one that holds up most first."""
    unread: list[str]
    store: StoreView | None = None

    @property
    def lost(self) -> bool:
        """Whether nothing could be read: Redis is away, or has ended with the run."""
        return bool(self.unread) and self.queue is None and not self.services and not self.waits

    @property
    def well(self) -> bool:
        """Whether nothing sure is wrong, and all of it could be read."""
        return not self.unread and not any(cause.sure for cause in self.causes)

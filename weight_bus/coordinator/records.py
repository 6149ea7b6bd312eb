"""The coordinator's record of each update: manifest, times, the engines' results, and the views made of them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from services.policies.fleet.update import Progress, Update
from services.wire import weights_api
from weight_bus.manifest.manifest import Manifest


@dataclass
class EngineResults:
    """What one engine answered in one update. `stage_ms`: how long the bus waited for its answer to the stage."""

    staged: weights_api.StageAnswer | None = None
    stage_ms: float = 0.0
    committed: weights_api.CommitAnswer | None = None


@dataclass
class Record:
    """One version's update. `payload`: the encoded manifest for the engines; None where the bus never saw it."""

    update: Update
    announced: float
    manifest: Manifest | None = None
    payload: bytes | None = None
    resting: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while nothing but an operator is waited for."""
    commit_ms: float | None = None
    results: dict[str, EngineResults] = field(default_factory=dict)
    told: dict[str, weights_api.EngineState] = field(default_factory=dict)
    """The last state of each engine in the event log."""
    told_state: str = "staging"
    trace: str = ""
    """The trace context that it was announced in."""

    @property
    def root_digest(self) -> str:
        return "" if self.manifest is None else self.manifest.root_digest

    @property
    def nbytes(self) -> int:
        """Of the weights as a whole; 0 where the bus never saw the manifest."""
        return 0 if self.manifest is None else self.manifest.layout.total_bytes

    def results_of(self, engine_id: str) -> EngineResults:
        return self.results.setdefault(engine_id, EngineResults())

    def begin_again(self, update: Update, now: float) -> None:
        """Start the update of the same version over."""
        self.update, self.announced, self.commit_ms = update, now, None
        self.results, self.told, self.told_state = {}, {}, "staging"
        self.resting.clear()

    def view(self, policy: weights_api.FleetPolicyName) -> weights_api.UpdateView:
        return weights_api.UpdateView(
            version=self.update.version,
            state=self.update.state,
            root_digest=self.root_digest,
            engines=[self._progress(engine_id, progress) for engine_id, progress in self.update.progress.items()],
            publish_to_commit_ms=self.commit_ms,
            policy=policy,
            why=self.update.why,
        )

    def summary(self, served_by: list[str], *, withdrawn: bool) -> weights_api.VersionView:
        manifest = self.manifest
        return weights_api.VersionView(
            version=self.update.version,
            state=self.update.state,
            root_digest=self.root_digest,
            kind="dense" if manifest is None else manifest.kind,
            base_version=None if manifest is None else manifest.base_version,
            nbytes=0 if manifest is None else manifest.total_bytes,
            served_by=served_by,
            withdrawn=withdrawn,
        )

    def _progress(self, engine_id: str, progress: Progress) -> weights_api.EngineProgress:
        results = self.results.get(engine_id, EngineResults())
        return weights_api.EngineProgress(
            engine_id=engine_id,
            state=progress.state,
            bytes_read=0 if results.staged is None else results.staged.bytes_read,
            stage_ms=results.stage_ms,
            flip_ms=0.0 if results.committed is None else results.committed.flip_ms,
            attempts=progress.attempts,
            why=progress.why,
        )

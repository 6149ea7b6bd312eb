"""The life of a weight update through vLLM's routes: a state machine over the engine's stage and commit.

    unset ─ init ─► idle ─ start ─► started ─ update ─► staging ──► staged ─ finish ─► committing ──► idle
                     ▲                 ▲                   │ failed                        │ failed
                     │                 └───────────────────┴───────────────────────────────┘
                     └── init, from any state but staging and committing: an update half done is given up

Every other order is refused. Whatever fails, the old version goes on being served.
"""

from __future__ import annotations

from typing import Literal

from rollout_server.engines.base import CommitReport, Engine
from services.wire.errors import ConflictError

State = Literal["unset", "idle", "started", "staging", "staged", "committing"]
_NEXT: dict[State, str] = {
    "unset": "/init_weight_transfer_engine",
    "idle": "/start_weight_update",
    "started": "/update_weights",
    "staging": "the answer of /update_weights",
    "staged": "/finish_weight_update",
    "committing": "the answer of /finish_weight_update",
}


class WeightUpdate:
    """One update at a time. Used on the event loop only; each call takes its place in the order before it awaits."""

    def __init__(self) -> None:
        self._state: State = "unset"
        self._staged: int | None = None

    def init(self) -> None:
        """Begin anew."""
        if self._state in ("staging", "committing"):
            raise self._wrong("/init_weight_transfer_engine")
        self._state, self._staged = "idle", None

    def start(self) -> None:
        if self._state != "idle":
            raise self._wrong("/start_weight_update")
        self._state = "started"

    async def update(self, engine: Engine, manifest: bytes) -> int:
        """Stage what the manifest lists; returns its version. Raises ConflictError, and as `Engine.stage` does."""
        if self._state != "started":
            raise self._wrong("/update_weights")
        self._state = "staging"
        try:
            self._staged = (await engine.stage(manifest)).version
        except BaseException:
            self._state = "started"
            raise
        self._state = "staged"
        return self._staged

    async def finish(self, engine: Engine, weight_version: str | None) -> CommitReport:
        """Commit what was staged. Raises ConflictError, also for a `weight_version` that is another one."""
        if self._state != "staged" or self._staged is None:
            raise self._wrong("/finish_weight_update")
        if weight_version is not None and weight_version != str(self._staged):
            raise ConflictError(
                f"version {self._staged} is staged, not {weight_version!r}", "finish that one, or begin anew with init"
            )
        self._state = "committing"
        try:
            report = await engine.commit(self._staged)
        except BaseException:
            self._state = "started"
            raise
        self._state, self._staged = "idle", None
        return report

    def _wrong(self, call: str) -> ConflictError:
        return ConflictError(f"{call} is out of order (the update is {self._state})", f"next: {_NEXT[self._state]}")

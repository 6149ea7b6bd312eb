"""Findings of a mesh that runs, from its status report's causes. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Sized
from typing import Protocol

from services.policies.diagnosis.finding import Finding, error
from services.policies.wait_causes import CauseKind


class SeenCause(Protocol):
    """A cause as `services.policies.wait_causes` found it. `since`: Unix seconds."""

    @property
    def kind(self) -> CauseKind: ...
    @property
    def since(self) -> float: ...
    @property
    def what(self) -> str: ...
    @property
    def sure(self) -> bool: ...
    @property
    def groups(self) -> Sized: ...


_REMEDIES: dict[CauseKind, str] = {
    "gone": "see its log for why it ended; `rollmesh up` and `rollmesh serve` start it again, else start it yourself",
    "silent": "see whether its process is stopped or its host cut off; once it has ended, `rollmesh up` and `serve` start "
    "it again, and sessions of a rollout server go to another",
    "unheard": "see that it reaches Redis, and that its host is not overloaded",
    "not_ready": "do what it says; GET /readyz there lists the reasons",
    "store_full": "raise Redis' maxmemory or run_store.max_bytes, or lower trainer.checkpoint_every",
}


def of_causes(causes: Sequence[SeenCause], now: float) -> Iterator[Finding]:
    """The sure ones: those that are only likely hold in healthy runs too. `now`: Unix seconds."""
    for cause in causes:
        if cause.sure:
            held = f", holds {len(cause.groups)} groups" if cause.groups else ""
            yield error(
                "run-blocked",
                cause.what,
                f"{cause.kind} for {max(0.0, now - cause.since):.0f} s{held}",
                _REMEDIES.get(cause.kind, "see `rollmesh status`"),
            )


def of_unread(parts: Sequence[str]) -> Iterator[Finding]:
    if parts:
        what = f"{len(parts)} parts of the run's state could not be read"
        yield error("run-not-read", what, "; ".join(parts), "see that Redis runs, and is not overloaded")

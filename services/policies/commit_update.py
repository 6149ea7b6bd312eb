"""What the commit machine keeps of one update, and what it asks engines. Data only; `commit.CommitMachine` changes it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from services.wire.weight_states import SETTLED, EngineState, UpdateState

Phase = Literal["stage", "commit", "rollback"]


@dataclass(frozen=True)
class Ask:
    """What to ask an engine. Answer it through `CommitMachine.answer`; `serial` tells a late answer from the right one.

    `version`: what to stage or commit, or for a rollback the version to go back to.
    """

    engine_id: str
    phase: Phase
    version: int
    serial: int


@dataclass
class Progress:
    """How far one engine is with one update. `why`: what went wrong, for `failed`."""

    state: EngineState
    attempts: int = 0
    why: str | None = None
    serial: int = -1


@dataclass
class Update:
    """One version that engines are being brought to. Changed by the machine alone; anybody may read it.

    `withdraws`: the version that was cancelled or rolled back for this earlier one, to which engines go back.
    `hold`: nobody flips before an operator says so.
    """

    version: int
    hold: bool = False
    withdraws: int | None = None
    state: UpdateState = "staging"
    why: str | None = None
    progress: dict[str, Progress] = field(default_factory=dict)
    decided: set[str] | None = None
    """Engines whose flip was decided together; None before that. Whoever comes later flips as soon as it can."""
    stopped: dict[str, str] = field(default_factory=dict)
    """What stopped the roll, engine by engine."""

    @property
    def restores(self) -> bool:
        return self.withdraws is not None

    @property
    def settled(self) -> bool:
        return self.state in SETTLED


@dataclass
class Member:
    """A live engine. `previous`: what it served before its last flip, if the machine saw that."""

    policy_version: int
    previous: int | None = None
    doubts: int = 0
    """Heartbeats in a row that contradict `policy_version`."""

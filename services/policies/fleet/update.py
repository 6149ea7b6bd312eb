"""State of one weight update, and the questions to engines. Data only; `commit.CommitMachine` changes it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from services.policies.fleet.policy import FLIPPING, ON_THE_WAY, FleetPolicy
from services.wire.weights_api import SETTLED, EngineState, UpdateState

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
    `hold`: nobody flips before an operator says so. `final`: once it has failed nobody is asked for it any more.
    """

    version: int
    hold: bool = False
    final: bool = False
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

    @property
    def given_up(self) -> bool:
        """Whoever announced it was told that it failed: it moves again only where somebody asks for it again."""
        return self.final and self.state == "failed"


@dataclass
class Member:
    """A live engine. `previous`: what it served before its last flip, if the machine saw that."""

    policy_version: int
    previous: int | None = None
    doubts: int = 0
    """Heartbeats in a row that contradict `policy_version`."""


NOBODY = "no engine serves it: none is registered, or all have left; one that registers is brought to it"
_BUSY: tuple[EngineState, ...] = (*ON_THE_WAY, "prepared", *FLIPPING)


def in_state(update: Update, live: Collection[str], *states: EngineState) -> list[str]:
    """The live engines in one of these states."""
    return [engine_id for engine_id in live if update.progress[engine_id].state in states]


def finishing(update: Update, live: Collection[str]) -> bool:
    """Whether flips are under way, or decided and still to be made: nothing may come between."""
    decided = update.decided is not None and update.decided & set(in_state(update, live, "prepared"))
    return bool(decided) or bool(in_state(update, live, *FLIPPING))


def judge(update: Update, live: Collection[str], policy: FleetPolicy) -> None:
    """Set the update's state and why. Committed stays committed; failed until an engine has caught up with it, and for good
    where it is `final`."""
    if update.state == "committed" or update.given_up:
        return
    if _waited_for(update, live, policy):
        if not update.settled:
            update.state = "staging" if update.decided is None else "prepared"
        return
    stuck = next(iter(update.stopped.values()), None) or _missed(update, live, policy)
    serving = any(progress.state == "committed" for progress in update.progress.values())
    if update.hold and in_state(update, live, "prepared"):
        update.state, update.why = "held", None
    elif stuck is not None:
        update.state, update.why = "failed", stuck
    elif serving:
        update.state, update.why = "committed", None
    else:
        said = (progress.why for progress in update.progress.values() if progress.state == "failed")
        update.state = "failed"
        update.why = next(filter(None, said), None) or NOBODY


def _waited_for(update: Update, live: Collection[str], policy: FleetPolicy) -> Collection[str]:
    """The engines that the update cannot settle without."""
    if update.restores:
        return in_state(update, live, *_BUSY)
    if update.decided is not None:
        return update.decided & set(in_state(update, live, *_BUSY))
    may_flip = not update.hold and not update.stopped and _missed(update, live, policy) is None
    return in_state(update, live, *(_BUSY if may_flip else (*ON_THE_WAY, *FLIPPING)))


def _missed(update: Update, live: Collection[str], policy: FleetPolicy) -> str | None:
    if update.decided is not None or update.hold:
        return None
    return policy.missed([update.progress[engine_id].state for engine_id in live])

"""Where an update stands, from where its live engines stand: what it waits for, and what it comes to."""

from __future__ import annotations

from collections.abc import Collection

from services.policies.commit_update import Update
from services.policies.fleet_policy import FLIPPING, ON_THE_WAY, FleetPolicy
from services.wire.weight_states import EngineState

_BUSY: tuple[EngineState, ...] = (*ON_THE_WAY, "prepared", *FLIPPING)


def in_state(update: Update, live: Collection[str], *states: EngineState) -> list[str]:
    """The live engines in one of these states."""
    return [engine_id for engine_id in live if update.progress[engine_id].state in states]


def finishing(update: Update, live: Collection[str]) -> bool:
    """Whether flips are under way, or decided and still to be made: nothing may come between."""
    decided = update.decided is not None and update.decided & set(in_state(update, live, "prepared"))
    return bool(decided) or bool(in_state(update, live, *FLIPPING))


def judge(update: Update, live: Collection[str], policy: FleetPolicy) -> None:
    """Set the update's state and why. Committed stays committed; failed until an engine has caught up with it."""
    if update.state == "committed":
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
        update.state = "failed"


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

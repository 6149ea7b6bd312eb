"""Fleet policies: which of the engines that hold a new version whole may flip to it now.

    barrier   nobody flips before everybody can: once no engine is on its way any more, all prepared ones flip together
    quorum    once a share of the live engines is prepared, those flip; the others follow as they get there
    rolling   at most so many flip at a time; an engine that fails stops the roll until it, or an operator, mends it

Every engine stages at once whatever the policy: that takes nothing from what it serves. No clock, no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.wire.weights_api import FLEET_POLICIES, EngineState, FleetPolicyName

ON_THE_WAY: tuple[EngineState, ...] = ("pending", "staging")
FLIPPING: tuple[EngineState, ...] = ("committing", "rolling_back")


@dataclass(frozen=True)
class FleetPolicy:
    """`quorum`: share of the live engines, 0 < share ≤ 1. `at_once`: engines of a roll that may flip at the same time."""

    name: FleetPolicyName = "barrier"
    quorum: float = 0.5
    at_once: int = 1

    def __post_init__(self) -> None:
        if self.name not in FLEET_POLICIES:
            raise ValueError(f"no fleet policy {self.name!r}; known: {', '.join(FLEET_POLICIES)}")
        if not 0.0 < self.quorum <= 1.0:
            raise ValueError(f"a quorum is a share above 0 and up to 1, got {self.quorum}")
        if self.at_once < 1:
            raise ValueError(f"a roll needs at least one engine at once, got {self.at_once}")

    def needed(self, live: int) -> int:
        """How many of `live` engines make the quorum."""
        # Rounded first: a third of three is one, not the two that floating point makes of it.
        return max(1, math.ceil(round(self.quorum * live, 9)))

    def decides(self, states: Collection[EngineState]) -> bool:
        """Whether the prepared ones of the live engines (all their states) are now to flip, together and for good."""
        if "prepared" not in states or self.name == "rolling":
            return False
        if self.name == "barrier":
            return not any(state in ON_THE_WAY for state in states)
        return self._there(states) >= self.needed(len(states))

    def next_in_roll(self, prepared: Sequence[str], flipping: int, stopped: bool) -> Sequence[str]:
        """The engines of a roll that flip next; none while it is stopped."""
        return () if stopped else prepared[: max(0, self.at_once - flipping)]

    def missed(self, states: Collection[EngineState]) -> str | None:
        """Why nobody flips although nobody is on the way any more; None where that is not so."""
        if self.name != "quorum" or any(state in ON_THE_WAY for state in states):
            return None
        there, needed = self._there(states), self.needed(len(states))
        return None if there >= needed else f"the quorum is missed: {there} of {len(states)} engines, {needed} needed"

    @staticmethod
    def _there(states: Collection[EngineState]) -> int:
        return sum(state in ("prepared", "committing", "committed") for state in states)


BARRIER = FleetPolicy()

"""The words for where a weight update is, for the pure policies, the bus and its clients alike."""

from __future__ import annotations

from typing import Literal, get_args

EngineState = Literal[
    "pending", "staging", "prepared", "committing", "committed", "rolling_back", "rolled_back", "failed"
]
"""One engine within one update; `services.policies.commit` draws the life cycle."""

UpdateState = Literal["staging", "held", "prepared", "committed", "failed", "superseded", "cancelled", "rolled_back"]
SETTLED: tuple[UpdateState, ...] = ("committed", "failed", "superseded", "cancelled", "rolled_back")
"""Nothing is being waited for any more."""

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

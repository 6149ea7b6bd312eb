"""One session: a conversation between an environment and the policy, captured token for token."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout_server.capture import Capture
from rollout_server.engines.base import FinishReason, GenerationDelta
from services.wire.sampling import SamplingParams


@dataclass(slots=True, eq=False)
class Session:
    """Sibling `member` (from 0) of a group.

        idle ──a turn is taken──► busy ──recorded | given up──► idle

    A turn is recorded whole or not at all: while `busy`, the capture stays as it was.
    """

    session_id: str
    member: int
    capture: Capture = field(default_factory=Capture)
    busy: bool = False
    turns: int = 0
    finish_reason: FinishReason = "stop"
    sampling: SamplingParams | None = None
    """Both of the last turn."""

    def record(self, environment: list[int], drawn: GenerationDelta, sampling: SamplingParams) -> None:
        """Add one turn: what the environment said, then what the policy drew. `drawn` has been checked."""
        self.capture.add_environment(environment)
        self.capture.add_sampled(drawn.token_ids, drawn.logprobs, drawn.versions)
        self.turns += 1
        self.finish_reason = drawn.finish_reason or "stop"
        self.sampling = sampling

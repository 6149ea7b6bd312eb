"""HTTP bodies of the reward service: what was said, and what it was worth.

POST /v1/rewards {task, prompt | messages, answer, metadata} ──► {reward, components, substituted}
                                                           └──► 424 reward_failed: no reward, never a zero
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from pydantic import Field, model_validator

from services.wire.errors import RollmeshError
from services.wire.rollout_api import Body

REWARDS_PATH = "/v1/rewards"
_Text = Annotated[str, Field(max_length=4 << 20)]


class RewardFailedError(RollmeshError):
    """A component of the reward has no value and nothing stands in for it: HTTP 424. The sample has no reward."""

    status = 424
    code = "reward_failed"


class JudgeSample(Body):
    """One answer to be judged. Exactly one of `prompt` and `messages`."""

    task: str = Field(default="", max_length=200)
    prompt: _Text | None = None
    messages: list[dict[str, Any]] | None = Field(default=None, max_length=4096)
    """The conversation before the answer, as OpenAI's chat API has it."""
    answer: _Text
    complete: bool = True
    """False for an answer that was cut off."""
    metadata: dict[str, Any] = Field(default_factory=dict, max_length=256)
    """Whatever else the components need, such as the solution."""

    @model_validator(mode="after")
    def _one_of(self) -> JudgeSample:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give exactly one of prompt and messages")
        return self

    @model_validator(mode="after")
    def _is_text(self) -> JudgeSample:
        # What pydantic lets pass where anything may stand, and no process could be told.
        try:
            msgspec.json.encode((self.messages, self.metadata))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"messages and metadata must be JSON ({error})") from error
        return self


class RewardGiven(Body):
    """A reward, always with every component's value, unweighted."""

    reward: float
    components: dict[str, float]
    substituted: dict[str, str]
    """Components that failed, and why: the value above is the one that their settings name instead."""


class RewardFormula(Body):
    """`GET /v1/rewards`: what is in force."""

    formula: str
    components: list[str]
    """Each component in words, in the formula's order."""
    not_confined: list[str]
    """Limits of the sandbox that this machine cannot enforce; empty where all hold."""

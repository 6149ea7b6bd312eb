"""Client of the reward service (`rollmesh rewards`).

    async with RewardsClient("http://127.0.0.1:8300") as rewards:
        given = await rewards.judge(JudgeSample(prompt="Reverse abc.", answer="cba", metadata={"solution": "cba"}))
        given.reward, given.components

An environment of texts hands its last answer to `judging`; an agent environment awaits `judge` in `play`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from clients.environments.base import Ended, Judging
from clients.rollout.calls import Call
from clients.rollout.transport import Transport
from services.observability.tracing import NO_TRACING, Tracing
from services.security.tls import PUBLIC, Trust
from services.wire.errors import RollmeshError
from services.wire.reward_api import REWARDS_PATH, JudgeSample, RewardFailedError, RewardFormula, RewardGiven

JUDGE_TIMEOUT_S = 300.0
"""Longest wait for one answer; the service has deadlines of its own for every component."""
SUBSTITUTED = ".substituted"
"""Ends the name of a recorded component that says, with 1, that the value of another one is a substitute."""


@dataclass(frozen=True)
class RewardsAddress:
    """Where the reward service is. `key`: what it asks for, None where it asks for none. `trust`: see `RolloutClient`."""

    url: str
    key: str | None = None
    trust: Trust = PUBLIC
    tracing: Tracing = NO_TRACING


class RewardsClient:
    """One reward service. Use as an async context manager; any number of calls may be in flight."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        patience_s: float = 30.0,
        trust: Trust = PUBLIC,
        tracing: Tracing = NO_TRACING,
    ) -> None:
        """`patience_s` bounds the time that a call is sent again for while the service is full or out of reach."""
        self._transport = Transport(
            url,
            api_key=api_key,
            patience_s=patience_s,
            trust=trust,
            more_errors=(RewardFailedError,),
            tracing=tracing,
        )

    async def __aenter__(self) -> RewardsClient:
        await self._transport.__aenter__()
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._transport.__aexit__(*raised)

    async def judge(self, sample: JudgeSample) -> RewardGiven:
        """The reward of one answer. Raises RewardFailedError where there is none, for any reason: it is never 0 instead."""
        payload = sample.model_dump_json(exclude_none=True).encode()
        try:
            return await self._transport.call(
                Call("POST", REWARDS_PATH, payload, RewardGiven.model_validate_json, JUDGE_TIMEOUT_S)
            )
        except RewardFailedError:
            raise
        except RollmeshError as error:
            raise RewardFailedError(f"the reward service gave none ({error})") from error

    async def formula(self) -> RewardFormula:
        """What is in force. Raises ServerUnreachableError, UnauthenticatedError."""
        return await self._transport.call(Call("GET", REWARDS_PATH, None, RewardFormula.model_validate_json))

    def judging(self, sample: JudgeSample, succeeded: Callable[[RewardGiven], bool]) -> Judging:
        """The end of an episode whose last answer is for the service to judge."""

        async def judge() -> Ended:
            given = await self.judge(sample)
            return Ended(given.reward, succeeded(given), recorded(given))

        return Judging(judge)


def recorded(given: RewardGiven) -> dict[str, float]:
    """The components as they are recorded with a trajectory; substitutes are told apart."""
    return {**given.components, **{f"{name}{SUBSTITUTED}": 1.0 for name in given.substituted}}

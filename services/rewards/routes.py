"""The routes of the reward service."""

from __future__ import annotations

from fastapi import APIRouter

from services.app import declared_errors
from services.doorkeeper import Doorkeeper
from services.policies.reward_formula import NotComposed
from services.rewards.judge import Judge
from services.rewards.worker_wire import Sample
from services.wire.errors import NotReadyError
from services.wire.reward_api import REWARDS_PATH, JudgeSample, RewardFailedError, RewardFormula, RewardGiven

_MEANINGS = {
    400: "A body that is no JSON text",
    401: "No key, or a wrong one",
    403: "A key that does not open this",
    413: "A body that is too large",
    422: "A body that does not fit",
    424: "A component has no value and nothing stands in for it: the sample has no reward",
    429: "Too many samples wait; `Retry-After` says when to ask again",
    503: "The components are starting, or cannot",
}
_ERRORS = declared_errors(_MEANINGS)


def reward_routes(doors: Doorkeeper, judge: Judge) -> APIRouter:
    """Rewards are for environments; the formula may be read by the mesh's parts too."""
    router = APIRouter(tags=["rewards"])

    @router.post(REWARDS_PATH, responses=_ERRORS, dependencies=doors.of("environment"))
    async def give_reward(body: JudgeSample) -> RewardGiven:
        """Judge one answer. A reward has every component's value; what has none is an error, never a zero."""
        if reasons := judge.not_ready():
            raise NotReadyError(reasons[0], "try again; see the service's log")
        sample = Sample(
            task=body.task,
            prompt=body.prompt,
            messages=body.messages,
            answer=body.answer,
            complete=body.complete,
            metadata=body.metadata,
        )
        judged = await judge.judge(sample)
        if isinstance(judged, NotComposed):
            what = f"component {judged.component} has no value ({judged.failure.cause})"
            raise RewardFailedError(what, judged.failure.what)
        return RewardGiven(
            reward=judged.reward,
            components=dict(judged.components),
            substituted={name: str(cause) for name, cause in judged.substituted.items()},
        )

    @router.get(REWARDS_PATH, responses={401: _ERRORS[401], 403: _ERRORS[403]}, dependencies=doors.of("reading"))
    async def read_formula() -> RewardFormula:
        """The formula in force, and its components."""
        return RewardFormula(formula=judge.formula, components=judge.components(), not_confined=judge.not_confined())

    return router

"""The reward service's HTTP application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from pathlib import Path

import structlog
from fastapi import APIRouter, FastAPI

from services.config.rewards import RewardSettings
from services.http.app import BodyLimit, Stop, declared_errors, make_app
from services.http.auth import AuthMiddleware, Authorizer
from services.observability.metrics import Metrics
from services.observability.middleware import trace_calls
from services.observability.tracing import NO_TRACING, Tracing
from services.policies.rewards import NotComposed
from services.rewards.composer import Judge
from services.rewards.metrics import RewardMetrics
from services.rewards.sandbox.protocol import Sample
from services.security.permissions import NO_KEYS, Keys
from services.security.tls import PUBLIC, Trust
from services.wire.errors import NotReadyError, RollmeshError
from services.wire.reward_api import REWARDS_PATH, JudgeSample, RewardFailedError, RewardFormula, RewardGiven

_log = structlog.get_logger()


def make_rewards_app(
    settings: RewardSettings,
    stop: Stop,
    *,
    keys: Keys = NO_KEYS,
    trust: Trust = PUBLIC,
    tracing: Tracing = NO_TRACING,
    hidden: Sequence[Path] = (),
) -> FastAPI:
    """The application. A component that cannot be started ends it, through `stop`.

    `trust`: for reward models. `hidden`: where this service's keys lie, for no function to read.
    """
    metrics, authorizer = Metrics(), Authorizer(keys)
    judge = Judge(settings, RewardMetrics(metrics), trust, hidden)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        _log.info("reward formula", formula=judge.formula)
        for line in judge.components():
            _log.info("reward component", component=line)
        running = asyncio.create_task(_keep(judge, stop), name="reward-components")
        try:
            yield
        finally:
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running

    scraping = authorizer.of("metrics")
    app = make_app("rewards", version("rollmesh"), lifespan, judge.not_ready, metrics, metrics_access=scraping)
    app.add_middleware(BodyLimit, limit_bytes=settings.max_body_mib << 20)
    trace_calls(app, tracing)
    app.add_middleware(AuthMiddleware, authorizer=authorizer)
    app.include_router(reward_routes(authorizer, judge))
    return app


async def _keep(judge: Judge, stop: Stop) -> None:
    try:
        await judge.run()
    except RollmeshError as error:
        stop.fail(error)
    except Exception as error:
        stop.fail(RollmeshError(f"a reward component broke down ({error!r})", "this is a bug: see the traceback"))
        raise


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


def reward_routes(authorizer: Authorizer, judge: Judge) -> APIRouter:
    """Rewards are for environments; the formula may be read by the mesh's parts too."""
    router = APIRouter(tags=["rewards"])

    @router.post(REWARDS_PATH, responses=_ERRORS, dependencies=authorizer.of("environment"))
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

    @router.get(REWARDS_PATH, responses={401: _ERRORS[401], 403: _ERRORS[403]}, dependencies=authorizer.of("reading"))
    async def read_formula() -> RewardFormula:
        """The formula in force, and its components."""
        return RewardFormula(formula=judge.formula, components=judge.components(), not_confined=judge.not_confined())

    return router

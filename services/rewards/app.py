"""The reward service's HTTP application."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version

import structlog
from fastapi import FastAPI

from services.app import Stop, make_app
from services.body_limit import BodyLimit
from services.metrics import Metrics
from services.reward_settings import RewardSettings
from services.rewards.access import RewardAccess
from services.rewards.judge import Judge
from services.rewards.metrics import RewardMetrics
from services.rewards.routes import reward_routes
from services.wire.errors import RollmeshError

_log = structlog.get_logger()


def make_rewards_app(settings: RewardSettings, stop: Stop, *, key: str | None = None) -> FastAPI:
    """The application. A component that cannot be started ends it, through `stop`."""
    metrics, access = Metrics(), RewardAccess(key)
    judge = Judge(settings, RewardMetrics(metrics))

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

    app = make_app(
        "rewards", version("rollmesh"), lifespan, judge.not_ready, metrics, metrics_access=[access.requirement]
    )
    app.add_middleware(BodyLimit, limit_bytes=settings.max_body_mib << 20)
    app.include_router(reward_routes(access, judge))
    return app


async def _keep(judge: Judge, stop: Stop) -> None:
    try:
        await judge.run()
    except RollmeshError as error:
        stop.fail(error)
    except Exception as error:
        stop.fail(RollmeshError(f"a reward component broke down ({error!r})", "this is a bug: see the traceback"))
        raise

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
from services.doorkeeper import Doorkeeper
from services.key_rules import NO_KEYS, Keys
from services.metrics import Metrics
from services.reward_settings import RewardSettings
from services.rewards.judge import Judge
from services.rewards.metrics import RewardMetrics
from services.rewards.routes import reward_routes
from services.threshold import Threshold
from services.tls import PUBLIC, Trust
from services.traced_calls import trace_calls
from services.tracing import NO_TRACING, Tracing
from services.wire.errors import RollmeshError

_log = structlog.get_logger()


def make_rewards_app(
    settings: RewardSettings,
    stop: Stop,
    *,
    keys: Keys = NO_KEYS,
    trust: Trust = PUBLIC,
    tracing: Tracing = NO_TRACING,
) -> FastAPI:
    """The application. A component that cannot be started ends it, through `stop`. `trust`: for reward models."""
    metrics, doors = Metrics(), Doorkeeper(keys)
    judge = Judge(settings, RewardMetrics(metrics), trust)

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

    scraping = doors.of("service")
    app = make_app("rewards", version("rollmesh"), lifespan, judge.not_ready, metrics, metrics_access=scraping)
    app.add_middleware(BodyLimit, limit_bytes=settings.max_body_mib << 20)
    trace_calls(app, tracing)
    app.add_middleware(Threshold, doors=doors)
    app.include_router(reward_routes(doors, judge))
    return app


async def _keep(judge: Judge, stop: Stop) -> None:
    try:
        await judge.run()
    except RollmeshError as error:
        stop.fail(error)
    except Exception as error:
        stop.fail(RollmeshError(f"a reward component broke down ({error!r})", "this is a bug: see the traceback"))
        raise

"""The rollout server's HTTP application."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import version

from fastapi import FastAPI, Request, Response
from redis.exceptions import RedisError

from rollout_server.api.bus_weight_updates import ServedWeights
from rollout_server.api.engine_admin import admin_routes, engine_routes
from rollout_server.api.groups import group_routes, report_routes, runner_routes
from rollout_server.api.joined_calls import joined_routes
from rollout_server.api.openai import completion_routes, model_routes
from rollout_server.api.prompt_size import PromptSize
from rollout_server.api.routes import ERRORS, Ready
from rollout_server.api.sessions import session_routes
from rollout_server.api.trajectories import trajectory_routes
from rollout_server.api.vllm_weight_updates import weight_update_routes
from rollout_server.engines.base import Engine, EngineCrashedError
from rollout_server.lifecycle.admission import AdmissionGate
from rollout_server.server import RolloutServer, ServerPlan
from rollout_server.sessions.group import GroupRegistry
from services.http.app import BodyLimit, Stop, error_answer, make_app
from services.http.auth import AuthMiddleware
from services.http.route_index import index_routes
from services.observability import catalog
from services.observability.metrics import Metrics, Reading
from services.observability.middleware import trace_calls
from services.wire.errors import NotReadyError
from weight_bus.client.engine_routes import weight_routes
from weight_bus.client.membership import Bus


def make_rollout_app(plan: ServerPlan, engine: Engine, bus: Bus | None, stop: Stop) -> FastAPI:
    """The application around an engine that has not been started; without a bus it serves the weights it has."""
    server = RolloutServer(plan, engine, bus, stop)
    rollout, services_only = plan.settings.rollout, server.authorizer.of("service")
    scraping = server.authorizer.of("metrics")
    # What routes get: each part by itself, once there is one.
    served = server.ready(lambda parts: parts.engine)
    access = server.ready(lambda parts: parts.access)
    opener = server.ready(lambda parts: parts.opener)
    takeover = server.ready(lambda parts: parts.takeover)
    groups = server.ready(lambda parts: parts.registry)
    gate = server.ready(lambda parts: parts.gate)
    finisher = server.ready(lambda parts: parts.finisher)
    runners = server.ready(lambda parts: parts.runners)
    ledger = server.ready(lambda parts: parts.ledger)
    evaluations = server.ready(lambda parts: parts.evaluations)
    completions = server.ready(lambda parts: parts.completions)
    answers = server.ready(lambda parts: parts.answer_service)
    turns = server.ready(lambda parts: parts.turns)
    renderer = server.ready(lambda parts: parts.renderer)
    log = server.ready(lambda parts: parts.log)
    check, retry_patience_s = server.check_taking_calls, rollout.retry_patience_s
    size = PromptSize(renderer, lambda: engine.max_model_len)

    def on_commit() -> None:
        gate().notify()

    async def issued(key: str) -> bool:
        return access().issued(key)

    metrics = Metrics()
    metrics.read(lambda: server_readings(served, groups, gate, server.http_cpu_s))
    app = make_app(
        "rollmesh rollout server",
        version("rollmesh"),
        server.lifespan,
        server.not_ready,
        metrics,
        metrics_access=scraping,
    )
    app.add_middleware(BodyLimit, limit_bytes=rollout.max_body_mib << 20)
    trace_calls(app, plan.tracing)
    app.add_middleware(AuthMiddleware, authorizer=server.authorizer, issued=issued)

    @app.exception_handler(EngineCrashedError)
    async def on_crash(_: Request, error: EngineCrashedError) -> Response:
        """A crashed engine ends the process; its supervisor restarts it."""
        server.fail(error)
        return error_answer(error)

    @app.exception_handler(RedisError)
    async def on_redis(_: Request, error: RedisError) -> Response:
        """Whatever a call needs Redis for: it may be sent again."""
        return error_answer(NotReadyError(f"Redis failed ({error})", "send the call again"))

    routers = [
        completion_routes(
            access,
            takeover,
            groups,
            completions,
            answers,
            engine,
            plan.model,
            check,
            server.until_accepting,
            server.fail,
            retry_patience_s,
            size.check,
        ),
        group_routes(
            access, opener, takeover, groups, turns, finisher, engine, check, rollout.group_timeout_s, size.check
        ),
        report_routes(
            access, groups, gate, ledger, evaluations, engine, plan.run_id, plan.server_id, server.http_cpu_s
        ),
        session_routes(access, opener, takeover, groups, finisher, engine, check, plan.url),
        runner_routes(access, runners),
        trajectory_routes(access, takeover, groups, renderer, ledger, log),
        model_routes(access, engine, plan.model),
        engine_routes(served, services_only),
        weight_update_routes(served, on_commit, services_only),
        admin_routes(access, server.drain, plan.server_id),
        weight_routes(ServedWeights(served, on_commit, plan.tracing), ERRORS, services_only),
    ]
    for router in routers:
        # `include_router` would make each route a second time, which takes as long as the first.
        app.router.routes.extend(router.routes)
    app.router.routes.extend(joined_routes(access, app.router.routes, app.exception_handlers).routes)
    index_routes(app)
    return app


def server_readings(
    engine: Ready[Engine], groups: Ready[GroupRegistry], gate: Ready[AdmissionGate], http_cpu_s: Callable[[], float]
) -> Iterator[Reading]:
    """The server's metrics, read at each scrape, so that a token costs nothing for being counted. For the event loop.

    None before the engine is up.
    """
    try:
        status = engine().status()
    except NotReadyError:
        return
    yield Reading(catalog.ROLLOUT_VERSION, status.policy_version)
    if status.staged_version is not None:
        yield Reading(catalog.ROLLOUT_STAGED, status.staged_version)
    yield Reading(catalog.ROLLOUT_SAMPLED, status.tokens_generated)
    yield Reading(catalog.ROLLOUT_PREFILLED, status.prefill_tokens)
    yield Reading(catalog.ROLLOUT_RUNNING, status.running)
    yield Reading(catalog.ROLLOUT_WAITING, status.waiting)
    if status.kv_use is not None:
        yield Reading(catalog.ROLLOUT_KV, status.kv_use)
    yield Reading(catalog.ROLLOUT_PAUSED, status.paused)
    yield Reading(catalog.ROLLOUT_COMMITS, status.commits)
    if status.stalls_ms:
        yield Reading(catalog.ROLLOUT_STALL, status.stalls_ms[-1] / 1e3)
    yield Reading(catalog.ROLLOUT_GROUPS, len(groups()))
    yield Reading(catalog.ROLLOUT_SESSIONS, groups().live_sessions)
    yield Reading(catalog.ROLLOUT_ADMISSION, gate().waiting)
    yield Reading(catalog.ROLLOUT_HTTP, http_cpu_s())

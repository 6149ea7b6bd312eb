"""The `vllm.endpoint_plugins` entry point: a plain `vllm serve` takes weights and joins the mesh as a rollout server does.

    VLLM_PLUGINS=rollmesh ROLLMESH_VLLM_LIVE_WEIGHTS=1 ROLLMESH_RUN_ID=… ROLLMESH_BUS_URL=… \\
        vllm serve MODEL --host 127.0.0.1 --no-async-scheduling

    API process                                        engine core
    POST /weights/stage     manifest  ───────────────► a thread pulls buckets into shadow memory; decoding goes on
    POST /weights/commit    version   ───────────────► between two steps: flip, relabel
    POST /weights/rollback  version   ───────────────► likewise, one step back
    GET  /weights/digest              ───────────────► a thread hashes what is served
    registered with the bus while it listens; the lease is renewed with the version served

Bodies and answers are `weight_bus.bus_api`'s; `weight_bus.vllm_settings` lists the variables. vLLM loads it only where
`VLLM_PLUGINS` names it.
"""

from __future__ import annotations

import asyncio
import os
from argparse import Namespace
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import structlog
from fastapi import Depends, FastAPI, Request, Response

from services.http.app import error_answer
from services.wire.errors import DeadlineError, RollmeshError, UsageError
from weight_bus.bus_client import BusClient
from weight_bus.membership import Membership
from weight_bus.vllm_plain import PlainEngine, check_address, check_served_by_tls
from weight_bus.vllm_protocol import LIVE_WEIGHTS
from weight_bus.vllm_settings import EngineSettings, read_settings
from weight_bus.weight_routes import weight_routes

_log = structlog.get_logger()
_PROBE_S = 0.05
_LISTENING_S = 60.0


class RollmeshEndpoints:
    """One API process's. `attach_router` comes before the engine is there, `init_state` before it listens."""

    name = "rollmesh"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self.engine = PlainEngine()
        self._settings: EngineSettings | None = None
        self._listens: tuple[str, int] = ("127.0.0.1", 0)

    def attach_router(self, app: FastAPI) -> None:
        """The routes, where this vLLM was given a run."""
        if not os.environ.get("ROLLMESH_RUN_ID"):
            return
        app.include_router(weight_routes(self.engine, dependencies=[Depends(self.engine.admit)]))

        @app.exception_handler(RollmeshError)
        async def on_typed_error(_: Request, error: RollmeshError) -> Response:
            return error_answer(error)

        inner = app.router.lifespan_context

        @asynccontextmanager
        async def lifespan(own: FastAPI) -> AsyncIterator[Any]:
            async with inner(own) as state, self._joined():
                yield state

        app.router.lifespan_context = lifespan

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:  # noqa: ARG002 - vLLM's signature
        """Build the views into the weights. Raises, and vLLM does not start, where new weights could not be taken."""
        settings = read_settings(args.host or "0.0.0.0", args.port)
        if settings is None or engine_client is None:
            return
        if os.environ.get(LIVE_WEIGHTS) != "1":
            raise UsageError(f"{LIVE_WEIGHTS} is not 1: this vLLM packs its weights away", "set it and start again")
        if (getattr(args, "api_server_count", None) or 1) > 1:
            raise UsageError("several API servers would each register this engine", "leave --api-server-count out")
        check_address(args.host, settings)
        check_served_by_tls(getattr(args, "ssl_certfile", None), settings)
        await self.engine.attach(engine_client, settings)
        self._settings = settings
        self._listens = (args.host or "127.0.0.1", args.port)

    @asynccontextmanager
    async def _joined(self) -> AsyncIterator[None]:
        """A member of the bus for the time of the block, as soon as calls are answered."""
        settings = self._settings
        if settings is None or settings.bus_url is None:
            yield
            return
        key = settings.bus_key or settings.keys.peer
        bus = BusClient(settings.bus_url, settings.run_id, key=key, trust=settings.tls.trust)
        membership = Membership(
            bus,
            settings.engine_id,
            settings.url,
            lambda: self.engine.policy_version,
            lambda: self.engine.staged_version,
            lambda: self.engine.ranks,
        )
        task = asyncio.create_task(self._run(membership), name="rollmesh membership")
        async with AsyncExitStack() as stack:
            stack.push_async_callback(membership.leave)
            stack.push_async_callback(_end, task)
            yield

    async def _run(self, membership: Membership) -> None:
        await _until_listening(*self._listens)
        await membership.run()


async def _until_listening(host: str, port: int) -> None:
    """vLLM listens soon after its application has started; the bus calls as soon as it knows of the engine.

    Raises DeadlineError.
    """
    own = host if host != "0.0.0.0" else "127.0.0.1"
    try:
        async with asyncio.timeout(_LISTENING_S):
            while True:
                try:
                    _, writer = await asyncio.open_connection(own, port)
                except OSError:
                    await asyncio.sleep(_PROBE_S)
                    continue
                writer.close()
                return
    except TimeoutError as error:
        raise DeadlineError(
            f"vLLM did not listen on {own}:{port} within {_LISTENING_S:g} s, and is no member of the bus", "see its log"
        ) from error


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and task.exception() is not None:
        _log.error("membership of the weight bus broke", exc_info=task.exception())

"""The application factory of every HTTP service: probes, typed errors, loopback unless told otherwise, clean shutdown."""

from __future__ import annotations

import asyncio
import json
import math
import socket
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.host.ports import bound_socket
from services.host.process import collect_seldom, give_memory_back
from services.http.connection import BOUNDS, Bounds, guarded
from services.http.server import Server
from services.observability.catalog import SERVICE_BUILD, SERVICE_NOT_READY
from services.observability.metrics import CONTENT_TYPE, Metrics, Reading
from services.security.permissions import require_loopback
from services.security.tls import Identity
from services.wire import errors
from services.wire.error_answer import error_body
from services.wire.gateway_api import OWNER_URL_HEADER
from services.wire.rollout_api import ErrorBody, ErrorDetail

METRICS_PATH = "/metrics"
SHUTDOWN_S = 5
"""How long calls in flight may go on once a service was told to end."""
Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
ReadyCheck = Callable[[], list[str]]
"""Answers the reasons why the service is not ready; none means ready."""


def make_app(
    title: str,
    version: str,
    lifespan: Lifespan,
    not_ready: ReadyCheck,
    metrics: Metrics | None = None,
    *,
    metrics_access: Sequence[Any] = (),
) -> FastAPI:
    """A FastAPI application with `/livez`, `/readyz`, `/version`, `/metrics` and one shape for every error.

    `metrics`: the service's own metrics. `metrics_access`: dependencies of `/metrics` that check who may read it.
    """

    figures = metrics or Metrics()
    app = FastAPI(title=title, version=version, lifespan=lifespan)

    def of_the_service() -> Iterator[Reading]:
        yield Reading(SERVICE_BUILD, 1, (title, version))
        yield Reading(SERVICE_NOT_READY, len(not_ready()))

    figures.read(of_the_service)

    @app.get("/livez")
    async def livez() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/readyz", responses={503: {"model": dict[str, list[str]], "description": "Not ready: the body says why"}})
    async def readyz(response: Response) -> dict[str, list[str]]:
        reasons = not_ready()
        response.status_code = 503 if reasons else 200
        return {"not_ready": reasons}

    @app.get("/version")
    async def read_version() -> dict[str, str]:
        return {"service": title, "version": version}

    @app.get(
        METRICS_PATH,
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
        dependencies=metrics_access,
    )
    async def read_metrics() -> Response:
        """For Prometheus (`services.observability.catalog`)."""
        return Response(figures.render(), media_type=CONTENT_TYPE)

    # Before the framework's own, which makes the document on the event loop: seconds, at the first call.
    app.router.routes.insert(0, Route("/openapi.json", _document(app), include_in_schema=False))

    @app.exception_handler(errors.RollmeshError)
    async def on_typed_error(_: Request, error: errors.RollmeshError) -> JSONResponse:
        # Its traceback is of no use any more, and would keep all that the call held until the next full collection.
        return error_answer(error.with_traceback(None))

    @app.exception_handler(HTTPException)
    async def on_http_error(_: Request, error: HTTPException) -> JSONResponse:
        """Errors of the framework: unknown paths, methods, bodies that are not JSON."""
        if isinstance(error.__cause__, errors.RollmeshError):
            # Raised while the body was read, such as for its size: the framework takes it for one that is no JSON.
            return error_answer(error.__cause__)
        kind = "not_found_error" if error.status_code == HTTPStatus.NOT_FOUND else "invalid_request_error"
        code = HTTPStatus(error.status_code).name.lower()
        detail = ErrorDetail(message=str(error.detail), type=kind, code=code)
        return _answer(error.status_code, ErrorBody(error=detail), dict(error.headers or {}))

    @app.exception_handler(RequestValidationError)
    async def on_invalid_body(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        detail = ErrorDetail(message=f"{where}: {first['msg']}", param=where, code="schema")
        return _answer(422, ErrorBody(error=detail))

    @app.exception_handler(ClientDisconnect)
    async def on_broken_upload(_: Request, error: ClientDisconnect) -> Response:
        """The caller went away before its body was whole: nobody reads this answer, and nothing here failed."""
        del error
        return Response(status_code=HTTPStatus.BAD_REQUEST)

    return app


def _document(app: FastAPI) -> Callable[[Request], Awaitable[Response]]:
    """A route of the OpenAPI document, which is made once, on a thread, when it is first asked for."""
    making: asyncio.Task[bytes] | None = None

    def make() -> bytes:
        return json.dumps(app.openapi(), separators=(",", ":")).encode()

    async def answer(_: Request) -> Response:
        nonlocal making
        if making is None or (making.done() and (making.cancelled() or making.exception() is not None)):
            making = asyncio.create_task(asyncio.to_thread(make), name="OpenAPI document")
        # A caller that goes away takes it from nobody else.
        return Response(await asyncio.shield(making), media_type="application/json")

    return answer


def declared_errors(meanings: Mapping[int, str]) -> dict[int | str, dict[str, Any]]:
    """The `responses` of routes: status → meaning, each with the one body of errors.

    FastAPI builds a validator for each model of each route, though nothing is ever validated against these: that took two
    thirds of the time in which a rollout server makes its routes. So the first status names the model, and the others
    refer to its schema.
    """
    schema = {"$ref": f"#/components/schemas/{ErrorBody.__name__}"}
    declared: dict[int | str, dict[str, Any]] = {
        status: {"description": meaning, "content": {"application/json": {"schema": schema}}}
        for status, meaning in meanings.items()
    }
    first = next(iter(meanings))
    return declared | {first: {"description": meanings[first], "model": ErrorBody}}


def error_answer(error: errors.RollmeshError) -> JSONResponse:
    """The response for `error`, with `Retry-After` (whole seconds) where a retry makes sense."""
    headers = None
    if isinstance(error, errors.CapacityError):
        headers = {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))}
    elif isinstance(error, errors.SessionConcludedError):
        # OpenAI's clients send a conflict again, with pauses, unless they are told that it is for good.
        headers = {"x-should-retry": "false"}
    elif isinstance(error, errors.HeldElsewhereError):
        # It may be whom the caller meant who is elsewhere now: a new connection finds out where.
        headers = {OWNER_URL_HEADER: error.owner_url, "connection": "close"}
    return _answer(error.status, error_body(error), headers)


def _answer(status: int, body: ErrorBody, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(body.model_dump(), status_code=status, headers=headers)


def open_port(host: str, port: int, *, lacking: Sequence[str] = ("any",)) -> socket.socket:
    """Bind `host:port` now, before anything slow, so that a port in use is known at once; `serve` listens on it.

    `lacking`: missing keys, without which it must be loopback (`services.security.permissions.lacking`). Raises UsageError
    for that, and for an address in use.
    """
    require_loopback(host, lacking)
    return bound_socket(host, port)


class Stop:
    """Shutdown of a service: it can end itself, and is notified when it ends.

    `on_stop` is called once, on the event loop, when the end begins: long polls should be answered then, since the server
    waits for requests in flight before it closes the application.
    """

    def __init__(self) -> None:
        self.on_stop: Callable[[], None] = lambda: None
        self._request: Callable[[], None] = lambda: None
        self.failure: errors.RollmeshError | None = None

    def attach(self, request: Callable[[], None]) -> None:
        self._request = request

    def fail(self, failure: errors.RollmeshError) -> None:
        """End the service; `serve` raises `failure` once everything is closed."""
        self.failure = self.failure or failure
        self._request()


def make_server(
    app: FastAPI,
    stop: Stop,
    *,
    shutdown_s: int = SHUTDOWN_S,
    identity: Identity | None = None,
    bounds: Bounds = BOUNDS,
    takes_signals: bool = True,
) -> Server:
    """The server of `app`, to be run on a socket from `open_port`; at its end, calls in flight have `shutdown_s` left.

    `identity`: the certificate for HTTPS; None: plain HTTP. `bounds`: what callers may cost before they show a key.
    `takes_signals`: whether SIGTERM and Ctrl-C end it; else whoever runs it sees to that.
    """
    config = uvicorn.Config(
        app,
        http=guarded(bounds),
        log_level="warning",
        # What it logs goes where all else does (`services.observability.logging`).
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=shutdown_s,
        # Longer than clients keep idle connections: whoever closes first must be the one who would reuse it.
        timeout_keep_alive=75,
        ws="none",
        # There is no trusted proxy: an address in a forwarded header must not be believed.
        proxy_headers=False,
        ssl_certfile=None if identity is None else identity.certificate,
        ssl_keyfile=None if identity is None else identity.key,
    )
    # Looked up when it ends: the application may set it after this.
    server = Server(config, lambda: stop.on_stop(), takes_signals=takes_signals)
    stop.attach(server.end)
    return server


def serve(
    app: FastAPI,
    host: str,
    port: int,
    *,
    listener: socket.socket | None = None,
    stop: Stop | None = None,
    shutdown_s: int = SHUTDOWN_S,
    identity: Identity | None = None,
) -> None:
    """Run `app` until SIGTERM, Ctrl-C or `stop.fail`, whose failure is raised then.

    `listener`: a socket from `open_port`, bound already; `shutdown_s`, `identity`: see `make_server`.
    Raises UsageError for an address that is not loopback or that is taken.
    """
    listener = listener or open_port(host, port)
    stop = stop or Stop()
    collect_seldom()  # what was imported stays for good
    make_server(app, stop, shutdown_s=shutdown_s, identity=identity).run(sockets=[listener])
    if stop.failure is not None:
        raise stop.failure


DONE = b"data: [DONE]\n\n"
"""The event that ends a stream of server-sent events, in OpenAI's API and in vLLM's."""


def error_event(error: errors.RollmeshError) -> bytes:
    """The server-sent event that reports a failure after the stream has begun."""
    return b"data: " + bytes(error_answer(error).body) + b"\n\n"


_LARGE_BODY = 1 << 22


class BodyLimit:
    """ASGI middleware that limits request bodies, so that one call cannot exhaust a service's memory.

    Reading more than `limit_bytes` raises BodyTooLargeError. A body with a declared length is refused at its first read.
    After a large one its memory is given back: else each could leave as much behind, for the next to come on top.
    """

    def __init__(self, app: ASGIApp, limit_bytes: int) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        read = 0

        async def receive_some() -> Message:
            nonlocal read
            if declared.isdigit() and int(declared) > self._limit_bytes:
                raise errors.BodyTooLargeError(self._limit_bytes)
            message = await receive()
            read += len(message.get("body", b""))
            if read > self._limit_bytes:
                raise errors.BodyTooLargeError(self._limit_bytes)
            return message

        try:
            await self._app(scope, receive_some, send)
        finally:
            if read >= _LARGE_BODY:
                await asyncio.to_thread(give_memory_back)

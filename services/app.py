"""The application factory of every HTTP service: probes, typed errors, loopback unless told otherwise, clean shutdown."""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from services.wire.errors import CapacityError, RollmeshError, UsageError
from services.wire.rollout_api import ErrorBody, ErrorDetail

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]
ReadyCheck = Callable[[], list[str]]
"""Answers the reasons why the service is not ready; none means ready."""


def make_app(title: str, version: str, lifespan: Lifespan, not_ready: ReadyCheck) -> FastAPI:
    """A FastAPI application with `/livez`, `/readyz`, `/version` and one shape for every error."""

    app = FastAPI(title=title, version=version, lifespan=lifespan)

    @app.get("/livez")
    async def livez() -> dict[str, str]:
        return {"status": "alive"}

    @app.get("/readyz")
    async def readyz(response: Response) -> dict[str, list[str]]:
        reasons = not_ready()
        response.status_code = 503 if reasons else 200
        return {"not_ready": reasons}

    @app.get("/version")
    async def read_version() -> dict[str, str]:
        return {"service": title, "version": version}

    @app.exception_handler(RollmeshError)
    async def on_typed_error(_: Request, error: RollmeshError) -> JSONResponse:
        headers = (
            {"Retry-After": str(max(1, math.ceil(error.retry_after_s)))} if isinstance(error, CapacityError) else None
        )
        return _error(error.status, error.code, str(error), headers)

    @app.exception_handler(RequestValidationError)
    async def on_invalid_body(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return _error(422, "schema", f"{where}: {first['msg']}", None)

    return app


def _error(status: int, code: str, message: str, headers: dict[str, str] | None) -> JSONResponse:
    body = ErrorBody(error=ErrorDetail(code=code, message=message))
    return JSONResponse(body.model_dump(), status_code=status, headers=headers)


def require_loopback(host: str) -> None:
    """Raise UsageError for an address other than loopback: services carry no keys yet (promise 6: no open door)."""
    try:
        local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = host == "localhost"
    if not local:
        raise UsageError(f"{host} is not a loopback address", "bind 127.0.0.1: services cannot be opened without keys")


def serve(app: FastAPI, host: str, port: int) -> None:
    """Run `app` until SIGTERM or Ctrl-C. Raises UsageError for an address that is not loopback."""
    require_loopback(host)
    config = uvicorn.Config(
        app, host=host, port=port, log_level="warning", access_log=False, timeout_graceful_shutdown=5, ws="none"
    )
    uvicorn.Server(config).run()

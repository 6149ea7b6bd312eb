"""A FastAPI route for the busy paths: the body goes from bytes to its model in one step, the answer is sent as it is.

FastAPI's own handler parses JSON in Python, solves a dependency graph and validates the answer again, which costs more
than everything else in a call here. Paths, bodies and answers are still declared, so the OpenAPI document is whole.
Endpoints take any of: path parameters (strings), one body (a model or a dataclass), `Request`; they return a `Response`.
The body's bytes are in `request.state.body`, which an endpoint may delete. Dependencies check: each is a coroutine function
of the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import is_dataclass
from inspect import iscoroutinefunction
from typing import Any

import msgspec
from fastapi import Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.requests import ClientDisconnect
from starlette.routing import request_response
from starlette.types import Receive

from services.host.process import give_memory_back

_LARGE = 1 << 20


def answer(body: BaseModel, status_code: int = 200) -> Response:
    """The JSON answer of a `TypedRoute`."""
    return Response(body.model_dump_json(), status_code=status_code, media_type="application/json")


def any_body(_: bytes) -> None:
    """Takes every body."""


class TypedRoute(APIRoute):
    """See the module's docstring. Raises RequestValidationError as FastAPI's route does."""

    check_body: Callable[[bytes], None] = staticmethod(any_body)
    """Called before a body is parsed; what it raises is answered."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        endpoint, self._request_name = self.dependant.call, self.dependant.request_param_name
        assert endpoint is not None
        self._answers: Callable[..., Awaitable[Response]] = endpoint
        others = (self.dependant.query_params, self.dependant.header_params, self.dependant.cookie_params)
        if any(others) or len(self.dependant.body_params) > 1:
            raise TypeError(f"{self.path}: a TypedRoute takes path parameters, one body and the request only")
        self._checks = [_check(each, self.path) for each in self.dependant.dependencies if not _documents(each)]
        self._body_name = ""
        self._body: TypeAdapter[Any] | None = None
        for field in self.dependant.body_params:
            self._body_name, self._body = field.name, _body(field.field_info.annotation)
        # FastAPI's own wraps each call in two exit stacks, for dependencies; there are none.
        self.app = request_response(self.respond)

    async def respond(self, request: Request) -> Response:
        """`services.http.route_index.Direct`."""
        for check in self._checks:
            await check(request)
        arguments: dict[str, Any] = dict(request.path_params)
        if self._request_name is not None:
            arguments[self._request_name] = request
        if self._body is not None:
            # Not by `request.body()`, which keeps it for as long as the call lasts: hours, for a generation.
            request.state.body = body = await _read(request.receive)
            self.check_body(body)
            arguments[self._body_name] = _parse(self._body, request.headers.get("content-type", ""), body)
            if len(body) > _LARGE:
                # What reading it took, before as much is taken to answer it.
                await asyncio.to_thread(give_memory_back)
            del body
        return await self._answers(**arguments)


async def _read(receive: Receive) -> bytes:
    """The body. Raises ClientDisconnect where the caller goes away before its end."""
    pieces, more = list[bytes](), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect()
        pieces.append(message.get("body", b""))
        more = message.get("more_body", False)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _documents(dependency: Dependant) -> bool:
    """Whether it only says in the OpenAPI document how callers show their key."""
    # A class made of it may check something.
    return type(dependency.call) is HTTPBearer and not dependency.call.auto_error


def _check(dependency: Dependant, path: str) -> Callable[[Request], Awaitable[None]]:
    call, of = dependency.call, dependency
    others = (of.dependencies, of.path_params, of.query_params, of.header_params, of.cookie_params, of.body_params)
    if call is None or not iscoroutinefunction(call) or any(others) or of.request_param_name is None:
        raise TypeError(f"{path}: a TypedRoute's dependencies are coroutine functions of the request, not {call}")
    name = of.request_param_name

    async def check(request: Request) -> None:
        await call(**{name: request})

    return check


def _body(annotation: Any) -> TypeAdapter[Any]:
    if not (isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation))):
        raise TypeError(f"the body of a TypedRoute is a pydantic model or a dataclass, not {annotation}")
    return TypeAdapter(annotation)


def _parse(body: TypeAdapter[Any], content_type: str, payload: bytes) -> Any:
    # Any other type can be sent by a web page without asking: it must not reach a service on loopback.
    if not content_type.startswith("application/json"):
        raise RequestValidationError([{"loc": ("header", "content-type"), "msg": "must be application/json"}])
    if len(payload) > _LARGE:
        # Pydantic's own parser makes three copies of a long text on its way. What is wrong it says better.
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValidationError):
            return body.validate_python(msgspec.json.decode(payload))
    try:
        return body.validate_json(payload)
    except ValidationError as error:
        raise RequestValidationError(
            [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
        ) from error

"""A FastAPI route for the busy paths: the body goes from bytes to its model in one step, the answer is sent as it is.

FastAPI's own handler parses JSON in Python, solves a dependency graph and validates the answer again, which costs more
than everything else in a call here. Paths, bodies and answers are still declared, so the OpenAPI document is whole.
Endpoints take any of: path parameters (strings), one body (a model, a dataclass or a msgspec struct), `Request`; they
return a `Response`.
The body's bytes are in `request.state.body`, which an endpoint may delete. Dependencies check: each is a coroutine function
of the request.
"""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import is_dataclass
from inspect import iscoroutinefunction, signature
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
from services.http.struct_answer import takes
from services.wire.errors import UNDECODABLE

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

    def __init__(self, path: str, endpoint: Callable[..., Awaitable[Response]], **options: Any) -> None:
        described, struct = _without_struct(endpoint)
        if struct is not None:
            options["openapi_extra"] = {**(options.get("openapi_extra") or {}), **takes(struct[1])}
        super().__init__(path, described, **options)
        self._request_name = self.dependant.request_param_name
        # Also for who includes this router in another: the route is made anew of it.
        self.endpoint = self._answers = endpoint
        others = (self.dependant.query_params, self.dependant.header_params, self.dependant.cookie_params)
        if any(others) or len(self.dependant.body_params) + (struct is not None) > 1:
            raise TypeError(f"{self.path}: a TypedRoute takes path parameters, one body and the request only")
        self._checks = [_check(each, self.path) for each in self.dependant.dependencies if not _documents(each)]
        self._body_name = ""
        self._body: _Reader | None = None
        for field in self.dependant.body_params:
            self._body_name, self._body = field.name, _reader(field.field_info.annotation)
        if struct is not None:
            self._body_name, self._body = struct[0], _struct_reader(struct[1])
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
            # Any other type can be sent by a web page without asking: it must not reach a service on loopback.
            if not request.headers.get("content-type", "").startswith("application/json"):
                raise RequestValidationError([{"loc": ("header", "content-type"), "msg": "must be application/json"}])
            arguments[self._body_name] = self._body(body)
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


_Reader = Callable[[bytes], Any]
"""Makes an endpoint's body of bytes. Raises RequestValidationError."""


def _reader(annotation: Any) -> _Reader:
    """By pydantic."""
    if not (isinstance(annotation, type) and (issubclass(annotation, BaseModel) or is_dataclass(annotation))):
        raise TypeError(f"the body of a TypedRoute is a pydantic model, a dataclass or a struct, not {annotation}")
    adapter = TypeAdapter[Any](annotation)

    def read(payload: bytes) -> Any:
        if len(payload) > _LARGE:
            # Pydantic's own parser makes three copies of a long text on its way. What is wrong it says better.
            with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValidationError):
                return adapter.validate_python(msgspec.json.decode(payload))
        try:
            return adapter.validate_json(payload)
        except ValidationError as error:
            raise RequestValidationError(
                [{**each, "loc": ("body", *each["loc"])} for each in error.errors(include_url=False)]
            ) from error

    return read


def _struct_reader(kind: type[msgspec.Struct]) -> _Reader:
    decoder = msgspec.json.Decoder(kind, strict=False, dec_hook=_model)

    def read(payload: bytes) -> Any:
        try:
            return decoder.decode(payload)
        except UNDECODABLE as error:
            what, _, where = str(error).partition(_AT)
            found = {"type": "struct", "loc": ("body", *_PART.findall(where)), "msg": what}
            raise RequestValidationError([found]) from error

    return read


_AT = " - at `$"
"""Before the path, as `.turns[0].text`, of what msgspec refuses."""
_PART = re.compile(r"[^.\[\]`]+")


def _model(kind: type[Any], value: Any) -> Any:
    """A model of pydantic within a struct. Raises ValueError with the first of its faults, in a line."""
    if not issubclass(kind, BaseModel):
        raise NotImplementedError(f"{kind} cannot be read")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _without_struct(
    endpoint: Callable[..., Awaitable[Response]],
) -> tuple[Callable[..., Awaitable[Response]], tuple[str, type[msgspec.Struct]] | None]:
    """The endpoint as FastAPI is told of it, which knows no structs, and the name and type of the one that it takes.

    Of several it keeps all but the first, and FastAPI refuses them.
    """
    whole = signature(endpoint, eval_str=True)
    for parameter in whole.parameters.values():
        kind = parameter.annotation
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            break
    else:
        return endpoint, None

    @functools.wraps(endpoint)
    async def described() -> Response:
        raise NotImplementedError("it is only described: a TypedRoute calls the endpoint itself")

    others = [each for each in whole.parameters.values() if each is not parameter]
    described.__signature__ = whole.replace(parameters=others)  # type: ignore[attr-defined]
    return described, (parameter.name, kind)

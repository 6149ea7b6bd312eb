"""Routing by look-up: the route of a path and method is found at once, where Starlette asks one route after the other.

    GET /sessions/s-1  ──3 parts──► /sessions/s-1, /sessions/{} ──► (GET, /sessions/{}) ──► its route
                                                                                             │
         a route that answers requests itself (`Direct`) ──► called, with the application's error handlers, and no more
         any other ──► the framework's way: its middleware, exit stacks and the router, which cost more than many a call

What is not found here (another method, an unknown path) goes the framework's way, through all routes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Protocol, runtime_checkable

from fastapi import FastAPI, Request, Response
from starlette._utils import get_route_path
from starlette.convertors import StringConvertor
from starlette.middleware import Middleware
from starlette.routing import BaseRoute, Match, NoMatchFound, Route
from starlette.types import ASGIApp, Receive, Scope, Send

_ANY = "{}"


@runtime_checkable
class Direct(Protocol):
    """A route that makes of a request its response, with no dependencies or exit stacks of the framework."""

    async def respond(self, request: Request) -> Response:
        """`request.path_params` are there. What it raises goes to the application's handlers."""


def index_routes(app: FastAPI) -> None:
    """Look up the routes that the application has now. The answers are the same as without it."""
    index = RouteIndex(app.router.routes)
    app.router.routes.insert(0, index)
    # The innermost: what others ask of each call comes before.
    app.user_middleware.append(Middleware(DirectCalls, index=index, handlers=app.exception_handlers))


@dataclass(frozen=True, slots=True)
class _Indexed:
    """`number`: its place among all routes. `parameters`: which part of the path each is. `direct`: the route, if it is."""

    number: int
    route: Route
    parameters: tuple[tuple[int, str], ...]
    direct: Direct | None


class RouteIndex(BaseRoute):
    """Stands before the routes that it finds. Of two that fit, it takes the one that came first, as Starlette does."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self._routes: dict[tuple[str, str], _Indexed] = {}
        self._shapes: dict[int, list[tuple[int, ...]]] = {}
        """By the number of a path's parts: which of them are parameters, for each shape that there is."""
        # One that is not understood here might fit what comes after it.
        for number, route in enumerate(takewhile(_is_plain, routes)):
            assert isinstance(route, Route)
            parts = route.path_format.split("/")
            parameters = tuple((place, part[1:-1]) for place, part in enumerate(parts) if part.startswith("{"))
            places = tuple(place for place, _ in parameters)
            shapes = self._shapes.setdefault(len(parts), [])
            if places not in shapes:
                shapes.append(places)
            indexed = _Indexed(number, route, parameters, route if isinstance(route, Direct) else None)
            for method in route.methods or ():
                self._routes.setdefault((method, _named(parts, places)), indexed)

    def find(self, scope: Scope) -> tuple[_Indexed, list[str]] | None:
        """The route of an HTTP request, and the parts of its path."""
        parts, method = get_route_path(scope).split("/"), scope["method"]
        best: _Indexed | None = None
        for places in self._shapes.get(len(parts), ()):
            found = self._routes.get((method, _named(parts, places)))
            if found is None or (best is not None and best.number < found.number):
                continue
            if all(parts[place] for place in places):
                best = found
        return None if best is None else (best, parts)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] == "http" and (found := self.find(scope)) is not None:
            route = found[0].route
            match, child = route.matches(scope)
            if match is Match.FULL:
                return match, {**child, "route": route}
        return Match.NONE, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await scope["route"].handle(scope, receive, send)

    def url_path_for(self, name: str, /, **path_params: Any) -> Any:
        raise NoMatchFound(name, path_params)


class DirectCalls:
    """ASGI middleware that calls `Direct` routes."""

    def __init__(self, app: ASGIApp, index: RouteIndex, handlers: Mapping[Any, Any]) -> None:
        self._app, self._index, self._handlers = app, index, handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._index.find(scope) if scope["type"] == "http" else None
        if found is None or found[0].direct is None:
            await self._app(scope, receive, send)
            return
        indexed, parts = found
        scope["route"] = indexed.route
        scope["path_params"] = {name: parts[place] for place, name in indexed.parameters}
        response = await respond(found[0].direct, Request(scope, receive, send), self._handlers)
        await response(scope, receive, send)


async def respond(route: Direct, request: Request, handlers: Mapping[Any, Any]) -> Response:
    """The route's response, or that of the handler of its error. Raises what no handler takes."""
    try:
        return await route.respond(request)
    except Exception as error:
        handler = next((handlers[kind] for kind in type(error).__mro__ if kind in handlers), None)
        if handler is None:
            raise
        response: Response = await handler(request, error)
        return response


def _named(parts: Sequence[str], places: Sequence[int]) -> str:
    """The path with its parameters replaced."""
    if not places:
        return "/".join(parts)
    named = list(parts)
    for place in places:
        named[place] = _ANY
    return "/".join(named)


def _is_plain(route: BaseRoute) -> bool:
    """Whether each parameter of it is one whole part of the path."""
    if not isinstance(route, Route) or not all(
        isinstance(each, StringConvertor) for each in route.param_convertors.values()
    ):
        return False
    parameters = [part for part in route.path_format.split("/") if "{" in part]
    return len(parameters) == len(route.param_convertors) and all(
        part.startswith("{") and part.endswith("}") for part in parameters
    )

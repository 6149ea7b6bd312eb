"""Routing by look-up: the route of a path and method is found at once, where Starlette asks one route after the other.

    GET /sessions/s-1  ──3 parts──► /sessions/s-1, /sessions/{} ──► (GET, /sessions/{}) ──► its route

What is not found here (another method, an unknown path) goes the framework's way, through all routes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Any

from fastapi import FastAPI
from starlette._utils import get_route_path
from starlette.convertors import StringConvertor
from starlette.routing import BaseRoute, Match, NoMatchFound, Route
from starlette.types import Receive, Scope, Send

_ANY = "{}"


def index_routes(app: FastAPI) -> None:
    """Look up the routes that the application has now. The answers are the same as without it."""
    app.router.routes.insert(0, RouteIndex(app.router.routes))


class RouteIndex(BaseRoute):
    """Stands before the routes that it finds. Of two that fit, it takes the one that came first, as Starlette does."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self._routes: dict[tuple[str, str], tuple[int, Route]] = {}
        self._parameters: dict[int, list[tuple[int, ...]]] = {}
        """By the number of a path's parts: which of them are parameters, for each shape that there is."""
        # One that is not understood here might fit what comes after it.
        for number, route in enumerate(takewhile(_is_plain, routes)):
            assert isinstance(route, Route)
            parts = route.path_format.split("/")
            places = tuple(place for place, part in enumerate(parts) if part.startswith("{"))
            shapes = self._parameters.setdefault(len(parts), [])
            if places not in shapes:
                shapes.append(places)
            for method in route.methods or ():
                self._routes.setdefault((method, _named(parts, places)), (number, route))

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] == "http":
            parts, method = get_route_path(scope).split("/"), scope["method"]
            shapes = self._parameters.get(len(parts), ())
            found = [self._routes.get((method, _named(parts, places))) for places in shapes]
            for _, route in sorted((each for each in found if each is not None), key=lambda each: each[0]):
                match, child = route.matches(scope)
                if match is Match.FULL:
                    return match, {**child, "route": route}
        return Match.NONE, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await scope["route"].handle(scope, receive, send)

    def url_path_for(self, name: str, /, **path_params: Any) -> Any:
        raise NoMatchFound(name, path_params)


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

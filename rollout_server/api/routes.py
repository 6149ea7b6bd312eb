"""What the routes of a rollout server share: the parts that they call, the errors that they declare, names in the log."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from fastapi import Request, Response

from rollout_server.api.request_names import name_call
from services.http.app import declared_errors
from services.http.typed_route import TypedRoute

T = TypeVar("T")
Ready = Callable[[], T]
"""Gives a route one part of the server. Raises NotReadyError before the engine is up."""


class RolloutRoute(TypedRoute):
    """A `TypedRoute` with the session or group of a call in the log."""

    async def respond(self, request: Request) -> Response:
        name_call(request.path_params)
        return await super().respond(request)


def checked(check_body: Callable[[bytes], None]) -> type[RolloutRoute]:
    """A `RolloutRoute` whose bodies are looked at before they are parsed."""
    return type("CheckedRoute", (RolloutRoute,), {"check_body": staticmethod(check_body)})


_MEANINGS = {
    400: "A prompt that is too long, or something that cannot be served",
    401: "No key, or one that nobody issued",
    403: "A key that does not open this",
    404: "Nothing of this name is here",
    409: "It has ended, is busy, or contradicts what happened before",
    410: "The session has expired, or the run has concluded",
    413: "A body that is too large",
    422: "A body or parameter that does not fit the schema",
    429: "No capacity: try again after Retry-After",
    503: "The server is starting, draining, or has lost something it needs",
    504: "A deadline has passed",
}

ERRORS = declared_errors(_MEANINGS)
"""The error answers that routes declare in the OpenAPI document; all have the same body."""

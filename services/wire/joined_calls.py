"""Several calls of one client in one request, `POST /calls`: what is sent, and the lines that are answered.

    {"calls": [{"path": "/groups", "name": "…", "body": {…}}, …]}   ──►   {"number": 1, "status": 200, "body": {…}}
                                                                          {"number": 0, "status": 201, "body": {…}}

Each is carried out as if it had been sent alone, by `POST`; its line is sent when it is answered, whatever the others do.
Who gives up a call that was sent alone closes its connection. Of one among others it says so, `POST /calls/given-up`.
"""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

PATH = "/calls"
GIVEN_UP = "/calls/given-up"
JOINED = ("/groups", "/groups/{group_id}/turns", "/groups/{group_id}/finish")
"""Paths that may be called so."""
MOST_CALLS = 64
"""In one request."""
LINES = "application/x-ndjson"
_JOINED = re.compile("|".join(re.sub(r"\{\w+\}", "[A-Za-z0-9._~%-]+", path) for path in JOINED))


class JoinedCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """`path`: encoded. `body`: JSON. `name`: what `services.wire.gateway_api.CALL_HEADER` would say, "" for nothing."""

    path: str
    body: msgspec.Raw
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9]{0,64}$(?!\n)")] = ""


class JoinedCalls(msgspec.Struct, frozen=True):
    calls: Annotated[list[JoinedCall], msgspec.Meta(min_length=1, max_length=MOST_CALLS)]


class GivenUp(msgspec.Struct, frozen=True):
    """Nobody waits for the calls of these names any more, nor sends them again: what they still do is to be ended."""

    names: Annotated[list[str], msgspec.Meta(min_length=1, max_length=MOST_CALLS)]


class JoinedAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to call `number`, counted from 0. `body`: JSON. `retry_after`: that header of an error."""

    number: int
    status: int
    body: msgspec.Raw
    retry_after: str | None = None


def may_be_joined(path: str) -> bool:
    """Whether an encoded path is one of JOINED."""
    return _JOINED.fullmatch(path) is not None

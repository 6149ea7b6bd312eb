"""Parsing a proxied request: which session or group it names, and whether it opens one or generates tokens.

| named by                          | example                                      |
|-----------------------------------|----------------------------------------------|
| the URL                           | `/sessions/{id}/v1/…`, `/groups/{id}/turns`  |
| a session's key as bearer         | `Authorization: Bearer rs-{id}-{mac}`        |
| the header `X-Session-ID`         |                                              |

A session's key was verified before (`services.gateway.session_keys`), what it opens is not: servers do that. Whoever lies
about a session only sends the call to a server that refuses it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from redis.asyncio import Redis
from redis.exceptions import RedisError
from starlette.types import Scope

from services.http.auth import bearer
from services.run_store.session_groups import SessionGroups
from services.security.keys import PREFIX
from services.wire.errors import UNDECODABLE, WireError
from services.wire.gateway_api import BASE_URL_HEADER, CALL_HEADER

GENERATE = "/inference/v1/generate"
_ROOTS = frozenset(("sessions", "groups", "calls", "runners", "evaluations", "v1", "trajectories"))
# Hop-by-hop headers (RFC 9110, 7.6.1), and those that are written anew for each hop.
_OF_THE_REQUEST = {
    *b"connection keep-alive proxy-connection proxy-authorization te trailer transfer-encoding upgrade".split(),
    *b"host content-length expect".split(),
    BASE_URL_HEADER.encode(),
}
_GENERATING = ("/completions", "/generate", "/turns")

Headers = list[tuple[str, str]]
_Read = TypeVar("_Read")


def is_proxied(path: str) -> bool:
    """Whether a path belongs to the rollout servers' agents; operating an engine is done at the server itself."""
    return path == GENERATE or path[1:].partition("/")[0] in _ROOTS


@dataclass(slots=True)
class ProxiedCall:
    """One call of an agent. It is sent as it stands, to one server after another if need be.

    `target`: path and query, as the agent encoded them. `call_id` stands in `headers` too.
    """

    method: str
    path: str
    target: str
    headers: Headers
    body: bytes
    call_id: str
    session_id: str | None
    group_id: str | None

    @property
    def opens(self) -> bool:
        """Whether it opens a session or a group."""
        return self.method == "POST" and self.path in ("/sessions", "/groups")

    @property
    def ends(self) -> bool:
        """Whether it ends a session or a group."""
        if self.method == "DELETE":
            return self.path.startswith("/sessions/")
        return self.method == "POST" and self.path.endswith(("/finish", "/abort"))

    @property
    def generates(self) -> bool:
        """Whether it lets an engine generate tokens."""
        return self.method == "POST" and self.path.endswith(_GENERATING)

    @property
    def is_stateless(self) -> bool:
        """Whether it generates tokens outside any session."""
        return self.path == GENERATE and self.method == "POST" and self.session_id is None

    @property
    def may_name_nothing(self) -> bool:
        """Whether only a header of the token route names its session: the id may be of the client's own making."""
        return self.path == GENERATE and self.session_id is not None and not _shown_key(self.headers).startswith(PREFIX)


def read_call(scope: Scope, body: bytes) -> ProxiedCall:
    """The call as it will be sent on."""
    headers: Headers = []
    call_id = host = named = ""
    for name, value in scope["headers"]:
        if name == b"host":
            host = value.decode("latin-1")
        if name in _OF_THE_REQUEST:
            continue
        key, text = name.decode("latin-1"), value.decode("latin-1")
        if key == CALL_HEADER:
            call_id = text
        elif key == "x-session-id":
            named = text
        headers.append((key, text))
    if not call_id:
        call_id = secrets.token_hex(16)
        headers.append((CALL_HEADER, call_id))
    headers.append((BASE_URL_HEADER, f"{scope['scheme']}://{host}"))
    path = scope["path"]
    session_id, group_id = _in_path(path)
    target, query = scope["raw_path"].decode("latin-1"), scope["query_string"]
    return ProxiedCall(
        method=scope["method"],
        path=path,
        target=f"{target}?{query.decode('latin-1')}" if query else target,
        headers=headers,
        body=body,
        call_id=call_id,
        session_id=session_id or _of_key(_shown_key(headers)) or named or None,
        group_id=group_id,
    )


def read_body(decode: Callable[[bytes], _Read], body: bytes) -> _Read | None:
    """What a body says; None for what cannot be read as that: the server says what is wrong with it.

    Raises WireError for nesting that no server reads either.
    """
    try:
        return decode(body)
    except RecursionError as error:
        raise WireError("the body is nested too deeply", "send flatter JSON") from error
    except UNDECODABLE:
        return None


def _in_path(path: str) -> tuple[str | None, str | None]:
    """Session and group that a path names."""
    parts = path.split("/", 3)
    if len(parts) < 3 or not parts[2]:
        return None, None
    return (parts[2] if parts[1] == "sessions" else None), (parts[2] if parts[1] == "groups" else None)


def _shown_key(headers: Headers) -> str:
    return bearer(next((value for name, value in headers if name == "authorization"), None))


def _of_key(key: str) -> str | None:
    """The session of a session's key, which may hold dashes; its last part may not."""
    return key.removeprefix(PREFIX).rpartition("-")[0] or None if key.startswith(PREFIX) else None


_LOOK_WITHIN_S = 2.0


class SessionIndex:
    """The sessions that the servers of a run have opened, read from Redis.

    With vLLM's token route trainers' clients send session ids of their own, which name nothing here.
    """

    def __init__(self, redis: Redis, run_id: str) -> None:
        self._sessions = SessionGroups(redis, run_id)

    async def holds(self, session_id: str) -> bool:
        """Whether a server has opened this session. While Redis fails every id counts as one: the servers decide."""
        try:
            async with asyncio.timeout(_LOOK_WITHIN_S):
                return await self._sessions.group_of(session_id) is not None
        except (RedisError, OSError, TimeoutError):
            return True

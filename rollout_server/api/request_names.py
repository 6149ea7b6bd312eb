"""Names of a request: the gateway's call id, the same for each server that it tries, and what log lines are tagged with.

The log context (session or group, served policy version) is bound for the request's task and for those that it starts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from structlog.contextvars import bind_contextvars

from services.wire.errors import UsageError
from services.wire.gateway_api import CALL_HEADER

_NAME = re.compile(r"[A-Za-z0-9]{16,64}")


def call_name(request: Request) -> str | None:
    """None for a call that came without a gateway. Raises UsageError for a name that nobody could have chosen at random."""
    name = request.headers.get(CALL_HEADER)
    if name is not None and not _NAME.fullmatch(name):
        raise UsageError(
            f"the header {CALL_HEADER} is {name[:80]!r}", "give 16 to 64 letters and digits, chosen at random"
        )
    return name


_NAMES = {"session_id": "session", "group_id": "group"}


def name_call(path: Mapping[str, Any]) -> None:
    """Tag log lines with the session or group of the path. `path`: the parameters of the call's path."""
    for parameter, name in _NAMES.items():
        if parameter in path:
            bind_contextvars(**{name: path[parameter]})


def name_session(session_id: str, version: int) -> None:
    """Tag log lines of a call that names its session by key or header."""
    bind_contextvars(session=session_id, version=version)


def name_version(version: int) -> None:
    bind_contextvars(version=version)

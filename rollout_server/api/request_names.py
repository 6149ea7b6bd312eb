"""The name that a gateway gives a call, the same for each server that it tries: what was done for it is done once."""

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


# What log lines of a call name: its group or session, and the policy version that was served when it came.
#
# Bound for the call's task and for those that it starts; each call has a task of its own.

_NAMES = {"session_id": "session", "group_id": "group"}


def name_call(path: Mapping[str, Any]) -> None:
    """`path`: the parameters of the call's path."""
    for parameter, name in _NAMES.items():
        if parameter in path:
            bind_contextvars(**{name: path[parameter]})


def name_session(session_id: str, version: int) -> None:
    """Of a call that names its session by key or header, too."""
    bind_contextvars(session=session_id, version=version)


def name_version(version: int) -> None:
    bind_contextvars(version=version)

"""What log lines of a call name: its group or session, and the policy version that was served when it came.

Bound for the call's task and for those that it starts; each call has a task of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from structlog.contextvars import bind_contextvars

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

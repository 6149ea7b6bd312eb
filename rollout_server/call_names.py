"""The name that a gateway gives a call, the same for each server that it tries: what was done for it is done once."""

from __future__ import annotations

import re

from fastapi import Request

from services.wire.errors import UsageError
from services.wire.mesh_headers import CALL_HEADER

_NAME = re.compile(r"[A-Za-z0-9]{16,64}")


def call_name(request: Request) -> str | None:
    """None for a call that came without a gateway. Raises UsageError for a name that nobody could have drawn at random."""
    name = request.headers.get(CALL_HEADER)
    if name is not None and not _NAME.fullmatch(name):
        raise UsageError(
            f"the header {CALL_HEADER} is {name[:80]!r}", "give 16 to 64 letters and digits, drawn at random"
        )
    return name

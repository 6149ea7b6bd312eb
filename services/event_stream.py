"""How server-sent event streams end, from whichever service they come."""

from __future__ import annotations

from services.app import error_answer
from services.wire.errors import RollmeshError

DONE = b"data: [DONE]\n\n"
"""The event that ends a stream, OpenAI's and vLLM's alike."""


def error_event(error: RollmeshError) -> bytes:
    """The event that tells of a failure after the stream had begun."""
    return b"data: " + bytes(error_answer(error).body) + b"\n\n"

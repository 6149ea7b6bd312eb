"""Error answers of the engine behind a URL as typed errors, whether vLLM or a rollout server gave them. Pure."""

from __future__ import annotations

import msgspec

from services.wire.error_answer import PromptTooLongError, typed_error
from services.wire.errors import (
    CapacityError,
    ConflictError,
    NotFoundError,
    NotReadyError,
    RollmeshError,
    UnauthenticatedError,
    UsageError,
)
from weight_bus.errors import StageError, TransportError


class EngineLostError(NotReadyError):
    """The engine behind this server does not answer; another server may take the request."""

    code = "engine_lost"


class _Detail(msgspec.Struct):
    message: str = ""
    code: str | int | None = None


class _Body(msgspec.Struct):
    """vLLM answers `error` as a text on its routes for operators, else as an object; FastAPI itself says `detail`."""

    error: _Detail | str | None = None
    detail: msgspec.Raw | None = None


_bodies = msgspec.json.Decoder(_Body)


def peer_error(call: str, status: int, retry_after: str | None, content: bytes) -> RollmeshError:
    """What the peer meant by answering `call` with the error `status`. `retry_after`: that header, in seconds."""
    try:
        body = _bodies.decode(content)
    except msgspec.DecodeError:
        body = _Body(error=content[:200].decode(errors="replace"))
    if isinstance(body.error, _Detail) and isinstance(body.error.code, str):
        error = typed_error(call, status, retry_after, content, (StageError, TransportError))
        if type(error) is not RollmeshError or status != NotReadyError.status:
            return error
        return NotReadyError(error.what)
    said = body.error.message if isinstance(body.error, _Detail) else body.error
    if said is None:
        said = "" if body.detail is None else bytes(body.detail).decode(errors="replace")
    return _by_status(f"{call} answered {status} ({said})", status)


def stream_error(call: str, raw: bytes) -> RollmeshError:
    """The error that an event carried after the answer had begun."""
    status = 500
    try:
        code = msgspec.json.decode(raw, type=_Detail).code
        status = code if isinstance(code, int) else status
    except msgspec.DecodeError:
        pass
    return peer_error(call, status, None, b'{"error":' + raw + b"}")


def _by_status(what: str, status: int) -> RollmeshError:
    if "maximum context length" in what:
        return PromptTooLongError(what)
    if "scale-out" in what:
        return UsageError(what, "start that vLLM with --enable-scale-out")
    kinds: dict[int, type[RollmeshError]] = {
        400: UsageError,
        401: UnauthenticatedError,
        404: NotFoundError,
        405: NotFoundError,
        409: ConflictError,
        422: UsageError,
        503: NotReadyError,
    }
    if status == CapacityError.status:
        return CapacityError(what, 1.0)
    return kinds.get(status, RollmeshError)(what)

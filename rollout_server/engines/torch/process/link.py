"""What a rollout server and the process of its engine core say to each other, over a socket pair that nobody else has.

    server                                        core
      CoreSettings ─────────────────────────────►   first, before it imports torch
      Submit, Drop ─────────────────────────────►   in order, without an answer
      Ask(number, question) ────────────────────►
           ◄──────────────── Answer(number, …)      in the order in which they are done
           ◄──────────────── Generated              the outcomes of a decode step
           ◄──────────────── Crashed                once: it generates nothing any more
           ◄──────────────── Moment                 what changed meanwhile, ten times a second at most

Each frame is a length (little-endian, 4 bytes) and a message in msgpack. Either end ends with its connection.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import msgspec

from rollout_server.engines.base import (
    EngineCrashedError,
    EngineStatus,
    GenerationDelta,
    GenerationRequest,
    NonFiniteLogitsError,
    RequestFailed,
)
from services.wire.errors import (
    ConflictError,
    DeadlineError,
    NotReadyError,
    RollmeshError,
    UsageError,
    WireError,
)
from services.wire.weights_api import PauseMode
from weight_bus.errors import SignatureError, StageError, TransportError

MessageT = TypeVar("MessageT")
_LENGTH = struct.Struct("<I")
_ERRORS: dict[str, type[RollmeshError]] = {
    each.__name__: each
    for each in (
        ConflictError,
        DeadlineError,
        EngineCrashedError,
        NonFiniteLogitsError,
        NotReadyError,
        RollmeshError,
        SignatureError,
        StageError,
        TransportError,
        UsageError,
        WireError,
    )
}


class Submit(msgspec.Struct, frozen=True, tag="submit"):
    request: GenerationRequest


class Drop(msgspec.Struct, frozen=True, tag="drop"):
    request_id: str


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Answered with `Loaded`."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Answered with the number of requests."""

    request_ids: list[str] | None


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Answered with None, as `Resume` is."""

    mode: PauseMode


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    pass


class Stage(msgspec.Struct, frozen=True, tag="stage"):
    """Answered with `StageAnswer`."""

    manifest: bytes


class Commit(msgspec.Struct, frozen=True, tag="commit"):
    """Answered with `CommitAnswer`, as `Rollback` is."""

    version: int


class Rollback(msgspec.Struct, frozen=True, tag="rollback"):
    version: int


class Digest(msgspec.Struct, frozen=True, tag="digest"):
    """Answered with the root digest."""


Question = Start | Abort | Pause | Resume | Stage | Commit | Rollback | Digest


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    number: int
    question: Question


class Failure(msgspec.Struct, frozen=True):
    """An error of the core. `kind`: the name of its class, or of the nearest one of its bases that `_ERRORS` holds."""

    kind: str
    what: str
    remedy: str

    @classmethod
    def of(cls, error: RollmeshError) -> Failure:
        kind = next(each.__name__ for each in type(error).__mro__ if each.__name__ in _ERRORS)
        return cls(kind, error.what, error.remedy)

    def error(self) -> RollmeshError:
        """As it was raised over there: some classes make their words of other arguments."""
        kind = _ERRORS.get(self.kind, RollmeshError)
        made = kind.__new__(kind)
        RollmeshError.__init__(made, self.what, self.remedy)
        return made


class Moment(msgspec.Struct, frozen=True, tag="moment"):
    """The core's status, without `stalls_ms`, which are told only where they have changed."""

    status: EngineStatus
    stalls_ms: list[float] | None


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """`value`: what the question says; None where there is a `failure`."""

    number: int
    value: msgspec.Raw
    failure: Failure | None
    moment: Moment


class FailedRequest(msgspec.Struct, frozen=True):
    request_id: str
    failure: Failure

    @classmethod
    def of(cls, outcome: RequestFailed) -> FailedRequest:
        return cls(outcome.request_id, Failure.of(outcome.error))


class Generated(msgspec.Struct, frozen=True, tag="generated"):
    deltas: list[GenerationDelta]
    failed: list[FailedRequest]
    moment: Moment


class Crashed(msgspec.Struct, frozen=True, tag="crashed"):
    failure: Failure


ToCore = Submit | Drop | Ask
FromCore = Answer | Generated | Crashed | Moment


def encode_frame(message: object) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class Link(asyncio.Protocol, Generic[MessageT]):
    """One end. `on_message` gets each message of `kind` (a type that msgspec decodes), `on_lost` the connection's end."""

    def __init__(self, kind: Any, on_message: Callable[[MessageT], None], on_lost: Callable[[], None]) -> None:
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(kind)
        self._on_message = on_message
        self._on_lost = on_lost
        self._unread = bytearray()
        self._unsent: list[bytes] = []
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        unread = self._unread
        unread += data
        begin = 0
        while len(unread) - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(unread, begin)
            end = begin + _LENGTH.size + length
            if len(unread) < end:
                break
            body = bytes(memoryview(unread)[begin + _LENGTH.size : end])
            begin = end
            self._on_message(self._decoder.decode(body))
        del unread[:begin]

    def connection_lost(self, error: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        self._on_lost()

    def send(self, message: object) -> None:
        """Send it with what else is sent in this turn of the event loop: a system call costs more than a message does.

        Raises NotReadyError once the other end is gone.
        """
        if self._transport is None or self._transport.is_closing():
            raise NotReadyError("the engine's process is gone", "send the request to another server")
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unsent.append(encode_frame(message))

    def close(self) -> None:
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def _flush(self) -> None:
        unsent, self._unsent = self._unsent, []
        if unsent and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(unsent))


def read_first(read: Callable[[int], bytes], kind: type[MessageT]) -> MessageT:
    """The first message of a blocking stream. Raises EOFError where it ends before."""
    (length,) = _LENGTH.unpack(_exactly(read, _LENGTH.size))
    return msgspec.msgpack.decode(_exactly(read, length), type=kind)


def _exactly(read: Callable[[int], bytes], length: int) -> bytes:
    parts = b""
    while len(parts) < length:
        part = read(length - len(parts))
        if not part:
            raise EOFError(f"{len(parts)} of {length} bytes")
        parts += part
    return parts

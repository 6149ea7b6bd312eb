"""The server's side of a connection: uvicorn's HTTP protocol, with bounds on what a caller costs before it shows a key.

| what                                       | bound                                        | past it                     |
|--------------------------------------------|----------------------------------------------|-----------------------------|
| request line and headers, trailers         | MOST_HEAD_BYTES, MOST_HEADERS                | 431, closed                 |
| time until all headers are here            | `head_within_s`                              | 408, closed                 |
| time until the body is here                | `body_within_s` and its bytes / SLOWEST_BODY | 408, closed                 |
| the rest of a body that nobody reads       | `head_within_s`                              | closed                      |
| requests sent ahead of their answers       | MOST_AHEAD                                   | 400, closed                 |
| connections that have shown no key         | `strangers`, for a moment `most_strangers`   | the oldest of them is ended |

httptools has no bound on a head, and joins each piece of it to those before: 32 MiB took it seconds, on the event loop.
A request that comes in one piece costs no timer here, only a few comparisons.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import httptools
from starlette.types import Scope
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from services.wire.error_answer import error_body
from services.wire.errors import RollmeshError

MOST_HEAD_BYTES = 64 << 10
MOST_HEADERS = 128
MOST_AHEAD = 16
SLOWEST_BODY = 8 << 10
"""Bytes a second of a body that takes longer than `body_within_s`."""
_CALLER = "rollmesh.caller"
_HEAD_BEGINS, _HEAD_ENDS = b"HTTP/1.1 ", b"\r\n\r\n"
_LINGER_S = 1.0


@dataclass(frozen=True)
class Bounds:
    """`strangers`: connections that have shown no key; for `stranger_s` after they came there may be `most_strangers`."""

    head_within_s: float = 10.0
    body_within_s: float = 30.0
    strangers: int = 256
    stranger_s: float = 1.0
    most_strangers: int = 2048


BOUNDS = Bounds()


class HeadTooLargeError(RollmeshError):
    """A request line, headers or trailers beyond what any caller needs: HTTP 431."""

    status = 431
    code = "head_too_large"

    def __init__(self) -> None:
        what = f"a request's head is larger than {MOST_HEAD_BYTES >> 10} KiB or {MOST_HEADERS} headers"
        super().__init__(what, "send what is long in the body")


class SlowRequestError(RollmeshError):
    """A request that did not come to its end in time: HTTP 408."""

    status = 408
    code = "request_timeout"


class MalformedRequestError(RollmeshError):
    """Bytes that are no HTTP request, or too many requests ahead of their answers: HTTP 400."""

    status = 400
    code = "bad_request"


def seconds_left(elapsed_s: float, bounds: Bounds, *, head_done: bool, answered: bool, body_bytes: int) -> float:
    """How much longer a request may take to arrive; 0 or less: it is overdue. Pure.

    `answered`: its answer is complete, so nobody waits for the rest of its body.
    """
    if not head_done or answered:
        return bounds.head_within_s - elapsed_s
    return bounds.body_within_s + body_bytes / SLOWEST_BODY - elapsed_s


class Caller:
    """Who is at the other end of a connection, or waits for one of several calls that came in one request.

    `known`: it has shown a key that is valid here. `gone`: it has closed the connection, or waits no more; `on_gone` is
    called then.
    """

    __slots__ = ("gone", "known", "on_gone")

    def __init__(self) -> None:
        self.known = self.gone = False
        self.on_gone: set[Callable[[], None]] = set()

    def left(self) -> None:
        """The connection is closed, or nobody waits any more."""
        self.gone = True
        for each in tuple(self.on_gone):
            each()


def caller_of(scope: Scope) -> Caller:
    """The caller of a request; one that never leaves where another server than ours runs the application."""
    caller: Caller | None = scope.get("state", {}).get(_CALLER)
    return caller or Caller()


def state_for(caller: Caller, scope: Scope) -> dict[str, Any]:
    """The state of a request that came within the one of `scope`: `caller` waits for it."""
    return {**scope.get("state", {}), _CALLER: caller}


def caller_is_known(scope: Scope) -> None:
    """Note that the connection of a request has shown a valid key."""
    caller_of(scope).known = True


class JoinedWrites:
    """A transport that sends an answer's head together with what is written next: one system call an answer, not two.

    write(head) ─► held ─► write(body) ─► both sent
                     └── nothing written in this turn of the event loop ─► sent alone

    Each call gives the interpreter's lock away, and an engine's thread may keep it for half a millisecond.
    """

    __slots__ = ("_due", "_head", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport, self._loop = transport, loop
        self._head: bytes | None = None
        self._due: asyncio.Handle | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._head is not None:
            head = self._take()
            self._transport.writelines([head, data] if data else [head])
        elif data.startswith(_HEAD_BEGINS) and data.endswith(_HEAD_ENDS):
            self._head, self._due = data, self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def write_eof(self) -> None:
        self._flush()
        self._transport.write_eof()

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head is not None:
            self._transport.write(self._take())

    def _take(self) -> bytes:
        head, self._head = self._head, None
        if self._due is not None:
            self._due.cancel()
            self._due = None
        assert head is not None
        return head


class Strangers:
    """Connections in the order in which they came, of which few may have shown no key.

    Past `bounds.strangers` the oldest is ended, so that strangers keep nobody out: a caller with a key shows it with its
    first request. Many callers may come at once, so each has `stranger_s` for that, as long as there are no more than
    `most_strangers`. Those that have shown a key leave when it would be their turn.
    """

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._came: dict[GuardedProtocol, float] = {}
        self._later: asyncio.TimerHandle | None = None

    @property
    def crowded(self) -> bool:
        return len(self._came) > self._bounds.strangers

    def enter(self, connection: GuardedProtocol) -> None:
        self._came[connection] = connection.loop.time()
        if self.crowded:
            self._thin(connection.loop)

    def leave(self, connection: GuardedProtocol) -> None:
        self._came.pop(connection, None)

    def _thin(self, loop: asyncio.AbstractEventLoop) -> None:
        now = loop.time()
        while self.crowded:
            oldest, came = next(iter(self._came.items()))
            if not oldest.caller.known:
                if now < came + self._bounds.stranger_s and len(self._came) <= self._bounds.most_strangers:
                    if self._later is None:
                        self._later = loop.call_at(came + self._bounds.stranger_s, self._thin_again, loop)
                    return
                oldest.transport.abort()
            self._came.pop(oldest, None)

    def _thin_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._later = None
        self._thin(loop)


class _Nowhere(list[tuple[bytes, bytes]]):
    """Where trailers go: nobody here reads them, and they must not pass for headers."""

    def append(self, _: tuple[bytes, bytes], /) -> None:
        return


_NOWHERE = _Nowhere()


class GuardedProtocol(HttpToolsProtocol):
    """One connection. See the module's docstring."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        bounds: Bounds,
        strangers: Strangers,
    ) -> None:
        self.caller = Caller()
        # It is copied into the scope of each request.
        super().__init__(config, server_state, {**app_state, _CALLER: self.caller}, _loop)
        self._bounds, self._strangers = bounds, strangers
        self._unread = 0
        """Bytes since the last piece of a body, or the last message's end."""
        self._requests = 0
        self._unfinished = self._head_done = self._refused = False
        self._body_bytes = 0
        self._why: RollmeshError | None = None
        self._watch: asyncio.TimerHandle | None = None
        self._watched, self._watched_since = 0, 0.0
        """The number of the request that is being timed, and since when."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast("asyncio.Transport", JoinedWrites(transport, self.loop)))
        self._strangers.enter(self)
        self._time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._strangers.leave(self)
        self._refused = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        super().connection_lost(exc)
        self.caller.left()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unread += len(data)
        self._unset_keepalive_if_required()
        # As uvicorn does it, but for its lines in the log, which anybody could have it write by the thousand.
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # it is answered as if it had not asked
        except httptools.HttpParserError:
            self._refuse(self._why or MalformedRequestError("these bytes are no HTTP request"))
        if self._unfinished and not self._refused:
            if self._unread > MOST_HEAD_BYTES or len(self.headers) > MOST_HEADERS:
                self._refuse(HeadTooLargeError())
            elif not self._head_done and not self.caller.known and self._strangers.crowded:
                # What comes in pieces is what a crowd of strangers could fill the memory with.
                self._refuse(
                    SlowRequestError("too many connections, and the request's head came in parts", "try again")
                )
            elif self._watch is None:
                self._time()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._requests += 1
        self._unfinished, self._head_done, self._body_bytes = True, False, 0

    def on_headers_complete(self) -> None:
        headers = self.headers
        if len(headers) > MOST_HEADERS or (self._unread > MOST_HEAD_BYTES and self._head_bytes() > MOST_HEAD_BYTES):
            self._fail(HeadTooLargeError())
        if len(self.pipeline) >= MOST_AHEAD:
            self._fail(MalformedRequestError("too many requests ahead of their answers", "use more connections"))
        super().on_headers_complete()
        self.headers, self._head_done, self._unread = _NOWHERE, True, 0

    def on_body(self, body: bytes) -> None:
        self._unread = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unfinished, self._unread = False, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self.cycle.response_complete:
            # What nobody has read, such as the body of a call that was refused for its key.
            self.cycle.body = bytearray()
        super().on_response_complete()

    def _head_bytes(self) -> int:
        return len(self.url) + sum(len(name) + len(value) for name, value in self.headers)

    def _fail(self, why: RollmeshError) -> None:
        """From a callback of the parser, which then takes nothing more."""
        self._why = why
        raise why

    def _time(self) -> None:
        """Begin to time the request that is on its way, or the wait for a first one."""
        self._watched, self._watched_since = self._requests, self.loop.time()
        self._watch = self.loop.call_later(self._bounds.head_within_s, self._look)

    def _look(self) -> None:
        self._watch = None
        if self._requests and not self._unfinished:
            return  # it waits for its answer, or there is none on its way: uvicorn ends connections that are idle
        if self._requests != self._watched or self.flow.read_paused:
            # Another request than the one that was timed, or one that we do not read.
            self._time()
            return
        answered = self._head_done and self.cycle.response_complete
        left = seconds_left(
            self.loop.time() - self._watched_since,
            self._bounds,
            head_done=self._head_done,
            answered=answered,
            body_bytes=self._body_bytes,
        )
        if left > 0:
            self._watch = self.loop.call_later(left, self._look)
        elif not self._requests:
            self.transport.close()
        else:
            what = "body" if self._head_done else "head"
            self._refuse(SlowRequestError(f"the request's {what} did not come in time", "send it in one go"))

    def _refuse(self, error: RollmeshError) -> None:
        """Answer the request that is on its way, where no other answer is begun or due before, and close.

        What still comes is read for a moment and thrown away: else the answer could be lost with the connection.
        """
        self._refused = True
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        cycle = self.cycle
        begun = cycle is not None and cycle.response_started
        done = cycle is None or cycle.response_complete
        if not self.pipeline and (not begun if self._head_done and self._unfinished else done):
            body = error_body(error).model_dump_json().encode()
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
                f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._watch = self.loop.call_later(_LINGER_S, self.transport.close)
        else:
            self.transport.close()


def guarded(bounds: Bounds = BOUNDS) -> type[asyncio.Protocol]:
    """The protocol of one server's connections, for `uvicorn.Config(http=…)`, which only ever calls it."""
    made = partial(GuardedProtocol, bounds=bounds, strangers=Strangers(bounds))
    return cast("type[asyncio.Protocol]", made)

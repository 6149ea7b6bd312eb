"""A Redis client whose commands share round trips: what is asked for while others are on their way goes out together.

    command ─► waiting ──nothing on its way?──► sent, with all that waits ──► replies, each to who asked
                 └── asked for meanwhile: the next round trip

    first, or after a failure    a task connects and repeats (`services.run_store.patience`) until nothing waits
    then                         a link: written at once, replies are read as they come; no task runs in between

A service under load makes tens of commands at a time. Each by itself takes a connection, two system calls and most of
what redis-py does around it; together they take one. They keep their connection. A busy event loop comes to each task that
takes part only after all others have had their turn: with a link a command waits for two such rounds less. Blocking reads,
transactions and a caller's own pipelines have connections of their own, as before. Replies come in the order of the
commands.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextvars import Context
from typing import Any, cast

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import Connection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import InvalidResponse, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from services.run_store.patience import ANSWER_WITHIN_S, PatientRetry

MOST_COMMANDS = 256
MOST_BYTES = 1 << 20
"""Of a round trip, unless one command alone has more."""
_CHECK_AFTER_S = 1.0
"""A connection that was idle for so long is looked at before it is used: its other end may have closed it."""


class _Command:
    """`packed`: as Redis reads it. `reply`: as hiredis reads it."""

    __slots__ = ("asked_at", "packed", "reply")

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.packed = _pack(arguments)
        self.asked_at = time.monotonic()
        self.reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def read_response(self, *_: object, **__: object) -> Any:
        """As a connection's: for redis-py's own parsing of it."""
        return await self.reply

    def answer(self, reply: Any) -> None:
        """Tell who asked: unless that was cancelled."""
        if self.reply.done():
            return
        if isinstance(reply, Exception):
            self.reply.set_exception(reply)
        else:
            self.reply.set_result(reply)


class PipeliningRedis(Redis):
    """As redis-py's client, for commands that do no harm when they are made twice. For one event loop.

    `fail_after_s`: where Redis does not answer, what has waited for so long fails with the commands before it.
    """

    fail_after_s = ANSWER_WITHIN_S

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._waiting: deque[_Command] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._connection: Connection | None = None
        self._link: _Link | None = None
        self._broken = False
        """The connection is no more, though redis-py has not noticed."""
        self._failed: tuple[Exception, float] | None = None
        """Why that was, with commands on their way, and when they were sent."""
        self._answered_at = 0.0

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Raises RedisError as redis-py's does. A caller that is cancelled leaves its command to be carried out."""
        if b"BLOCK" in args:  # as redis-py writes it
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        command = _Command(args)
        self._waiting.append(command)
        if self._link is not None:
            self._link.send()
        else:
            self._start_sending()
        if options or args[0] in self.response_callbacks:
            return await self.parse_response(cast(Connection, command), args[0], **options)
        return await command.reply

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        if self._link is not None:
            self._fail(self._link.leave(), RedisConnectionError("the client was closed"), everything=True)
            self._link = None
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait({self._sender})
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await connection.disconnect(nowait=True)  # nobody else can read from it
            await self.connection_pool.release(connection)
        await super().aclose(close_connection_pool)

    def _start_sending(self) -> None:
        if self._sender is None:
            # Not in the context of the call that happens to be first: the log's names there are not the others'.
            self._sender = asyncio.get_running_loop().create_task(self._send(), context=Context())

    async def _send(self) -> None:
        """Until nothing waits."""
        try:
            while self._waiting:
                together = self.take()
                try:
                    replies = await self._exchange(together)
                except Exception as error:  # noqa: BLE001 - raised again in who waits
                    self._fail(together, error)
                    continue
                except BaseException:
                    self._fail(together, RedisConnectionError("the client was closed"), everything=True)
                    raise
                for command, reply in zip(together, replies, strict=True):
                    command.answer(reply)
            if self._connection is not None and self._connection.is_connected:
                self._link = _Link.on(self._connection, self)
        finally:
            self._sender = None

    @property
    def waits(self) -> bool:
        """Whether anything waits to be sent."""
        return bool(self._waiting)

    def take(self) -> list[_Command]:
        """What goes into the next round trip, of what waits."""
        together, nbytes = list[_Command](), 0
        while self._waiting and len(together) < MOST_COMMANDS:
            nbytes += len(self._waiting[0].packed)
            if together and nbytes > MOST_BYTES:
                break
            together.append(self._waiting.popleft())
        return together

    def broke_off(self, unanswered: Sequence[_Command], error: Exception, sent_at: float) -> None:
        """The link is no more, and these are to be sent again."""
        self._link, self._broken = None, True
        if unanswered:
            self._failed = error, sent_at
            self._waiting.extendleft(reversed(unanswered))
            self._start_sending()

    def _fail(self, together: list[_Command], error: Exception, *, everything: bool = False) -> None:
        """Who has waited for as long as it takes to find that Redis does not answer is told at once."""
        overdue = time.monotonic() - self.fail_after_s
        while self._waiting and (everything or self._waiting[0].asked_at <= overdue):
            together.append(self._waiting.popleft())
        for command in together:
            command.answer(error)

    async def _exchange(self, together: list[_Command]) -> list[Any]:
        """The reply to each, or the error that Redis answered."""
        failed, self._failed = self._failed, None
        connection = await self._ready()
        retry = connection.retry

        async def give_up(error: Exception) -> None:
            await connection.disconnect(error=error)

        async def attempt() -> list[Any]:
            return await _round_trip(connection, together)

        try:
            if failed is not None and isinstance(retry, PatientRetry):
                replies = await retry.again(attempt, give_up, *failed)
            else:
                replies = await retry.call_with_retry(attempt, give_up)
        except BaseException:
            # A reply that nobody read would be taken for that of the next command.
            await connection.disconnect(nowait=True)
            raise
        self._answered_at = time.monotonic()
        return replies

    async def _ready(self) -> Connection:
        """The connection of these commands. Only the sender uses it."""
        if self._connection is None:
            await self.initialize()
            self._connection = await self.connection_pool.get_connection()  # type: ignore[no-untyped-call]
        elif self._broken:
            self._broken = False
            await self._connection.disconnect(nowait=True)  # what is sent next opens it again
        elif time.monotonic() - self._answered_at > _CHECK_AFTER_S:
            await self.connection_pool.ensure_connection(self._connection)
        return self._connection


async def _round_trip(connection: Connection, together: list[_Command]) -> list[Any]:
    await connection.send_packed_command([command.packed for command in together])
    replies: list[Any] = []
    for _ in together:
        try:
            replies.append(await connection.read_response())
        except ResponseError as error:
            replies.append(error)
    return replies


class _Link(asyncio.Protocol):
    """Reads and writes a connection that redis-py has opened, instead of its stream. What breaks it off ends it for good.

    redis-py has no way to get at the transport: where another version of it hides that elsewhere, there are no links.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        parse_error: Callable[[str], Exception],
        client: PipeliningRedis,
        within_s: float,
    ) -> None:
        self._transport = transport
        self._client = client
        self._within_s = within_s
        self._sent: deque[_Command] = deque()
        self._sent_at = 0.0
        self._ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._incomplete = object()
        self._reader = hiredis.Reader(
            protocolError=InvalidResponse, replyError=parse_error, notEnoughData=self._incomplete
        )
        self._stream = transport.get_protocol()
        """The connection's own, which hears of its end: redis-py waits for that."""
        transport.set_protocol(self)

    @classmethod
    def on(cls, connection: Connection, client: PipeliningRedis) -> _Link | None:
        """On a connection on which no reply is outstanding."""
        writer = getattr(connection, "_writer", None)
        parse_error = getattr(getattr(connection, "_parser", None), "parse_error", None)
        if not isinstance(writer, asyncio.StreamWriter) or parse_error is None or writer.transport.is_closing():
            return None
        retry = connection.retry
        within_s = retry.answer_within_s if isinstance(retry, PatientRetry) else client.fail_after_s
        return cls(cast(asyncio.Transport, writer.transport), parse_error, client, within_s)

    def send(self) -> None:
        """What waits, unless something is on its way: then it goes when that is answered."""
        if self._sent or self._ended:
            return
        self._sent.extend(self._client.take())
        self._sent_at = time.monotonic()
        self._transport.writelines([command.packed for command in self._sent])
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._within_s, self._look)

    def leave(self) -> list[_Command]:
        """It is not used any more; what has no answer yet."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        unanswered = list(self._sent)
        self._sent.clear()
        return unanswered

    def _look(self) -> None:
        """Whether an answer is overdue. One timer serves many round trips: one for each would cost as much as the rest."""
        self._timer = None
        if not self._sent:
            return
        left_s = self._sent_at + self._within_s - time.monotonic()
        if left_s > 0.0:
            self._timer = asyncio.get_running_loop().call_later(left_s, self._look)
        else:
            self._break_off(RedisTimeoutError(f"no answer within {self._within_s:g} s"))

    def _break_off(self, error: Exception) -> None:
        if self._ended:
            return
        sent_at, unanswered = self._sent_at, self.leave()
        self._transport.abort()
        self._client.broke_off(unanswered, error, sent_at)

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        try:
            self._reader.feed(data)
            while self._sent and (reply := self._reader.gets()) is not self._incomplete:
                if isinstance(reply, RedisConnectionError):  # Redis starts, or wants a password
                    raise reply
                # Of its maintenance Redis may tell unasked: a connection that ends says as much.
                if not isinstance(reply, hiredis.PushNotification):
                    self._sent.popleft().answer(reply)
        except RedisError as error:
            self._break_off(error)
            return
        if self._client.waits:
            self.send()

    def eof_received(self) -> None:
        """Redis closes the connection: `connection_lost` follows."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._stream.connection_lost(exc)
        self._break_off(
            RedisConnectionError(f"Redis closed the connection ({exc})" if exc else "Redis closed the connection")
        )


def _pack(arguments: tuple[Any, ...]) -> bytes:
    """As Redis reads it. Words of a command's name (`CONFIG GET`) are arguments of their own."""
    name, *rest = arguments
    words = name.encode().split() if isinstance(name, str) else name.split()
    packed: bytes = hiredis.pack_command((*words, *rest))
    return packed

"""A Redis client whose commands share round trips: what is asked for while others are on their way goes out together.

    command ─► waiting ──nothing on its way?──► sent, with all that waits ──► replies, each to who asked
                 └── asked for meanwhile: the next round trip

A service under load makes tens of commands at a time. Each by itself takes a connection, two system calls and most of
what redis-py does around it; together they take one. They keep their connection: taking it from the pool, which looks
whether it is alive, makes a command alone a quarter dearer. Blocking reads, transactions and a caller's own pipelines
have connections of their own, as before. Replies come in the order of the commands.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from contextvars import Context
from typing import Any

import hiredis
from redis.asyncio import Redis
from redis.asyncio.connection import Connection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from services.run_store.patience import ANSWER_WITHIN_S

MOST_COMMANDS = 256
MOST_BYTES = 1 << 20
"""Of a round trip, unless one command alone has more."""
_CHECK_AFTER_S = 1.0
"""A connection that was idle for so long is looked at before it is used: its other end may have closed it."""


class _Command:
    """`packed`: as Redis reads it."""

    __slots__ = ("asked_at", "name", "options", "packed", "reply")

    def __init__(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.name: Any = arguments[0]
        self.options = options
        self.packed = _pack(arguments)
        self.asked_at = time.monotonic()
        self.reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()


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
        self._answered_at = 0.0

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Raises RedisError as redis-py's does. A caller that is cancelled leaves its command to be carried out."""
        if b"BLOCK" in args:  # as redis-py writes it
            return await super().execute_command(*args, **options)  # type: ignore[no-untyped-call]
        command = _Command(args, options)
        self._waiting.append(command)
        if self._sender is None:
            # Not in the context of the call that happens to be first: the log's names there are not the others'.
            self._sender = asyncio.get_running_loop().create_task(self._send(), context=Context())
        return await command.reply

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.wait({self._sender})
        if self._connection is not None:
            connection, self._connection = self._connection, None
            await self.connection_pool.release(connection)
        await super().aclose(close_connection_pool)

    async def _send(self) -> None:
        """Until nothing waits."""
        try:
            while self._waiting:
                together = self._take()
                try:
                    replies = await self._exchange(together)
                except BaseException as error:
                    self._fail(together, error)
                    if not isinstance(error, Exception):
                        raise
                    continue
                for command, reply in zip(together, replies, strict=True):
                    if command.reply.done():
                        continue  # its caller was cancelled
                    if isinstance(reply, Exception):
                        command.reply.set_exception(reply)
                    else:
                        command.reply.set_result(reply)
        finally:
            self._sender = None

    def _take(self) -> list[_Command]:
        together, nbytes = list[_Command](), 0
        while self._waiting and len(together) < MOST_COMMANDS:
            nbytes += len(self._waiting[0].packed)
            if together and nbytes > MOST_BYTES:
                break
            together.append(self._waiting.popleft())
        return together

    def _fail(self, together: list[_Command], error: BaseException) -> None:
        """Who has waited for as long as it takes to find that Redis does not answer is told at once."""
        ended = not isinstance(error, Exception)
        told = RedisConnectionError("the client was closed") if ended else error
        overdue = time.monotonic() - self.fail_after_s
        while self._waiting and (ended or self._waiting[0].asked_at <= overdue):
            together.append(self._waiting.popleft())
        for command in together:
            if not command.reply.done():
                command.reply.set_exception(told)

    async def _exchange(self, together: list[_Command]) -> list[Any]:
        """The reply to each, or the error that Redis answered."""
        connection = await self._ready()

        async def give_up(error: Exception) -> None:
            await connection.disconnect(error=error)

        try:
            replies: list[Any] = await connection.retry.call_with_retry(
                lambda: self._round_trip(connection, together), give_up
            )
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
        elif time.monotonic() - self._answered_at > _CHECK_AFTER_S:
            await self.connection_pool.ensure_connection(self._connection)
        return self._connection

    async def _round_trip(self, connection: Connection, together: list[_Command]) -> list[Any]:
        await connection.send_packed_command([command.packed for command in together])
        replies: list[Any] = []
        for command in together:
            try:
                replies.append(await self.parse_response(connection, command.name, **command.options))
            except ResponseError as error:
                replies.append(error)
        return replies


def _pack(arguments: tuple[Any, ...]) -> bytes:
    """As Redis reads it. Words of a command's name (`CONFIG GET`) are arguments of their own."""
    name, *rest = arguments
    words = name.encode().split() if isinstance(name, str) else name.split()
    packed: bytes = hiredis.pack_command((*words, *rest))
    return packed

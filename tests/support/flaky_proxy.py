"""A connection between client and server that fails as it is told to, so that clients must send a call again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Literal

Failure = Literal["drop", "lose", "unavailable", "half"]
"""`drop`: ends as soon as the call has been passed on. `lose`: ends when the answer begins, nothing of it is passed on.
`unavailable`: as `lose`, but with a 503. `half`: ends after the first bytes of the answer."""

_UNAVAILABLE = (
    b"HTTP/1.1 503 Service Unavailable\r\nretry-after-ms: 20\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
)


class FlakyProxy:
    """Passes connections on to `port`, as it is when they are made; the next ones fail as `fail` says, one each."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = ""
        self.connections = 0
        self._failures: list[Failure] = []

    def fail(self, *failures: Failure) -> None:
        self._failures += failures

    def heal(self) -> None:
        """The next connections do not fail any more."""
        self._failures.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        failure = self._failures.pop(0) if self._failures else None
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.port)
        sending = asyncio.create_task(_pass_on(reader, up_writer))
        try:
            if failure is None:
                await _pass_on(up_reader, writer)
            elif failure == "drop":
                await _arrived(sending, up_reader)
            else:
                begin = await up_reader.read(1 << 16)
                if failure == "unavailable":
                    writer.write(_UNAVAILABLE)
                elif failure == "half":
                    writer.write(begin)
                await writer.drain()
        finally:
            sending.cancel()
            with suppress(asyncio.CancelledError):
                await sending
            for end in (up_writer, writer):
                end.close()
                with suppress(ConnectionError):
                    await end.wait_closed()


@asynccontextmanager
async def flaky_proxy(url: str) -> AsyncIterator[FlakyProxy]:
    """A proxy for the server at `url`, on a port of its own."""
    proxy = FlakyProxy(int(url.rpartition(":")[2]))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


async def _arrived(sending: asyncio.Task[None], up_reader: asyncio.StreamReader) -> None:
    """Give the server time to take the call up; an answer that comes already ends the wait."""
    with suppress(TimeoutError):
        await asyncio.wait_for(up_reader.read(1), 0.1)
    assert not sending.done(), "the client hung up before the connection failed"

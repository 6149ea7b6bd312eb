"""A connection that says what no HTTP client would, byte by byte."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

WITHIN_S = 8.0


@dataclass
class RawAnswer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """Of an error."""
        code: str = json.loads(self.body)["error"]["code"]
        return code


class RawConnection:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def send(self, data: bytes) -> None:
        """Raises ConnectionError where the other side has closed."""
        self._writer.write(data)
        await self._writer.drain()

    async def answer(self) -> RawAnswer:
        """The next answer, within a generous time."""
        async with asyncio.timeout(WITHIN_S):
            head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
            body = await self._reader.readexactly(int(headers.get("content-length", 0)))
        return RawAnswer(int(head[0].split(" ")[1]), headers, body)

    async def is_closed(self) -> bool:
        """Whether the other side ends the connection, within a generous time and without another word."""
        with suppress(ConnectionError):
            async with asyncio.timeout(WITHIN_S):
                return await self._reader.read(1) == b""
        return True

    def close(self) -> None:
        self._writer.close()


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[RawConnection]:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    connection = RawConnection(reader, writer)
    try:
        yield connection
    finally:
        connection.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def head(method: str, path: str, **headers: Any) -> bytes:
    """A request line and headers; underscores in their names stand for dashes."""
    lines = [
        f"{method} {path} HTTP/1.1",
        "host: x",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return ("\r\n".join(lines) + "\r\n\r\n").encode()

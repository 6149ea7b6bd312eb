"""A kept connection is made to whom a name leads now, not to whom it led a while ago."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from services.security.connections import kept_connections
from tests.support.until import until

NAMES_FOR_LONG_S = 10.0
"""How long aiohttp itself goes by what a name led to."""


class Names(AbstractResolver):
    """Whose names lead where the test says."""

    def __init__(self, **addresses: str) -> None:
        self.addresses = addresses
        self.asked = 0

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        self.asked += 1
        found = self.addresses[host]
        return [{"hostname": host, "host": found, "port": port, "family": socket.AF_INET, "proto": 0, "flags": 0}]

    async def close(self) -> None:
        pass


@asynccontextmanager
async def answering(address: str, port: int) -> AsyncIterator[asyncio.Server]:
    """A server that answers with its address, and closes after each answer."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + address.encode())
        writer.close()

    async with await asyncio.start_server(answer, address, port) as server:
        yield server


async def test_names_that_swapped_their_addresses_lead_to_the_new_ones() -> None:
    async with answering("127.0.0.1", 0) as first:
        port = first.sockets[0].getsockname()[1]
        names = Names(one="127.0.0.1", two="127.0.0.2")
        async with (
            answering("127.0.0.2", port),
            aiohttp.ClientSession(connector=kept_connections(True, resolver=names)) as http,
        ):

            async def told() -> list[str]:
                answers = [await http.get(f"http://{name}:{port}/") for name in ("one", "two")]
                return [await answer.text() for answer in answers]

            assert await told() == ["127.0.0.1", "127.0.0.2"]
            names.addresses = {"one": "127.0.0.2", "two": "127.0.0.1"}

            async def found() -> bool:
                return await told() == ["127.0.0.2", "127.0.0.1"]

            await until(found, NAMES_FOR_LONG_S / 2)


async def test_many_connections_at_once_ask_for_a_name_once() -> None:
    async with answering("127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        names = Names(one="127.0.0.1")
        async with aiohttp.ClientSession(connector=kept_connections(True, resolver=names)) as http:
            answers = await asyncio.gather(*(http.get(f"http://one:{port}/") for _ in range(50)))
        assert {answer.status for answer in answers} == {200}
        assert names.asked == 1

"""Clients of the bus and of engines keep their connections, and say what went wrong on one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from services.wire.errors import ConflictError, NotReadyError
from weight_bus.client.connections import FAILURES, Connections
from weight_bus.coordinator.engine_client import EngineCallError, EngineClient

OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
COMMITTED = b'{"version": 1, "flip_ms": 0.1, "requests_in_flight": 0}'


class RawServer:
    """Answers every request with `answer`; `heads` and `bodies` of what came, over `connections` connections."""

    def __init__(self) -> None:
        self.answer = OK
        self.connections = 0
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.hangs_up = False
        self._writers: list[asyncio.StreamWriter] = []

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                self.heads.append(head.lower())
                length = next(
                    (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
                )
                self.bodies.append(await reader.readexactly(length))
                if self.hangs_up:
                    break
                writer.write(self.answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[RawServer, str]]:
    raw = RawServer()
    server = await asyncio.start_server(raw.serve, "127.0.0.1", 0, limit=8 << 20)
    try:
        yield raw, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        raw.hang_up()
        server.close()


def answered(status: str, body: bytes, *headers: bytes) -> bytes:
    lines = [f"HTTP/1.1 {status}".encode(), b"content-length: %d" % len(body), *headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


async def test_the_calls_of_an_update_go_over_one_connection() -> None:
    async with serving() as (raw, url):
        engine = EngineClient(5.0, "the engine's key")
        raw.answer = answered("200 OK", COMMITTED)
        for _ in range(5):
            assert (await engine.commit(url, 1)).version == 1
        await engine.close()
    assert (raw.connections, len(raw.heads)) == (1, 5)
    assert all(b"authorization: bearer the engine's key" in head for head in raw.heads)
    assert raw.bodies == [b'{"version":1}'] * 5


async def test_a_connection_that_was_closed_is_made_again() -> None:
    async with serving() as (raw, url):
        client = Connections()
        for number in (1, 2, 3):
            assert await client.send("POST", url, b"x", None) == b"ok"
            assert raw.connections == number
            raw.hang_up()
            await asyncio.sleep(0.05)
        await client.close()


async def test_a_large_body_arrives_whole() -> None:
    body = bytes(range(256)) * (3 << 12)
    async with serving() as (raw, url):
        client = Connections()
        assert await client.send("POST", url, body, {"content-type": "application/msgpack"}) == b"ok"
        await client.close()
    assert raw.bodies == [body]
    assert b"content-type: application/msgpack" in raw.heads[0]


async def test_errors_come_typed_and_no_key_follows_a_redirect() -> None:
    async with serving() as (raw, url), serving() as (elsewhere, other):
        client = Connections("a key")
        raw.answer = answered("409 Conflict", b'{"error": {"message": "too old", "type": "t", "code": "conflict"}}')
        with pytest.raises(ConflictError, match="too old"):
            await client.send("POST", url, b"x", None)
        raw.answer = answered("307 Temporary Redirect", b"", b"location: " + other.encode())
        with pytest.raises(Exception, match="answered 307"):
            await client.send("POST", url, b"x", None)
        assert elsewhere.connections == 0
        await client.close()


async def test_who_breaks_off_or_is_not_there_is_named() -> None:
    async with serving() as (raw, url):
        raw.hangs_up = True
        engine, client = EngineClient(5.0), Connections()
        with pytest.raises(EngineCallError, match="could not be reached"):
            await engine.commit(url, 1)
        with pytest.raises(FAILURES):
            await client.send("POST", url, b"x", None)
    with pytest.raises(EngineCallError, match="could not be reached"):
        await engine.commit(url, 1)
    with pytest.raises(EngineCallError, match="could not be reached"):
        await engine.commit("http://127.0.0.1:99999", 1)
    await engine.close()
    await client.close()
    with pytest.raises(NotReadyError, match="closed"):
        await client.send("POST", url, b"x", None)


async def test_an_engine_that_says_nothing_is_waited_for_no_longer_than_the_deadline() -> None:
    async with serving() as (raw, url):
        raw.answer = b""
        engine = EngineClient(0.1)
        with pytest.raises(EngineCallError, match=r"did not answer within 0\.1 s"):
            await engine.commit(url, 1)
        await engine.close()

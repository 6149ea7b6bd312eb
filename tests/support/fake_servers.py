"""Rollout servers that speak just enough for a gateway: they announce themselves, hold sessions, replay answers and die.

A `World` is what real ones keep in Redis: who holds a session, and the bytes of every answer by the call's name.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from services.run_store.discovery import ServerRecord, ServiceRegistry
from services.wire.gateway_api import BASE_URL_HEADER, CALL_HEADER

LEASE_S = 600.0
"""Tests end a lease themselves."""


@dataclass
class Seen:
    """A request that reached a server."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def call(self) -> str:
        return self.headers[CALL_HEADER]

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class World:
    """What servers share."""

    owner: dict[str, FakeServer] = field(default_factory=dict)
    answers: dict[str, list[bytes]] = field(default_factory=dict)
    opened: dict[str, str] = field(default_factory=dict)
    sampled: int = 0

    def answer(self, call: str, chunks: int) -> list[bytes]:
        """The answer to a call: made once, no two alike."""
        if call not in self.answers:
            self.sampled += 1
            self.answers[call] = [b"data: %d/%d %s\n\n" % (self.sampled, index, b"x" * 50) for index in range(chunks)]
        return self.answers[call]


class FakeServer:
    """One server. `die_at`: it dies once it has sent so many chunks of an answer; `refusal`: what it answers instead."""

    def __init__(self, name: str, world: World, registry: ServiceRegistry) -> None:
        self.name = name
        self.url = ""
        self.world = world
        self.seen: list[Seen] = []
        self.alive = False
        self.die_at: int | None = None
        self.chunks = 6
        self.on_death: Callable[[], object] = lambda: None
        self.refusal: tuple[int, str] | None = None
        self.hold = asyncio.Event()
        self.hold.set()
        self.hung_up = 0
        self.custom: Callable[[Seen], tuple[int, list[bytes]]] | None = None
        self._registry = registry
        self._listener: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        self.alive = True

    async def announce(self, **changes: Any) -> None:
        record = ServerRecord(
            name=self.name,
            incarnation=f"{self.name}-1",
            url=self.url,
            state="serving",
            model="fake",
            policy_version=0,
            max_running=64,
            lease_s=LEASE_S,
        )
        self._record = msgspec.structs.replace(record, **changes)
        await self._registry.announce([self._record])

    async def withdraw(self) -> None:
        await self._registry.withdraw([self._record])

    def die(self) -> None:
        """As kill -9 does: connections break, nobody listens, the lease stands."""
        self.alive = False
        self.on_death()
        if self._listener is not None:
            self._listener.close()
        for writer in self._writers:
            writer.transport.abort()

    def paths(self) -> list[str]:
        return [f"{seen.method} {seen.path}" for seen in self.seen]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                seen = await _read(reader)
                self.seen.append(seen)
                if not await self._answer(seen, reader, writer):
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Returns whether the connection can go on."""
        if self.refusal is not None:
            status, code = self.refusal
            await _send(writer, status, [json.dumps({"error": {"code": code, "message": code}}).encode()])
            return True
        if self.custom is not None:
            status, chunks = self.custom(seen)
            return await self._send_chunks(writer, status, chunks)
        if seen.path in ("/sessions", "/groups"):
            await _send(writer, 201, [json.dumps(self._open(seen)).encode()])
            return True
        session = seen.path.split("/")[2] if seen.path.startswith("/sessions/") else ""
        session = session or seen.headers.get("x-session-id", "")
        bearer = seen.headers.get("authorization", "")
        if bearer.startswith("Bearer rs-"):
            session = bearer.removeprefix("Bearer rs-").rpartition("-")[0]
        if session:
            owner = self.world.owner.get(session)
            if owner is None:
                await _send(writer, 404, [b'{"error": {"code": "not_found", "message": "no such session"}}'])
                return True
            if owner is not self and owner.alive:
                more = f"x-rollmesh-owner-url: {owner.url}\r\nconnection: close\r\n"
                await _send(writer, 421, [b'{"error": {"code": "held_elsewhere", "message": "no"}}'], more)
                return False
            self.world.owner[session] = self
        if b'"stream": true' in seen.body or b'"stream":true' in seen.body:
            return await self._send_chunks(writer, 200, self.world.answer(seen.call, self.chunks), reader)
        if not self.hold.is_set() and not await self._held(reader):
            return False
        text = b"".join(self.world.answer(seen.call, self.chunks)).decode()
        whole = json.dumps({"server": self.name, "text": text}).encode()
        if self.die_at is not None:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(whole) + whole[: len(whole) // 2])
            await writer.drain()
            self.die()
            return False
        await _send(writer, 200, [whole])
        return True

    async def _send_chunks(
        self,
        writer: asyncio.StreamWriter,
        status: int,
        chunks: list[bytes],
        reader: asyncio.StreamReader | None = None,
    ) -> bool:
        writer.write(b"HTTP/1.1 %d OK\r\ncontent-type: text/event-stream\r\n" % status)
        writer.write(b"transfer-encoding: chunked\r\n\r\n")
        for index, chunk in enumerate(chunks):
            if index == self.die_at:
                await writer.drain()
                self.die()
                return False
            if index and reader is not None and not self.hold.is_set() and not await self._held(reader):
                return False
            writer.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return True

    async def _held(self, reader: asyncio.StreamReader) -> bool:
        """Wait for `hold`; returns False when the caller hangs up first."""
        going_on, ended = asyncio.ensure_future(self.hold.wait()), asyncio.ensure_future(reader.read(1))
        try:
            await asyncio.wait({going_on, ended}, return_when=asyncio.FIRST_COMPLETED)
            if ended.done() and not going_on.done():
                self.hung_up += 1
                return False
            return True
        finally:
            for task in (going_on, ended):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    def _open(self, seen: Seen) -> dict[str, Any]:
        body = seen.json()
        name = self.world.opened.setdefault(seen.call, f"made-{len(self.world.opened)}")
        if seen.path == "/groups":
            sessions = [f"{name}-{member}" for member in range(body.get("group_size", 2))]
            self.world.owner.update(dict.fromkeys([name, *sessions], self))
            return {"group_id": name, "session_ids": sessions, "api_keys": [f"rs-{each}-00" for each in sessions]}
        session = body.get("session_id") or name
        self.world.owner[session] = self
        return {
            "session_id": session,
            "group_id": body.get("group_id") or session,
            "base_url": f"{seen.headers[BASE_URL_HEADER]}/sessions/{session}/v1",
            "api_key": f"rs-{session}-00",
            "server": self.name,
        }


async def _read(reader: asyncio.StreamReader) -> Seen:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Seen(method, path, headers, body)


async def _send(writer: asyncio.StreamWriter, status: int, parts: list[bytes], more: str = "") -> None:
    body = b"".join(parts)
    head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n{more}\r\n"
    writer.write(head.encode() + body)
    await writer.drain()


@asynccontextmanager
async def fake_servers(names: str, registry: ServiceRegistry) -> AsyncIterator[list[FakeServer]]:
    """Servers of these names (a letter each), announced, in one world."""
    world = World()
    servers = [FakeServer(name, world, registry) for name in names]
    try:
        for server in servers:
            await server.start()
            await server.announce()
        yield servers
    finally:
        for server in servers:
            server.die()

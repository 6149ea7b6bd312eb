"""A TCP path that can be cut without a word, as a firewall does that forgot a connection: nothing is closed or refused."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress


class BlackHole:
    """Passes connections on to `port` until `cut`. What was open then stays dead for ever; `heal` lets new ones through."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.port = 0
        self._cut = asyncio.Event()
        self._broken = False
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        self._broken = True
        self._cut.set()
        self._cut = asyncio.Event()

    def heal(self) -> None:
        self._broken = False

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with suppress(asyncio.CancelledError):
            await self._serve(reader, writer)
        writer.close()
        self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._broken:
            await asyncio.Event().wait()
        cut = asyncio.ensure_future(self._cut.wait())
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        ways = [
            asyncio.ensure_future(_pass_on(reader, up_writer)),
            asyncio.ensure_future(_pass_on(up_reader, writer)),
        ]
        try:
            await asyncio.wait([cut, *ways], return_when=asyncio.FIRST_COMPLETED)
            if cut.done():
                for way in ways:
                    way.cancel()
                await asyncio.Event().wait()
        finally:
            for each in (cut, *ways):
                each.cancel()
            up_writer.close()

    async def close(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@asynccontextmanager
async def black_hole(port: int) -> AsyncIterator[BlackHole]:
    """A path to what listens on `port`, on a port of its own."""
    hole = BlackHole(port)
    server = await asyncio.start_server(hole.serve, "127.0.0.1", 0)
    hole.port = server.sockets[0].getsockname()[1]
    try:
        yield hole
    finally:
        server.close()
        await hole.close()


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


@contextmanager
def black_hole_thread(port: int) -> Iterator[tuple[BlackHole, Callable[[Callable[[], None]], None]]]:
    """The same on a thread of its own, for tests that block; the second thing calls `cut` or `heal` there."""
    with asyncio.Runner() as runner:
        loop, ended, ready = runner.get_loop(), asyncio.Event(), threading.Event()
        holes: list[BlackHole] = []

        async def serve() -> None:
            async with black_hole(port) as hole:
                holes.append(hole)
                ready.set()
                await ended.wait()

        thread = threading.Thread(target=lambda: runner.run(serve()), name="black hole")
        thread.start()
        ready.wait()
        try:
            yield holes[0], lambda what: loop.call_soon_threadsafe(what) and None
        finally:
            loop.call_soon_threadsafe(ended.set)
            thread.join()

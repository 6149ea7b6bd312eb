"""A collector that takes whatever it is sent and forgets it: `python -m rollout_server.bench.trace_sink PORT`.

On a real mesh it stands on another machine. Here it shares the cores, so it reads no more of a call than its length.
"""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import suppress

_LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/x-protobuf\r\nContent-Length: 0\r\n\r\n"


async def _take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = _LENGTH.search(head)
            await reader.readexactly(int(length[1]) if length else 0)
            writer.write(_ANSWER)
            await writer.drain()
    writer.close()


async def _serve(port: int) -> None:
    async with await asyncio.start_server(_take, "127.0.0.1", port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(int(sys.argv[1])))

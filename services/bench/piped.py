"""Both ends of a pipe to a benchmarked process: one JSON line a command, one JSON line an answer.

benchmark  Piped.ask(command) ──line──► stdin    answer_lines(handle)   the process
           ◄──────────────────line──── stdout    whatever else it prints goes to its log
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from services.bench.processes import Child, running
from services.wire.errors import RollmeshError

_LINE_BYTES = 64 << 20
T = TypeVar("T", bound=msgspec.Struct)


class Ready(msgspec.Struct, frozen=True):
    """The first line of every process: it takes commands now."""


class Piped:
    """The benchmark's end."""

    def __init__(self, child: Child) -> None:
        self.child = child

    async def ask(self, command: msgspec.Struct, answer: type[T], deadline_s: float = 120.0) -> T:
        """Send a command and wait for its answer. Raises RollmeshError when the process has ended or is late."""
        stdin = self.child.process.stdin
        assert stdin is not None
        stdin.write(msgspec.json.encode(command) + b"\n")
        await stdin.drain()
        return await self.receive(type(command).__name__, answer, deadline_s)

    async def receive(self, what: str, answer: type[T], deadline_s: float) -> T:
        """The next line. `what` is named when it does not come."""
        stdout = self.child.process.stdout
        assert stdout is not None
        try:
            async with asyncio.timeout(deadline_s):
                line = await stdout.readline()
        except TimeoutError as error:
            name = self.child.name
            raise RollmeshError(f"{name} did not answer {what} within {deadline_s:.0f} s", self.child.tail()) from error
        if not line:
            await self.child.process.wait()
            self.child.check()
            raise RollmeshError(f"{self.child.name} ended in {what}", self.child.tail())
        return msgspec.json.decode(line, type=answer)


@asynccontextmanager
async def running_piped(
    name: str,
    command: Sequence[str],
    folder: Path,
    *,
    start_within_s: float,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Piped]:
    """A process that answers lines, ready, for the time of the block. Raises RollmeshError if it does not come up."""
    lines = _LINE_BYTES
    async with running(name, command, folder, environment=environment, piped=True, line_bytes=lines) as child:
        piped = Piped(child)
        await piped.receive("its start", Ready, start_within_s)
        yield piped


def replies_only() -> int:
    """Keep standard output for answers: whatever a library prints goes to standard error. Call it before imports."""
    replies = os.dup(1)
    os.dup2(2, 1)
    return replies


async def answer_lines(replies: int, commands: Any, handle: Callable[[Any], Awaitable[msgspec.Struct]]) -> None:
    """The process's end: answer one command after another until the pipe closes. `commands`: a union of tagged structs.

    `replies`: what `replies_only` returned. What `handle` raises ends the process, and so reaches whoever asked.
    """
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(commands)
    os.write(replies, msgspec.json.encode(Ready()) + b"\n")
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    with os.fdopen(replies, "wb", closefd=False) as out:
        while line := await reader.readline():
            out.write(msgspec.json.encode(await handle(decoder.decode(line))) + b"\n")
            out.flush()

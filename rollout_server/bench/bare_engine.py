"""The bare engine as an arm: the same engine class as the server's, in a process of its own, with no server around it.

benchmark ──one JSON line a command──► this process: engine.generate, `concurrency` at a time
          ◄──one JSON line a result──

python -m rollout_server.bench.bare_engine ENGINE MODEL WORKLOAD MAX_RUNNING
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import msgspec

from rollout_server.bench.rate import Rate, in_parallel
from rollout_server.bench.workload import TIMED_KV_POLICY, Exchange, load_workload
from rollout_server.engines.base import Engine, GenerationRequest
from services.bench.processes import PYTHON, Child, running
from services.wire.errors import RollmeshError

_START_WITHIN_S = 300.0
_LINE_BYTES = 1 << 20


class Load(msgspec.Struct, frozen=True, tag="load"):
    """Answer exchanges `first` … `first + count − 1`, so many at a time; the result is a Rate."""

    first: int
    count: int
    concurrency: int
    stream: bool


class Single(msgspec.Struct, frozen=True, tag="single"):
    """Answer one exchange alone with so many tokens; the result is a Rate."""

    index: int
    max_tokens: int


class Ready(msgspec.Struct, frozen=True):
    """The first line: the engine is up."""


class BareEngine:
    """The benchmark's end of the pipe."""

    def __init__(self, child: Child) -> None:
        self._child = child

    async def load(self, first: int, count: int, concurrency: int, *, stream: bool) -> Rate:
        return await self._ask(Load(first, count, concurrency, stream))

    async def single_s(self, index: int, max_tokens: int) -> float:
        """Seconds that one request takes alone."""
        return (await self._ask(Single(index, max_tokens))).seconds

    async def _ask(self, command: Load | Single) -> Rate:
        stdin = self._child.process.stdin
        assert stdin is not None
        stdin.write(msgspec.json.encode(command) + b"\n")
        await stdin.drain()
        return msgspec.json.decode(await self.line(), type=Rate)

    async def line(self) -> bytes:
        """The next result. Raises RollmeshError when the process has ended instead."""
        stdout = self._child.process.stdout
        assert stdout is not None
        line = await stdout.readline()
        if not line:
            await self._child.process.wait()
            self._child.check()
        return line


@asynccontextmanager
async def running_bare_engine(
    engine: str, model: Path, workload: Path, max_running: int, folder: Path
) -> AsyncIterator[BareEngine]:
    """The engine, ready, for the time of the block. Raises RollmeshError when it does not come up."""
    command = [*PYTHON, __name__, engine, str(model), str(workload), str(max_running)]
    async with running(f"bare {engine} engine", command, folder, piped=True) as child:
        bare = BareEngine(child)
        try:
            async with asyncio.timeout(_START_WITHIN_S):
                msgspec.json.decode(await bare.line(), type=Ready)
        except TimeoutError as error:
            raise RollmeshError(f"the engine was not ready within {_START_WITHIN_S:.0f} s", child.tail()) from error
        yield bare


class _Driver:
    """The engine's side: runs commands."""

    def __init__(self, engine: Engine, exchanges: list[Exchange]) -> None:
        self._engine = engine
        self._exchanges = exchanges
        self._names = count()

    async def run(self, command: Load | Single) -> Rate:
        if isinstance(command, Single):
            exchange = msgspec.structs.replace(self._exchanges[command.index], max_tokens=command.max_tokens)
            return await in_parallel([exchange], 1, self._draw)
        chosen = self._exchanges[command.first : command.first + command.count]
        return await in_parallel(chosen, command.concurrency, self._draw_streaming if command.stream else self._draw)

    async def _draw(self, exchange: Exchange, *, stream: bool = False) -> int:
        request = GenerationRequest(f"bare-{next(self._names)}", exchange.token_ids, exchange.sampling, stream=stream)
        drawn = 0
        async for delta in self._engine.generate(request):
            drawn += len(delta.token_ids)
        return drawn

    async def _draw_streaming(self, exchange: Exchange) -> int:
        return await self._draw(exchange, stream=True)


async def _serve(engine: Engine, exchanges: list[Exchange], replies: int) -> None:
    await engine.start()
    try:
        os.write(replies, msgspec.json.encode(Ready()) + b"\n")
        reader = asyncio.StreamReader(limit=_LINE_BYTES)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        driver = _Driver(engine, exchanges)
        while line := await reader.readline():
            rate = await driver.run(msgspec.json.decode(line, type=Load | Single))
            os.write(replies, msgspec.json.encode(rate) + b"\n")
    finally:
        await engine.close()


def _main() -> None:
    import uvloop

    from rollout_server.engines.factory import make_engine
    from services.imports import heavy_imports, leave_quickly
    from services.settings import RunSettings

    name, model, workload, max_running = sys.argv[1:]
    # Whatever a library prints belongs to the log, not between the results.
    replies = os.dup(1)
    os.dup2(2, 1)
    settings = RunSettings()
    settings.rollout.max_running = int(max_running)
    settings.rollout.kv_policy = TIMED_KV_POLICY
    with heavy_imports():
        engine = make_engine("vllm" if name == "vllm" else "torch", Path(model), "bench", settings)
        preload = getattr(engine, "preload", None)
        if preload is not None:
            preload()
    uvloop.run(_serve(engine, load_workload(Path(workload)), replies))
    leave_quickly()


if __name__ == "__main__":
    _main()

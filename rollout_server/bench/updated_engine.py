"""The engine under test of `rollmesh bench weights`: a few streams decode in it while its weights are replaced.

benchmark ──one JSON line a command──► this process: engine, streams, updates in our way and in the paused ways
          ◄──one JSON line an answer── (weight_bus.bench.messages)

python -m rollout_server.bench.updated_engine ENGINE MODEL RUN_ID MAX_RUNNING
"""

from __future__ import annotations

import asyncio
import sys
import time
from itertools import count
from pathlib import Path

import msgspec

from rollout_server.bench.paused_engines import PausedUpdates
from rollout_server.engines.base import Engine, GenerationRequest, collect
from services.bench.piped import answer_lines, replies_only
from services.wire.errors import ConflictError, RollmeshError
from services.wire.sampling import SamplingParams
from weight_bus.bench.messages import (
    Arrivals,
    Begin,
    Commit,
    Done,
    Drawn,
    End,
    Greedy,
    Join,
    Prefetch,
    Reload,
    Span,
    Stage,
    ToEngine,
)

_SETTLED_TOKENS = 3
_SETTLED_WITHIN_S = 60.0
_POLL_S = 0.005


class _Streams:
    """Requests that decode at once. `arrivals`: when each token of each came here."""

    def __init__(self, engine: Engine, command: Begin, names: count[int]) -> None:
        self._engine = engine
        self._command = command
        self._names = names
        self.arrivals: list[list[float]] = [[] for _ in command.prompts]
        self._tasks = [asyncio.create_task(self._draw(number)) for number in range(len(command.prompts))]

    async def settle(self) -> None:
        async with asyncio.timeout(_SETTLED_WITHIN_S):
            while any(len(arrived) < _SETTLED_TOKENS for arrived in self.arrivals):
                self._check()
                await asyncio.sleep(_POLL_S)

    async def end(self) -> None:
        self._check()
        await self.close()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _check(self) -> None:
        for task in self._tasks:
            if task.done():
                task.result()
                raise RollmeshError(
                    f"a stream ended after {self._command.max_tokens} tokens, before its updates did",
                    "take a larger model, fewer updates or a shorter --quiet-s",
                )

    async def _draw(self, number: int) -> None:
        arrived = self.arrivals[number]
        sampling = SamplingParams(max_tokens=self._command.max_tokens, ignore_eos=True, seed=number)
        while True:
            name = f"stream-{next(self._names)}"
            request = GenerationRequest(name, self._command.prompts[number], sampling, stream=True)
            async for delta in self._engine.generate(request):
                now = time.monotonic()
                arrived.extend([now] * len(delta.token_ids))
            if not self._command.again:
                return


class _Driver:
    """Runs commands against an engine."""

    def __init__(self, engine: Engine, paused: PausedUpdates) -> None:
        self._engine = engine
        self._paused = paused
        self._names = count()
        self._streams: _Streams | None = None

    async def handle(self, command: ToEngine) -> msgspec.Struct:
        begin = time.monotonic()
        match command:
            case Begin():
                await self._begin(command)
                return Done()
            case End():
                return await self._end()
            case Greedy(prompts, max_tokens):
                return await self._greedy(prompts, max_tokens)
            case Join(port):
                await self._paused.join(port)
                return Done()
            case Stage(manifest):
                await self._engine.stage(manifest)
            case Commit(version):
                await self._engine.commit(version)
            case Prefetch(path):
                await self._paused.prefetch(path)
            case Reload(way, path):
                await self._engine.pause("keep")
                await self._paused.load(way, path)
                await self._engine.resume()
        return Span(begin, time.monotonic())

    async def _begin(self, command: Begin) -> None:
        if self._streams is not None:
            raise ConflictError("streams are decoding already", "end them first")
        if command.plain:
            await self._paused.unpack()
        self._streams = _Streams(self._engine, command, self._names)
        await self._streams.settle()

    async def _end(self) -> Arrivals:
        streams, self._streams = self._streams, None
        if streams is None:
            raise ConflictError("no streams are decoding", "begin them first")
        await streams.end()
        return Arrivals(streams.arrivals)

    async def close(self) -> None:
        if self._streams is not None:
            await self._streams.close()

    async def _greedy(self, prompts: list[list[int]], max_tokens: int) -> Drawn:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        token_ids, logprobs = [], []
        # One at a time: the order of additions must not differ between the engines that are compared.
        for prompt in prompts:
            [drawn] = await collect(
                self._engine.generate(GenerationRequest(f"greedy-{next(self._names)}", prompt, sampling))
            )
            token_ids.append(drawn.token_ids)
            logprobs.append(drawn.logprobs)
        return Drawn(token_ids, logprobs)


async def _serve(replies: int, engine: Engine, paused: PausedUpdates) -> None:
    await engine.start()
    driver = _Driver(engine, paused)
    try:
        await answer_lines(replies, ToEngine, driver.handle)
    finally:
        await driver.close()
        await engine.close()


def _main() -> None:
    from services.memory_tunables import begin_again_with_tunables

    # As a rollout server does: it is such a server's tokens that an update is to leave alone.
    begin_again_with_tunables()

    import uvloop

    from rollout_server.bench.paused_engines import make_updated_engine
    from services.imports import heavy_imports, leave_quickly

    replies = replies_only()
    name, model, run_id, max_running = sys.argv[1:]
    with heavy_imports():
        engine, paused = make_updated_engine(name, Path(model), run_id, int(max_running))
    uvloop.run(_serve(replies, engine, paused))
    leave_quickly()


if __name__ == "__main__":
    _main()

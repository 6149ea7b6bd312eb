"""The bare engine that servers are compared with, in its own process: its commands come by a pipe, no HTTP between.

python -m benchmarks.harness.bare_engine ENGINE MODEL WORKLOAD MAX_RUNNING
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import msgspec

from benchmarks.harness.processes import (
    PYTHON,
    Piped,
    answer_lines,
    replies_only,
    running_piped,
)
from benchmarks.harness.timing import Rate, in_parallel
from benchmarks.harness.workload import TIMED_KV_POLICY, Exchange, load_workload
from rollout_server.engines.base import Engine, GenerationRequest
from services.config.settings import RunSettings
from services.supervisor.processes import Child

_START_WITHIN_S = 300.0
_LOAD_WITHIN_S = 600.0


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


class BareEngine:
    """The benchmark's end of the pipe."""

    def __init__(self, piped: Piped) -> None:
        self._piped = piped

    @property
    def child(self) -> Child:
        return self._piped.child

    async def load(self, first: int, count: int, concurrency: int, *, stream: bool) -> Rate:
        return await self._piped.ask(Load(first, count, concurrency, stream), Rate, _LOAD_WITHIN_S)

    async def single_s(self, index: int, max_tokens: int) -> float:
        """Seconds that one request takes alone."""
        return (await self._piped.ask(Single(index, max_tokens), Rate)).seconds


@asynccontextmanager
async def running_bare_engine(
    engine: str, model: Path, workload: Path, max_running: int, folder: Path
) -> AsyncIterator[BareEngine]:
    """The engine, ready, for the time of the block. Raises RollmeshError when it does not come up."""
    command = [*PYTHON, __name__, engine, str(model), str(workload), str(max_running)]
    async with running_piped(f"bare {engine} engine", command, folder, start_within_s=_START_WITHIN_S) as piped:
        yield BareEngine(piped)


class _Driver:
    """The engine's side: runs commands."""

    def __init__(self, engine: Engine, exchanges: list[Exchange]) -> None:
        self._engine = engine
        self._exchanges = exchanges
        self._names = count()

    async def run(self, command: Load | Single) -> Rate:
        if isinstance(command, Single):
            exchange = msgspec.structs.replace(self._exchanges[command.index], max_tokens=command.max_tokens)
            return await in_parallel([exchange], 1, self._sample)
        chosen = self._exchanges[command.first : command.first + command.count]
        return await in_parallel(
            chosen, command.concurrency, self._sample_streaming if command.stream else self._sample
        )

    async def _sample(self, exchange: Exchange, *, stream: bool = False) -> int:
        request = GenerationRequest(f"bare-{next(self._names)}", exchange.token_ids, exchange.sampling, stream=stream)
        sampled = 0
        async for delta in self._engine.generate(request):
            sampled += len(delta.token_ids)
        return sampled

    async def _sample_streaming(self, exchange: Exchange) -> int:
        return await self._sample(exchange, stream=True)


async def _serve(engine: Engine, exchanges: list[Exchange], replies: int) -> None:
    await engine.start()
    try:
        await answer_lines(replies, Load | Single, _Driver(engine, exchanges).run)
    finally:
        await engine.close()


def _main() -> None:
    from services.host.process import begin_again_with_tunables

    # As a rollout server does: the two are compared.
    begin_again_with_tunables()

    import uvloop

    from rollout_server.engines.factory import make_engine
    from services.host.process import heavy_imports, leave_quickly

    name, model, workload, max_running = sys.argv[1:]
    replies = replies_only()
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

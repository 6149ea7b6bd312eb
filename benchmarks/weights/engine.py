"""The engine under test of `./dev bench weights`: a few streams decode in it while its weights are replaced.

benchmark ──one JSON line a command──► this process: engine, streams, updates in our way and in the paused ways
          ◄──one JSON line an answer── (benchmarks.weights.arms)

python -m benchmarks.weights.engine ENGINE MODEL RUN_ID MAX_RUNNING [SHADOW PACKED]

SHADOW: of engine vllm, `weights.shadow`, or `alone` for vLLM as it is without a weight bus.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, Protocol

import msgspec

from benchmarks.harness.processes import answer_lines, replies_only
from benchmarks.harness.workload import TIMED_KV_POLICY
from benchmarks.weights.arms import (
    Arrivals,
    AskHeld,
    Begin,
    Commit,
    Done,
    End,
    Greedy,
    HeldBytes,
    Join,
    PausedWay,
    Prefetch,
    Quiet,
    Reload,
    Sampled,
    Span,
    Stage,
    ToEngine,
)
from benchmarks.weights.in_place import InPlace
from rollout_server.engines.base import Engine, GenerationRequest, collect
from services.wire.errors import ConflictError, RollmeshError, UsageError
from services.wire.sampling import SamplingParams

_SETTLED_TOKENS = 3
_SAMPLED_WITHIN_S = 60.0
_POLL_S = 0.005


class _Streams:
    """Requests that decode at once. `arrivals`: when each token of each came here."""

    def __init__(self, engine: Engine, command: Begin, names: count[int]) -> None:
        self._engine = engine
        self._command = command
        self._names = names
        self.arrivals: list[list[float]] = [[] for _ in command.prompts]
        self._tasks = [asyncio.create_task(self._sample(number)) for number in range(len(command.prompts))]

    async def settle(self) -> None:
        await self._until(lambda arrived: len(arrived) >= _SETTLED_TOKENS)

    async def quiet(self, seconds: float, times: int) -> None:
        """The seconds alone are too few where this process gets no core for as long."""
        began = time.monotonic()
        await asyncio.sleep(seconds)
        await self._until(lambda arrived: len({at for at in arrived if at > began}) >= times)

    async def _until(self, enough: Callable[[list[float]], bool]) -> None:
        """Wait until that is so of each stream's arrivals."""
        async with asyncio.timeout(_SAMPLED_WITHIN_S):
            while not all(map(enough, self.arrivals)):
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

    async def _sample(self, number: int) -> None:
        arrived = self.arrivals[number]
        sampling = SamplingParams(max_tokens=self._command.max_tokens, ignore_eos=True, seed=number)
        while True:
            name = f"stream-{next(self._names)}"
            request = GenerationRequest(name, self._command.prompts[number], sampling, stream=True, gather_s=0.0)
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
            case Quiet(seconds, times):
                await self._decoding().quiet(seconds, times)
                return Done()
            case End():
                return await self._end()
            case Greedy(prompts, max_tokens):
                return await self._greedy(prompts, max_tokens)
            case AskHeld():
                return await self._paused.held()
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
        streams, self._streams = self._decoding(), None
        await streams.end()
        return Arrivals(streams.arrivals)

    def _decoding(self) -> _Streams:
        if self._streams is None:
            raise ConflictError("no streams are decoding", "begin them first")
        return self._streams

    async def close(self) -> None:
        if self._streams is not None:
            await self._streams.close()

    async def _greedy(self, prompts: list[list[int]], max_tokens: int) -> Sampled:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        token_ids, logprobs = [], []
        # One at a time: the order of additions must not differ between the engines that are compared.
        for prompt in prompts:
            [sampled] = await collect(
                self._engine.generate(GenerationRequest(f"greedy-{next(self._names)}", prompt, sampling))
            )
            token_ids.append(sampled.token_ids)
            logprobs.append(sampled.logprobs)
        return Sampled(token_ids, logprobs)


async def _serve(replies: int, engine: Engine, paused: PausedUpdates) -> None:
    await engine.start()
    driver = _Driver(engine, paused)
    try:
        await answer_lines(replies, ToEngine, driver.handle)
    finally:
        await driver.close()
        await engine.close()


def _main() -> None:
    from services.host.process import begin_again_with_tunables

    # As a rollout server does: it is such a server's tokens that an update is to leave alone.
    begin_again_with_tunables()

    import uvloop

    from services.host.process import heavy_imports, leave_quickly

    replies = replies_only()
    name, model, run_id, max_running, *memory = sys.argv[1:]
    with heavy_imports():
        engine, paused = make_updated_engine(name, Path(model), run_id, int(max_running), memory)
    uvloop.run(_serve(replies, engine, paused))
    leave_quickly()


ALONE = "alone"
_DTYPE = "float32"


class PausedUpdates(Protocol):
    """The paused ways of other projects: load into the engine's live tensors, in the process that has them.

    That is this process for torch, the engine core for vLLM. There the paused ways use no packed products (`unpack`):
    packing would make their pauses longer. `load` is called while the engine is paused, `prefetch` while it decodes.
    """

    async def join(self, port: int) -> None: ...

    async def unpack(self) -> None:
        """Let layers use live weights until our next commit. Called while nothing decodes."""
        ...

    async def prefetch(self, path: str) -> None: ...

    async def load(self, way: PausedWay, path: str) -> None: ...

    async def held(self) -> HeldBytes: ...


def make_updated_engine(
    name: str, model: Path, run_id: str, max_running: int, memory: Sequence[str] = ()
) -> tuple[Engine, PausedUpdates]:
    """The engine, its imports done, not started; and how it is updated in the paused ways. Raises UsageError.

    `memory`: of vllm, `weights.shadow` and `weights.packed`.
    """
    if name == "torch":
        return _torch_engine(model, run_id, max_running)
    if name == "vllm":
        return _vllm_engine(model, run_id, max_running, *memory)
    raise UsageError(f"no engine {name!r}", "known: torch, vllm")


def _settings(model: Path, run_id: str, max_running: int) -> dict[str, Any]:
    return {
        "model": model,
        "run_id": run_id,
        "dtype": _DTYPE,
        "max_running": max_running,
        "threads": 1,
        "transport": "auto",
        "seed": 1,
        "kv_policy": TIMED_KV_POLICY,
    }


def _torch_engine(model: Path, run_id: str, max_running: int) -> tuple[Engine, PausedUpdates]:
    from rollout_server.engines.torch.core import EngineCore
    from rollout_server.engines.torch.engine import CoreSettings, TorchEngine

    core = EngineCore(CoreSettings(**{**_settings(model, run_id, max_running), "model": str(model)}))
    engine = TorchEngine(core)
    engine.preload()

    class Here:
        """Loads in this process, on a thread of its own. The tensors are looked up anew: a commit of ours swaps them."""

        def __init__(self) -> None:
            self._in_place = InPlace(lambda: core._weights()[0].target.live())
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="paused-update")

        async def join(self, port: int) -> None:
            await self._run(self._in_place.join, port)

        async def unpack(self) -> None:
            """Nothing is ever packed here."""

        async def prefetch(self, path: str) -> None:
            await self._run(self._in_place.prefetch, path)

        async def load(self, way: PausedWay, path: str) -> None:
            await self._run(self._in_place.load, way, path)

        async def held(self) -> HeldBytes:
            return HeldBytes(sum(tensor.nbytes for tensor in core._weights()[0].target.shadow().values()), 0)

        async def _run(self, work: Any, *arguments: Any) -> None:
            await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    return engine, Here()


def _vllm_engine(
    model: Path, run_id: str, max_running: int, shadow: str = "device", packed: str = "auto"
) -> tuple[Engine, PausedUpdates]:
    from rollout_server.engines.vllm.engine import VllmEngine

    kind: type[VllmEngine] = VllmEngine
    settings = _settings(model, run_id, max_running) | {"packed": packed}
    if shadow == ALONE:
        from benchmarks.weights.alone import VllmAlone as kind
    else:
        settings["shadow"] = shadow
    engine = kind(**settings)
    engine.preload()
    from vllm.v1.engine.core import EngineCore

    # The engine core is forked from this process and so has them too.
    EngineCore.bench_join = _core_join
    EngineCore.bench_unpack = _core_unpack
    EngineCore.bench_prefetch = _core_prefetch
    EngineCore.bench_load = _core_load
    EngineCore.bench_held = _core_held

    class InTheCore:
        """Loads in the engine core, by utility calls between its steps."""

        async def join(self, port: int) -> None:
            await self._call("bench_join", port)

        async def unpack(self) -> None:
            await self._call("bench_unpack")

        async def prefetch(self, path: str) -> None:
            await self._call("bench_prefetch", path)

        async def load(self, way: PausedWay, path: str) -> None:
            await self._call("bench_load", way, path)

        async def held(self) -> HeldBytes:
            return HeldBytes(*await self._call("bench_held"))

        async def _call(self, name: str, *arguments: Any) -> Any:
            return await engine.core.running().engine_core.call_utility_async(name, *arguments)

    return engine, InTheCore()


def _core_join(core: Any, port: int) -> None:
    _in_place(core).join(port)


def _core_prefetch(core: Any, path: str) -> Future[None]:
    """The loop answers when the future is done and goes on stepping meanwhile."""
    in_place = _in_place(core)
    return core.bench_thread.submit(in_place.prefetch, path)  # type: ignore[no-any-return]


def _core_load(core: Any, way: PausedWay, path: str) -> None:
    _in_place(core).load(way, path)


def _core_unpack(core: Any) -> None:
    [attached] = core.model_executor.collective_rpc(_attachment)
    attached.unpack()


def _core_held(core: Any) -> tuple[int, int]:
    [attached] = core.model_executor.collective_rpc(_attachment)
    held = attached.weights.sets.held
    return held.beside, held.host


def _in_place(core: Any) -> Any:
    found = getattr(core, "bench_in_place", None)
    if found is None:
        [attached] = core.model_executor.collective_rpc(_attachment)
        found = core.bench_in_place = InPlace(attached.weights.in_place)
        core.bench_thread = ThreadPoolExecutor(1, thread_name_prefix="paused-update")
    return found


def _attachment(worker: Any) -> Any:
    return worker.rollmesh_attachments[1]


if __name__ == "__main__":
    _main()

"""The engines with the paused ways of other projects beside our own, for `rollmesh bench weights`.

What is loaded in place are the engine's own live tensors, in the process that holds them: here for torch, the engine
core for vLLM. There the paused ways do without packed products (`unpack`): packing new ones would make their pauses longer.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from rollout_server.bench.workload import TIMED_KV_POLICY
from rollout_server.engines.base import Engine
from services.wire.errors import UsageError
from weight_bus.bench.messages import PausedWay

_DTYPE = "float32"
_NEVER_STAGED = -1


class PausedUpdates(Protocol):
    """Loading in place. `load` is called while the engine is paused, `prefetch` while it decodes."""

    async def join(self, port: int) -> None: ...

    async def unpack(self) -> None:
        """From now on layers multiply live weights, until a commit of ours. Called while nothing decodes."""
        ...

    async def prefetch(self, path: str) -> None: ...

    async def load(self, way: PausedWay, path: str) -> None: ...


def make_updated_engine(name: str, model: Path, run_id: str, max_running: int) -> tuple[Engine, PausedUpdates]:
    """The engine, its imports done, not started; and how it is updated in the paused ways. Raises UsageError."""
    if name == "torch":
        return _torch_engine(model, run_id, max_running)
    if name == "vllm":
        return _vllm_engine(model, run_id, max_running)
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
    from rollout_server.engines.torch_engine import TorchEngine
    from weight_bus.bench.in_place import InPlace

    engine = TorchEngine(**_settings(model, run_id, max_running))
    engine.preload()

    class Here:
        """Loads in this process, on a thread of its own. The tensors are looked up anew: a commit of ours swaps them."""

        def __init__(self) -> None:
            self._in_place = InPlace(lambda: engine._weights()[0].target.live())
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="paused-update")

        async def join(self, port: int) -> None:
            await self._run(self._in_place.join, port)

        async def unpack(self) -> None:
            """Nothing is ever packed here."""

        async def prefetch(self, path: str) -> None:
            await self._run(self._in_place.prefetch, path)

        async def load(self, way: PausedWay, path: str) -> None:
            await self._run(self._in_place.load, way, path)

        async def _run(self, work: Any, *arguments: Any) -> None:
            await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    return engine, Here()


def _vllm_engine(model: Path, run_id: str, max_running: int) -> tuple[Engine, PausedUpdates]:
    from rollout_server.engines.vllm_engine import VllmEngine

    engine = VllmEngine(**_settings(model, run_id, max_running))
    engine.preload()
    from vllm.v1.engine.core import EngineCore

    # The engine core is forked from this process and so has them too.
    EngineCore.bench_join = _core_join
    EngineCore.bench_unpack = _core_unpack
    EngineCore.bench_prefetch = _core_prefetch
    EngineCore.bench_load = _core_load

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

        async def _call(self, name: str, *arguments: Any) -> None:
            await engine._running().engine_core.call_utility_async(name, *arguments)

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
    attached.packed.flip(_NEVER_STAGED)


def _in_place(core: Any) -> Any:
    found = getattr(core, "bench_in_place", None)
    if found is None:
        from weight_bus.bench.in_place import InPlace

        [attached] = core.model_executor.collective_rpc(_attachment)
        found = core.bench_in_place = InPlace(attached.weights.live)
        core.bench_thread = ThreadPoolExecutor(1, thread_name_prefix="paused-update")
    return found


def _attachment(worker: Any) -> Any:
    return worker.rollmesh_attachment

"""vLLM's engine core, a child process: started, watched, called between two steps, closed.

    start ─ launch ─► AsyncLLM here ◄── outputs of every step ── engine core (child) ── its workers
                        call ──────────── between two steps ──────────►
                        gone ◄─────────── the child has ended

One that is dead or closing is said to everybody who waits: vLLM would leave some of them waiting.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rollout_server.engines.vllm import launch as vllm_launch
from rollout_server.engines.vllm.arguments import Plan
from services.config.settings import PackedWeights, ShadowPlace
from services.wire.errors import DeadlineError, NotReadyError, RollmeshError, UsageError
from weight_bus.manifest.adapter import AdapterPlan
from weight_bus.vllm.protocol import Attached, Committed, Digest, Done, Staged, ask

_ENDS_WITHIN_S = 20.0
_CALL_DEADLINE_S = 60.0
_CLOSE_DEADLINE_S = 5.0
_DEAD = "the vLLM engine core has died"

_Answer = TypeVar("_Answer", Attached, Staged, Committed, Digest, Done)


@dataclass(frozen=True)
class Seat:
    """What an engine is told of the run that it serves. `transport`: a name that `weight_bus.transports.select` knows.

    `weights_key`: manifests must bear its signature; `file_root`: the folder that weight files may be read from.
    `adapter`: versions are adapters; None: whole weights. `slot`: the adapter's place in the engine core, from 1.
    `keep_experts`: which experts a mixture chooses is told of requests that ask for it. `start_within_s`: for the loaded
    model to be attached and to generate once.
    """

    run_id: str
    transport: str
    weights_key: str | None = None
    file_root: Path | None = None
    adapter: AdapterPlan | None = None
    slot: int = 1
    keep_experts: bool = False
    start_within_s: float = 600.0


class CoreProcess:
    """The engine core of `plan`, of one run or shared by several. `threads`: of torch, on a CPU; `shadow`, `packed`: as
    `weights` says.

    `preload` imports (seconds, any thread) and needs no model. On a CPU `start` holds the event loop for about a second and
    must run on the main thread, because it forks.
    """

    def __init__(self, plan: Plan, *, threads: int, shadow: ShadowPlace, packed: PackedWeights) -> None:
        self.plan = plan
        self.threads, self.shadow, self.packed = threads, shadow, packed
        self.scratch = Path()
        self._preloaded = False
        self._llm: Any = None
        self._gone: asyncio.Future[None] | None = None
        self._observers: list[Callable[[Any], None]] = []
        self._starting = asyncio.Lock()
        self._refused: RollmeshError | None = None
        self.users = 0
        """Runs that share it and have not left."""

    def preload(self) -> None:
        """Import vLLM, which takes most of a start. Blocks; raises UsageError where vLLM is missing."""
        if not self._preloaded:
            vllm_launch.import_everything(self.threads, self.plan.given, self.shadow, packed=self.packed)
            # The imported modules stay: neither this process nor the forked one needs to collect garbage among them.
            gc.freeze()
            self._preloaded = True

    async def start(self, observe: Callable[[Any], None]) -> None:
        """Load the model, unless that was done for another run; where it failed, that is raised again.

        `observe` is called with every message of the engine core, before vLLM's own handler gets it.
        """
        self._observers.append(observe)
        async with self._starting:
            if self._refused is not None:
                raise self._refused
            if self._llm is None:
                try:
                    await self._launch()
                except RollmeshError as error:
                    self._refused = error
                    raise

    async def _launch(self) -> None:
        model = self.plan.model
        if not (model / "config.json").exists():
            raise UsageError(f"{model} is no model folder (no config.json)", "give a Hugging Face folder")
        self.preload()
        self._llm, self.scratch = await self._make()
        try:
            self._watch()
            self._observe()
            await self._llm.get_supported_tasks()
        except BaseException:
            await self.close()
            raise

    async def _make(self) -> tuple[Any, Path]:
        """AsyncLLM and its scratch folder."""
        if vllm_launch.on_cpu():
            # Here, not on a thread: it forks, and a fork copies the locks that other threads hold.
            return vllm_launch.launch(self.plan)
        return await asyncio.to_thread(vllm_launch.launch, self.plan)

    @property
    def is_open(self) -> bool:
        return self._llm is not None

    def running(self) -> Any:
        """vLLM's AsyncLLM. Raises NotReadyError where it is closing, was not started, or its core has died."""
        if self._llm is None:
            raise closing()
        if self.failure() is not None:
            raise dead()
        return self._llm

    def failure(self) -> str | None:
        """Why nothing is served any more: the core reported an error, or its process has ended."""
        if self._llm is None or self._gone is None:
            return None
        return _DEAD if self._gone.done() or self._llm.errored else None

    def samples(self) -> Mapping[str, Any]:
        """vLLM's own books of the samples that are unfinished, by its ids of them."""
        states: Mapping[str, Any] = {} if self._llm is None else self._llm.output_processor.request_states
        return states

    async def call(
        self, answer: type[_Answer], method: str, *arguments: Any, deadline_s: float = _CALL_DEADLINE_S
    ) -> _Answer:
        """A utility call between two steps of the engine core, and its typed reply."""
        client = self.running().engine_core
        gone = self._gone
        assert gone is not None
        call: asyncio.Future[Any] = asyncio.ensure_future(ask(client, method, *arguments))
        try:
            await asyncio.wait({call, gone}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                if gone.done():
                    raise dead()
                raise DeadlineError(f"vLLM did not answer {method} within {deadline_s} s")
            try:
                reply = call.result()
            except RollmeshError:
                raise
            except Exception as error:
                # A method's own failures come as replies. After any other the core ends: it has lost a worker.
                await asyncio.wait({gone}, timeout=_ENDS_WITHIN_S)
                if gone.done():
                    raise dead() from error
                raise RollmeshError(f"vLLM failed in {method} ({error})", "see the server's log") from error
        finally:
            call.cancel()
        if not isinstance(reply, answer):
            raise RollmeshError(f"vLLM answered {method} with {type(reply).__name__}")
        return reply

    async def leave(self, observe: Callable[[Any], None]) -> None:
        """One of the runs that share it is through; the last one closes it."""
        self.users -= 1
        self._observers = [each for each in self._observers if each != observe]
        if not self.users:
            await self.close()

    async def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is None:
            return
        manager = llm.engine_core.resources.engine_manager
        for process in manager.processes if manager is not None else ():
            asyncio.get_running_loop().remove_reader(process.sentinel)
        # vLLM's own handler would report the end as a crash; without it, nobody else tells those who wait for tokens.
        if llm.output_handler is not None:
            llm.output_handler.cancel()
            await asyncio.wait({llm.output_handler})
        llm.output_processor.propagate_error(closing())
        await asyncio.to_thread(vllm_launch.end, llm, self.scratch, _CLOSE_DEADLINE_S)

    def _watch(self) -> None:
        """Fail waiting calls when the engine core process ends: vLLM would leave them waiting."""
        loop = asyncio.get_running_loop()
        self._gone = gone = loop.create_future()

        def died(sentinel: int) -> None:
            loop.remove_reader(sentinel)
            if not gone.done():
                gone.set_result(None)

        for process in self._llm.engine_core.resources.engine_manager.processes:
            loop.add_reader(process.sentinel, died, process.sentinel)

    def _observe(self) -> None:
        client = self._llm.engine_core
        receive = client.get_output_async

        async def receive_and_observe() -> Any:
            outputs = await receive()
            for observe in self._observers:
                observe(outputs)
            return outputs

        client.get_output_async = receive_and_observe


def closing() -> NotReadyError:
    return NotReadyError("the vLLM engine is closing or was not started", "send the request to another server")


def dead() -> NotReadyError:
    return NotReadyError(_DEAD, "restart this rollout server; the core's last lines are in its log")

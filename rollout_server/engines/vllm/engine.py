"""The vLLM engine: AsyncLLM here, its engine core and the weights in a child process.

rollout server (this process)                     engine core (child)
generate ──── token ids ────────────────────────► scheduler · model · sampler
         ◄─── tokens, logprobs, weight version ── every step's outputs
stage ─────── manifest ─────────────────────────► a thread pulls buckets into shadow memory
commit ────── version ──────────────────────────► between two steps: flip, change the version label
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

from rollout_server.engines.base import (
    EngineStatus,
    GenerationDelta,
    GenerationRequest,
    collect,
    join,
)
from rollout_server.engines.request_check import eos_token_ids
from rollout_server.engines.vllm.arguments import Plan
from rollout_server.engines.vllm.convert import prompt_logprobs, vllm_parameters
from rollout_server.engines.vllm.core_process import CoreProcess, Seat, dead
from rollout_server.engines.vllm.outputs import OutputReader
from rollout_server.engines.vllm.stats import StepMeter
from services.config.settings import PackedWeights, ShadowPlace
from services.policies.training.deadlines import within
from services.wire.errors import ConflictError, NotReadyError, RollmeshError
from services.wire.sampling import KvPolicy, SamplingParams
from services.wire.weights_api import CommitAnswer, PauseMode, StageAnswer
from weight_bus.manifest.adapter import AdapterPlan
from weight_bus.vllm.adapters import the_adapter
from weight_bus.vllm.protocol import Attached, Committed, Digest, Staged

_log = structlog.get_logger()
_BYTES_S = 600.0
"""To read or to hash all weights, at the least; the bus, which asks for it, gives up before."""
_SETTLE_TURNS = 1000


class RunEngine:
    """`rollout_server.engines.base.Engine` of one run, over a core of its own.

    `rollout_server.engines.vllm.shared` has that of a run which shares its core with others.
    """

    def __init__(self, core: CoreProcess, seat: Seat) -> None:
        self.core, self._seat = core, seat
        self._asked_for: Any = None
        """vLLM's name of the adapter that every request asks for."""
        self._hashed_within = _BYTES_S
        self._meter = StepMeter()
        self._outputs = self._make_reader()
        self._live: dict[str, int] = {}
        """Request id → samples asked for."""
        self.policy_version = 0
        self._staged: int | None = None
        self._paused = asyncio.Event()
        self._vocabulary = 0
        self.eos_token_ids: tuple[int, ...] = ()
        self.max_model_len = 0

    def _make_reader(self) -> OutputReader:
        return OutputReader(self.core.samples, self.core.plan.kv_policy, keep_experts=self._seat.keep_experts)

    def preload(self) -> None:
        """Import vLLM, which takes most of a start. Blocks; raises UsageError where vLLM is missing."""
        self.core.preload()

    async def start(self) -> None:
        await self.core.start(self._observe)
        try:
            await self._make_ready()
        except BaseException:
            await self.close()
            raise

    async def _make_ready(self) -> None:
        config = self.core.running().model_config
        self.eos_token_ids = eos_token_ids(self.core.plan.model)
        self.max_model_len, self._vocabulary = config.max_model_len, config.get_vocab_size()
        attached = await self._attach()
        self._hashed_within = within(_BYTES_S, attached.total_bytes)
        await self._rehearse()
        _log.info("engine_ready", engine="vllm", model=str(self.core.plan.model), weight_bytes=attached.total_bytes)

    def _observe(self, outputs: Any) -> None:
        self._outputs.prefilled(self._meter.observe(outputs))

    async def _attach(self) -> Attached:
        seat, adapter = self._seat, self._seat.adapter
        self._asked_for = None if adapter is None else the_adapter(seat.slot)
        return await self.core.call(
            Attached,
            "rollmesh_attach",
            seat.run_id,
            seat.transport,
            self.core.plan.kv_policy,
            seat.weights_key,
            None if seat.file_root is None else str(seat.file_root),
            None if adapter is None else (adapter.rank, adapter.targets),
            seat.keep_experts,
            seat.slot,
            deadline_s=seat.start_within_s,
        )

    def _running(self) -> Any:
        """vLLM's AsyncLLM. Raises NotReadyError where nothing is served."""
        return self.core.running()

    def _name(self, request_id: str) -> str:
        """What vLLM knows a request by."""
        return request_id

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationDelta]:
        llm = self._running()
        from vllm.inputs import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        parameters = vllm_parameters(
            request, max_model_len=self.max_model_len, vocabulary=self._vocabulary, eos_token_ids=self.eos_token_ids
        )
        if request.request_id in self._live:
            raise ConflictError(f"request {request.request_id} is running already")
        if not self._live:
            self._meter.break_off()
        self._live[request.request_id] = request.n
        collector, unfinished = None, request.n
        begins = [0] * request.n
        buffered: dict[int, GenerationDelta] = {}
        try:
            prompt = tokens_input(list(request.prompt_token_ids), cache_salt=request.cache_salt)
            collector = await llm.add_request(
                self._name(request.request_id),
                prompt,
                parameters,
                lora_request=self._asked_for,
                priority=int(request.background),
            )
            due, clock = 0.0, asyncio.get_running_loop().time
            while unfinished:
                # vLLM joins what comes until it is asked for.
                if request.stream and clock() < due and not self._paused.is_set():
                    with suppress(TimeoutError):
                        async with asyncio.timeout_at(due):
                            await self._paused.wait()
                output = collector.get_nowait() or await collector.get()
                due = clock() + request.gather_s
                for completion in output.outputs:
                    index = completion.index
                    delta = self._outputs.delta(request, collector.request_id, completion, begins[index])
                    if request.prompt_logprobs and not begins[index] and delta.token_ids:
                        # Of one version: `weight_bus.vllm.kv_cache` begins prompts anew that a commit finds read in part.
                        delta = replace(delta, prompt_logprobs=prompt_logprobs(request, output.prompt_logprobs))
                    begins[index] += len(delta.token_ids)
                    unfinished -= delta.finish_reason is not None
                    if index in buffered:
                        delta = join(buffered.pop(index), delta)
                    # vLLM's own interval lets a sample's first token through at once.
                    if delta.finish_reason is None and len(delta.token_ids) < request.delta_every:
                        buffered[index] = delta
                    else:
                        yield delta
        except (EngineDeadError, EngineGenerateError) as error:
            raise dead() from error
        finally:
            del self._live[request.request_id]
            if collector is not None:
                self._outputs.forget(collector.request_id, request.n)
            if not self._live:
                self._meter.break_off()
            if collector is not None and unfinished and self.core.is_open:
                await llm.abort(collector.request_id, internal=True)

    async def abort(self, request_ids: list[str] | None = None) -> int:
        named = self._live if request_ids is None else request_ids
        found = [request_id for request_id in named if request_id in self._live]
        if found:
            await self._running().abort([self._name(request_id) for request_id in found])
        return len(found)

    async def pause(self, mode: PauseMode) -> None:
        llm = self._running()
        # Whoever gathers tokens reads at once what there is.
        self._paused.set()
        # The cache is kept: requests in flight continue with the keys and values they have.
        await llm.engine_core.pause_scheduler_async(mode, False)
        await self._settle(llm)

    async def _settle(self, llm: Any) -> None:
        """Let readers have what came before the core's last answer: outputs wait in a queue for another task."""
        for _ in range(_SETTLE_TURNS):
            await asyncio.sleep(0)
            if llm.engine_core.outputs_queue.empty():
                break
        await asyncio.sleep(0)
        self._meter.break_off()

    async def resume(self) -> None:
        await self._running().engine_core.resume_scheduler_async()
        self._paused.clear()

    async def stage(self, manifest: bytes) -> StageAnswer:
        self._staged = None
        staged = (
            await self.core.call(Staged, "rollmesh_stage", manifest, self._seat.slot, deadline_s=self._hashed_within)
        ).result
        self._staged = staged.version
        return staged

    async def commit(self, version: int) -> CommitAnswer:
        return await self._serve("rollmesh_commit", version)

    async def rollback(self, version: int) -> CommitAnswer:
        return await self._serve("rollmesh_rollback", version)

    async def _serve(self, method: str, version: int) -> CommitAnswer:
        if version == self.policy_version:
            # Asked again: its answer was lost.
            return CommitAnswer(version=version, flip_ms=0.0, requests_in_flight=len(self._live))
        committed = await self.core.call(Committed, method, version, self._seat.slot)
        self.policy_version, self._staged = committed.result.version, None
        self._meter.committed(committed.at)
        return committed.result

    async def weights_digest(self) -> str:
        told = await self.core.call(Digest, "rollmesh_digest", self._seat.slot, deadline_s=self._hashed_within)
        return told.result.root_digest

    def status(self) -> EngineStatus:
        unfinished = self._unfinished()
        running = min(self._meter.generating, unfinished)
        return EngineStatus(
            name="vllm",
            policy_version=self.policy_version,
            running=running,
            waiting=unfinished - running,
            paused=self._paused.is_set(),
            tokens_generated=self._meter.tokens,
            commits=self._meter.commits,
            stalls_ms=self._meter.stalls_ms(),
            failure=self.core.failure(),
            prefill_tokens=self._meter.prefill_tokens,
            staged_version=self._staged,
            ranks=self.core.plan.tensor_parallel,
            # Nothing is told after the last step of the last request.
            kv_use=self._meter.kv_use if self.core.samples() else 0.0,
        )

    def _unfinished(self) -> int:
        return len(self.core.samples())

    async def close(self) -> None:
        await self.core.close()

    async def _rehearse(self) -> None:
        """Generate one token: some models load and then kill the core at the first step (a head size without a kernel)."""
        rehearsal = GenerationRequest("rehearsal", [0], SamplingParams(max_tokens=1, ignore_eos=True))
        try:
            async with asyncio.timeout(self._seat.start_within_s):
                await collect(self.generate(rehearsal))
        except (NotReadyError, TimeoutError) as error:
            raise RollmeshError(
                f"vLLM loaded {self.core.plan.model} but cannot decode with it",
                "its reason is in this log; try --engine torch",
            ) from error
        self._meter = StepMeter()


class VllmEngine(RunEngine):
    """An engine that serves one run.

    `preload` imports (seconds, any thread) and needs no model; `start` starts the engine core and loads the model. On a
    CPU `start` holds the event loop for about a second and must run on the main thread, because it forks.
    `tensor_parallel`: ranks that the model is split over, each a process of its own where there are several. `given`:
    further engine arguments (`services.config.engines.vllm`). `shadow`: where a version is staged (`weight_bus.vllm.sets`);
    `packed`: how matrices are held on a CPU (`weight_bus.vllm.packed`). `adapter`: versions are adapters of
    `model`, served by vLLM's own low-rank layers. The rest: `Seat`.
    """

    core_kind = CoreProcess

    def __init__(
        self,
        model: Path,
        *,
        run_id: str,
        dtype: str,
        max_running: int,
        threads: int,
        transport: str,
        seed: int,
        kv_policy: KvPolicy = "keep",
        weights_key: str | None = None,
        file_root: Path | None = None,
        tensor_parallel: int = 1,
        trust_remote_code: bool = False,
        given: Mapping[str, Any] | None = None,
        start_within_s: float = 600.0,
        shadow: ShadowPlace = "device",
        packed: PackedWeights = "auto",
        adapter: AdapterPlan | None = None,
        keep_experts: bool = False,
    ) -> None:
        plan = Plan(
            model=model,
            dtype=dtype,
            max_running=max_running,
            seed=seed,
            kv_policy=kv_policy,
            tensor_parallel=tensor_parallel,
            trust_remote_code=trust_remote_code,
            given=given or {},
            adapters=() if adapter is None else (adapter,),
        )
        seat = Seat(
            run_id,
            transport,
            weights_key,
            file_root,
            adapter,
            keep_experts=keep_experts,
            start_within_s=start_within_s,
        )
        super().__init__(self.core_kind(plan, threads=threads, shadow=shadow, packed=packed), seat)

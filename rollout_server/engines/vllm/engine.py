"""The vLLM engine: AsyncLLM here, its engine core and the weights in a child process.

rollout server (this process)                     engine core (child)
generate ──── token ids ────────────────────────► scheduler · model · sampler
         ◄─── tokens, logprobs, weight version ── every step's outputs
stage ─────── manifest ─────────────────────────► a thread pulls buckets into shadow memory
commit ────── version ──────────────────────────► between two steps: flip, change the version label
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import structlog

from rollout_server.engines.base import (
    EngineStatus,
    GenerationDelta,
    GenerationRequest,
    collect,
    join,
)
from rollout_server.engines.request_check import eos_token_ids
from rollout_server.engines.vllm import launch as vllm_launch
from rollout_server.engines.vllm.arguments import Plan
from rollout_server.engines.vllm.convert import (
    asked_kept,
    chosen_experts,
    prompt_logprobs,
    take_rows,
    to_delta,
    vllm_parameters,
)
from rollout_server.engines.vllm.stats import StepMeter
from services.config.settings import ShadowPlace
from services.policies.training.deadlines import within
from services.wire.errors import ConflictError, DeadlineError, NotReadyError, RollmeshError, UsageError
from services.wire.sampling import KvPolicy, SamplingParams
from services.wire.weights_api import CommitAnswer, PauseMode, StageAnswer
from weight_bus.manifest.adapter import AdapterPlan
from weight_bus.vllm.adapters import the_adapter
from weight_bus.vllm.protocol import Attached, Committed, Digest, Staged, ask

_log = structlog.get_logger()
_BYTES_S = 600.0
"""To read or to hash all weights, at the least; the bus, which asks for it, gives up before."""
_ENDS_WITHIN_S = 20.0
_CALL_DEADLINE_S = 60.0
_CLOSE_DEADLINE_S = 5.0
_SETTLE_TURNS = 1000
_DEAD = "the vLLM engine core has died"

_Answer = TypeVar("_Answer", Attached, Staged, Committed, Digest)


class VllmEngine:
    """`rollout_server.engines.base.Engine` over vLLM.

    `preload` imports (seconds, any thread) and needs no model; `start` starts the engine core and loads the model. On a
    CPU `start` holds the event loop for about a second and must run on the main thread, because it forks. `transport` is
    a name `weight_bus.transports.select` knows. `tensor_parallel`: ranks that the model is split over, each a process
    of its own where there are several. `given`: further engine arguments (`services.config.engines.vllm`).
    `shadow`: where a version is staged (`weight_bus.vllm.sets`); `packed`: whether packed copies are kept on a CPU
    (`weight_bus.vllm.packing`). `adapter`: versions are adapters of `model`, served by vLLM's own low-rank layers; None:
    whole weights. `keep_experts`: which experts a mixture chooses is told of requests that ask for it. `start_within_s`:
    for the loaded model to be attached and to generate once.
    """

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
        packed: bool = True,
        adapter: AdapterPlan | None = None,
        keep_experts: bool = False,
    ) -> None:
        self._plan = Plan(
            model=model,
            dtype=dtype,
            max_running=max_running,
            seed=seed,
            kv_policy=kv_policy,
            tensor_parallel=tensor_parallel,
            trust_remote_code=trust_remote_code,
            given=given or {},
            adapter=adapter,
        )
        self._keep_experts = keep_experts
        self._asked_for: Any = None
        """vLLM's name of the adapter that every request asks for."""
        self._start_within_s, self._shadow, self._packed = start_within_s, shadow, packed
        self._hashed_within = _BYTES_S
        self._run_id = run_id
        self._threads = threads
        self._transport = transport
        self._weights_key = weights_key
        self._file_root = None if file_root is None else str(file_root)
        self._preloaded = False
        self._llm: Any = None
        self._scratch = Path()
        self._core_gone: asyncio.Future[None] | None = None
        self._meter = StepMeter()
        self._live: dict[str, int] = {}
        """Request id → samples asked for."""
        self._computed_anew: dict[str, list[int]] = {}
        """vLLM's id of a sample → how many tokens it had each time that its prefill was done again."""
        self.policy_version = 0
        self._staged: int | None = None
        self._paused = asyncio.Event()
        self._vocabulary = 0
        self.eos_token_ids: tuple[int, ...] = ()
        self.max_model_len = 0

    def preload(self) -> None:
        """Import vLLM, which takes most of a start. Blocks; raises UsageError where vLLM is missing."""
        if not self._preloaded:
            vllm_launch.import_everything(self._threads, self._plan.given, self._shadow, packed=self._packed)
            # The imported modules stay: neither this process nor the forked one needs to collect garbage among them.
            gc.freeze()
            self._preloaded = True

    async def start(self) -> None:
        model = self._plan.model
        if not (model / "config.json").exists():
            raise UsageError(f"{model} is no model folder (no config.json)", "give a Hugging Face folder")
        self.preload()
        if vllm_launch.on_cpu():
            # Here, not on a thread: it forks, and a fork copies the locks that other threads hold.
            self._llm, self._scratch = vllm_launch.launch(self._plan)
        else:
            self._llm, self._scratch = await asyncio.to_thread(vllm_launch.launch, self._plan)
        try:
            await self._make_ready()
        except BaseException:
            await self.close()
            raise

    async def _make_ready(self) -> None:
        self._watch_core()
        self._watch_steps()
        config = self._llm.model_config
        self.eos_token_ids = eos_token_ids(self._plan.model)
        self.max_model_len, self._vocabulary = config.max_model_len, config.get_vocab_size()
        await self._llm.get_supported_tasks()
        attached = await self._attach()
        self._hashed_within = within(_BYTES_S, attached.total_bytes)
        await self._rehearse()
        _log.info("engine_ready", engine="vllm", model=str(self._plan.model), weight_bytes=attached.total_bytes)

    async def _attach(self) -> Attached:
        adapter = self._plan.adapter
        self._asked_for = None if adapter is None else the_adapter()
        return await self._call(
            Attached,
            "rollmesh_attach",
            self._run_id,
            self._transport,
            self._plan.kv_policy,
            self._weights_key,
            self._file_root,
            None if adapter is None else (adapter.rank, adapter.targets),
            self._keep_experts,
            deadline_s=self._start_within_s,
        )

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
                request.request_id,
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
                    delta = self._delta(request, collector.request_id, completion, begins[index])
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
            raise _dead() from error
        finally:
            del self._live[request.request_id]
            if collector is not None:
                for index in range(request.n):
                    self._computed_anew.pop(_sample_id(collector.request_id, request.n, index), None)
            if not self._live:
                self._meter.break_off()
            if collector is not None and unfinished and self._llm is not None:
                await llm.abort(collector.request_id, internal=True)

    async def abort(self, request_ids: list[str] | None = None) -> int:
        named = self._live if request_ids is None else request_ids
        found = [request_id for request_id in named if request_id in self._live]
        if found:
            await self._running().abort(found)
        return len(found)

    async def pause(self, mode: PauseMode) -> None:
        llm = self._running()
        # Whoever gathers tokens reads at once what there is.
        self._paused.set()
        # The cache is kept: requests in flight continue with the keys and values they have.
        await llm.engine_core.pause_scheduler_async(mode, False)
        # Outputs of the last step came before the answer, but wait in a queue for another task: let it have its turn.
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
        staged = (await self._call(Staged, "rollmesh_stage", manifest, deadline_s=self._hashed_within)).result
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
        committed = await self._call(Committed, method, version)
        self.policy_version, self._staged = committed.result.version, None
        self._meter.committed(committed.at)
        return committed.result

    async def weights_digest(self) -> str:
        return (await self._call(Digest, "rollmesh_digest", deadline_s=self._hashed_within)).result.root_digest

    def status(self) -> EngineStatus:
        unfinished = 0 if self._llm is None else self._llm.output_processor.get_num_unfinished_requests()
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
            failure=self._failure(),
            prefill_tokens=self._meter.prefill_tokens,
            staged_version=self._staged,
            ranks=self._plan.tensor_parallel,
            # Nothing is told after the last step of the last request.
            kv_use=self._meter.kv_use if unfinished else 0.0,
        )

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
        llm.output_processor.propagate_error(_closing())
        await asyncio.to_thread(vllm_launch.end, llm, self._scratch, _CLOSE_DEADLINE_S)

    def _running(self) -> Any:
        if self._llm is None:
            raise _closing()
        if self._failure() is not None:
            raise _dead()
        return self._llm

    def _failure(self) -> str | None:
        """Why nothing is served any more: the core reported an error, or its process has ended."""
        if self._llm is None or self._core_gone is None:
            return None
        return _DEAD if self._core_gone.done() or self._llm.errored else None

    async def _rehearse(self) -> None:
        """Generate one token: some models load and then kill the core at the first step (a head size without a kernel)."""
        rehearsal = GenerationRequest("rehearsal", [0], SamplingParams(max_tokens=1, ignore_eos=True))
        try:
            async with asyncio.timeout(self._start_within_s):
                await collect(self.generate(rehearsal))
        except (NotReadyError, TimeoutError) as error:
            raise RollmeshError(
                f"vLLM loaded {self._plan.model} but cannot decode with it",
                "its reason is in this log; try --engine torch",
            ) from error
        self._meter = StepMeter()

    def _watch_steps(self) -> None:
        """Observe every message of the engine core before vLLM's own handler gets it."""
        client = self._llm.engine_core
        receive = client.get_output_async

        async def receive_and_observe() -> Any:
            outputs = await receive()
            for sample_id in self._meter.observe(outputs):
                state = self._llm.output_processor.request_states.get(sample_id)
                sampled = 0 if state is None else state.detokenizer.num_output_tokens()
                if sampled:
                    self._computed_anew.setdefault(sample_id, []).append(sampled)
            return outputs

        client.get_output_async = receive_and_observe

    def _watch_core(self) -> None:
        """Fail waiting calls when the engine core process ends: vLLM would leave them waiting."""
        loop = asyncio.get_running_loop()
        self._core_gone = gone = loop.create_future()

        def died(sentinel: int) -> None:
            loop.remove_reader(sentinel)
            if not gone.done():
                gone.set_result(None)

        for process in self._llm.engine_core.resources.engine_manager.processes:
            loop.add_reader(process.sentinel, died, process.sentinel)

    async def _call(
        self, answer: type[_Answer], method: str, *arguments: Any, deadline_s: float = _CALL_DEADLINE_S
    ) -> _Answer:
        """A utility call between two steps of the engine core, and its typed reply."""
        client = self._running().engine_core
        gone = self._core_gone
        assert gone is not None
        call: asyncio.Future[Any] = asyncio.ensure_future(ask(client, method, *arguments))
        try:
            await asyncio.wait({call, gone}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                if gone.done():
                    raise _dead()
                raise DeadlineError(f"vLLM did not answer {method} within {deadline_s} s")
            try:
                reply = call.result()
            except RollmeshError:
                raise
            except Exception as error:
                # A method's own failures come as replies. After any other the core ends: it has lost a worker.
                await asyncio.wait({gone}, timeout=_ENDS_WITHIN_S)
                if gone.done():
                    raise _dead() from error
                raise RollmeshError(f"vLLM failed in {method} ({error})", "see the server's log") from error
        finally:
            call.cancel()
        if not isinstance(reply, answer):
            raise RollmeshError(f"vLLM answered {method} with {type(reply).__name__}")
        return reply

    def _delta(self, request: GenerationRequest, internal_id: str, completion: Any, begin: int) -> GenerationDelta:
        sample_id = _sample_id(internal_id, request.n, completion.index)
        delta = to_delta(
            request.request_id,
            completion,
            self._version_starts(sample_id, completion),
            begin,
            request.top_logprobs,
            self._plan.kv_policy,
            self._computed_anew.get(sample_id, ()),
            request.resumed > 0,
            asked_kept(request),
        )
        if not request.experts or not self._keep_experts:
            return delta
        # The newest token is yet to be computed; so was that of the delta before.
        given = len(request.prompt_token_ids) - 1
        told, computed = given + begin if begin else 0, given + begin + len(delta.token_ids)
        rows = completion.routed_experts
        if rows is None:
            state = self._llm.output_processor.request_states.get(sample_id)
            rows = None if state is None else take_rows(state.routed_experts_chunks, computed - told)
        return delta if rows is None else replace(delta, experts=chosen_experts(rows, computed))

    def _version_starts(self, sample_id: str, completion: Any) -> Sequence[tuple[str, int]]:
        """(label, first token) of each version in a sample so far: on its last output, before that in vLLM's own books."""
        if completion.weight_versions is not None:
            return [(span.version, span.start) for span in completion.weight_versions]
        state = self._llm.output_processor.request_states.get(sample_id)
        starts: Sequence[tuple[str, int]] = () if state is None else state.weight_version_starts
        return starts


def _sample_id(internal_id: str, n: int, index: int) -> str:
    """vLLM's name for one sample of a request."""
    return internal_id if n == 1 else f"{index}_{internal_id}"


def _closing() -> NotReadyError:
    return NotReadyError("the vLLM engine is closing or was not started", "send the request to another server")


def _dead() -> NotReadyError:
    return NotReadyError(_DEAD, "restart this rollout server; the core's last lines are in its log")

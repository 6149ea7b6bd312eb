"""The HTTP engine: generation by an external server (a plain `vllm serve`, or a rollout server) behind a URL.

    HttpEngine (event loop)                                           the engine's server
      generate ── InflightRequest ─ Flow ◄── events ── EngineClient ◄── POST /inference/v1/generate, always a stream
      stage, commit ── Updates ─────────────────────── EngineClient ──► its weight update routes
      Watch ── EngineHealth ────────────────────────── EngineClient ──► does it answer, and with which weights?

A request is aborted by closing its connection: the tokens received so far are the answer, and the engine notices by
itself.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing, suppress
from pathlib import Path

import structlog

from rollout_server.engines.base import EngineStatus, GenerationDelta, GenerationRequest
from rollout_server.engines.http.client import EngineClient, EngineLostError
from rollout_server.engines.http.health import EngineHealth, Traits, Watch
from rollout_server.engines.http.weights import Updates
from rollout_server.engines.http.wire import Flow, OtherWeightsError, generate_body
from rollout_server.engines.request_check import check_request, eos_token_ids, vocabulary_size
from rollout_server.engines.step_timing import StepTiming
from rollout_server.engines.streams import DeltaStream, DeltaStreams
from services.security.tls import PUBLIC, Trust
from services.wire.errors import NotReadyError, RollmeshError, UsageError
from services.wire.weights_api import CommitAnswer, PauseMode, StageAnswer

_log = structlog.get_logger()
# After the last token only the end-of-stream event is due; without it the connection cannot be used again.
_TAIL_S = 5.0


class HttpEngine:
    """See `rollout_server.engines.base.Engine`. `model`: the local folder with the tokenizer and config of what is served.

    `url`: the engine's server; `key`: its bearer key; `trust`: whose certificate it may show. `transport` is told to it
    with the first manifest. `start_within_s`: how long it is waited for.
    """

    def __init__(
        self,
        model: Path,
        *,
        url: str,
        key: str | None,
        run_id: str,
        transport: str,
        trust: Trust = PUBLIC,
        start_within_s: float = 600.0,
    ) -> None:
        self._start_within_s = start_within_s
        self._folder = model
        self._client = EngineClient(url, key, trust)
        self._health = EngineHealth(self._client.url)
        self._updates = Updates(
            self._client, self._health, run_id, transport, stand_still=self._stand_still, go_on=self._go_on
        )
        self._watch = Watch(
            self._client,
            self._health,
            on_lost=self._fail_all,
            on_met=self._met_again,
            busy=lambda: self._updates.busy,
        )
        self._watching: asyncio.Task[None] | None = None
        self._streams = DeltaStreams()
        self._inflight: dict[str, InflightRequest] = {}
        self._tails: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._paused = self._kept = self._committing = False
        self._timing = StepTiming()
        self._commits = 0
        self._vocabulary = 0
        self.eos_token_ids: tuple[int, ...] = ()

    @property
    def policy_version(self) -> int:
        return self._health.version

    @property
    def max_model_len(self) -> int:
        return 0 if self._watch.traits is None else self._watch.traits.max_model_len

    async def start(self) -> None:
        """Wait for the engine to come up and ask what it can do. Raises UsageError for one that cannot serve."""
        self._vocabulary = vocabulary_size(self._folder)
        self.eos_token_ids = eos_token_ids(self._folder)
        await self._client.open()
        await self._watch.meet_within(self._start_within_s)
        self._open.set()
        self._watching = asyncio.create_task(self._watch.run(), name=f"watch of {self._client.url}")
        traits = self._traits()
        _log.info(
            "engine_ready",
            engine="http",
            url=self._client.url,
            max_model_len=traits.max_model_len,
            version=self.policy_version,
            rollout_server=traits.ours,
            takes_weights=traits.operated,
        )

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationDelta]:
        traits = self._traits()
        check_request(
            request, max_model_len=traits.max_model_len, vocabulary=self._vocabulary, eos_token_ids=self.eos_token_ids
        )
        traits.check_sampling(request.sampling, self._client.url)
        with self._streams.open(request.request_id, request.gather_s) as stream:
            inflight = self._inflight[request.request_id] = InflightRequest(request, stream)
            if self._kept:
                inflight.freeze()
            inflight.task = asyncio.create_task(self._run(inflight), name=f"engine request {request.request_id}")
            left = request.n
            try:
                while left:
                    for delta in await stream.next():
                        await inflight.thawed()
                        left -= delta.finish_reason is not None
                        yield delta
            finally:
                del self._inflight[request.request_id]
                await self._end(inflight)

    async def abort(self, request_ids: list[str] | None = None) -> int:
        self._traits()
        named = list(self._inflight) if request_ids is None else request_ids
        found = [
            inflight for name in named if (inflight := self._inflight.get(name)) is not None and not inflight.ended
        ]
        for inflight in found:
            inflight.abort()
        return len(found)

    async def pause(self, mode: PauseMode) -> None:
        """`abort` and `wait` hold requests back here; `keep` freezes them in the engine. Raises UsageError if it cannot."""
        traits = self._traits()
        if mode == "keep" and not traits.operated:
            raise UsageError(
                f"the engine at {self._client.url} has no /pause",
                "start it with VLLM_SERVER_DEV_MODE=1, or abort or wait",
            )
        self._paused = True
        self._gate()
        if mode == "abort":
            await self.abort()
        elif mode == "wait":
            tasks = [
                inflight.task for inflight in self._inflight.values() if inflight.flow is not None and inflight.task
            ]
            if tasks:
                await asyncio.wait(tasks)
        else:
            self._kept = True
            for inflight in self._inflight.values():
                inflight.freeze()
            try:
                await self._client.pause("keep", clear_cache=False)
            except BaseException:
                self._let_go()
                raise
            await self._streams.flush()
        self._timing.break_off()

    async def resume(self) -> None:
        self._traits()
        if self._kept:
            await self._client.resume()
        self._let_go()

    async def stage(self, manifest: bytes) -> StageAnswer:
        return await self._updates.stage(manifest, self._traits())

    async def commit(self, version: int) -> CommitAnswer:
        return await self._serve(version, self._updates.commit)

    async def rollback(self, version: int) -> CommitAnswer:
        return await self._serve(version, self._updates.rollback)

    async def _serve(self, version: int, change: Callable[[int, Traits, int], Awaitable[CommitAnswer]]) -> CommitAnswer:
        again = self._updates.serves(version)
        report = await change(version, self._traits(), len(self._inflight))
        if not again:
            self._commits += 1
            self._timing.commit()
        return report

    async def weights_digest(self) -> str:
        self._traits()
        return await self._updates.digest()

    def status(self) -> EngineStatus:
        running = sum(inflight.running for inflight in self._inflight.values())
        asked = sum(inflight.request.n for inflight in self._inflight.values() if not inflight.ended)
        return EngineStatus(
            name="http",
            policy_version=self.policy_version,
            running=running,
            waiting=max(0, asked - running),
            paused=self._paused,
            tokens_generated=self._timing.tokens,
            commits=self._commits,
            stalls_ms=self._timing.stalls_ms(),
            failure="not started" if self._watching is None else self._health.failure,
            staged_version=self._updates.staged_version,
        )

    async def close(self) -> None:
        """Close all connections; requests that are still open end with NotReadyError."""
        self._fail_all(NotReadyError("the engine is closing", "send the request to another server"))
        tasks = [task for task in (self._watching, *self._tails) if task is not None]
        self._watching = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()

    async def _run(self, inflight: InflightRequest) -> None:
        """Send the request and pass its deltas on; a failure reaches its reader as an error."""
        try:
            await self._open.wait()
            self._health.check()
            inflight.flow = flow = Flow(inflight.request, self._health.version, self._health.known, self._health.older)
            try:
                await self._generate(inflight, flow)
            except EngineLostError:
                # A kept connection that the engine had closed: nothing was sampled, so nothing is sampled twice.
                if flow.tokens or inflight.ended:
                    raise
                await self._generate(inflight, flow)
        except RollmeshError as error:
            self._fail(inflight, error)
        except Exception as error:  # noqa: BLE001 - a bug: said with its traceback, and its reader must not wait for ever
            _log.exception("engine request failed", request=inflight.request.request_id)
            self._fail(
                inflight, RollmeshError(f"request {inflight.request.request_id} failed ({error!r})", "see the log")
            )

    async def _generate(self, inflight: InflightRequest, flow: Flow) -> None:
        traits, request = self._traits(), inflight.request
        body = generate_body(
            request,
            name=f"{request.request_id[:200]}-{secrets.token_hex(4)}",
            limit=min(request.sampling.max_tokens, traits.max_model_len - len(request.prompt_token_ids)),
            ours=traits.ours,
            vocabulary=self._vocabulary,
            eos_token_ids=self.eos_token_ids,
        )
        whole = request.prompt_logprobs
        answer = self._client.generate_whole(body, ours=traits.ours) if whole else self._client.generate(body)
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as limit, aclosing(answer) as chunks:
                async for chunk in chunks:
                    before = flow.tokens
                    inflight.put(flow.take(chunk))
                    self._timing.step(time.monotonic(), flow.tokens - before)
                    if flow.ended and not inflight.ended:
                        inflight.ended = True
                        limit.reschedule(asyncio.get_running_loop().time() + _TAIL_S)
        if not flow.ended:
            raise EngineLostError(f"the engine at {self._client.url} ended a stream early", "send the request again")

    async def _end(self, inflight: InflightRequest) -> None:
        """Close the connection, unless only the end-of-stream event is still due."""
        task = inflight.task
        assert task is not None
        if not self._inflight:
            self._timing.break_off()
        if inflight.flow is not None and inflight.flow.ended and inflight.ended and not task.done():
            self._tails.add(task)
            task.add_done_callback(self._tails.discard)
            return
        task.cancel()
        await asyncio.wait({task})

    def _fail(self, inflight: InflightRequest, error: RollmeshError) -> None:
        if isinstance(error, EngineLostError):
            self._watch.lose(error)
        elif isinstance(error, OtherWeightsError) and self._health.failure is None:
            self._health.estrange(error.what)
        if not inflight.ended:
            inflight.fail(error)

    def _fail_all(self, error: RollmeshError) -> None:
        for inflight in list(self._inflight.values()):
            if not inflight.ended:
                inflight.fail(error)

    async def _stand_still(self) -> int:
        """Abort all requests that were sent, and queue new ones."""
        self._committing = True
        self._gate()
        sent = [name for name, inflight in self._inflight.items() if inflight.flow is not None]
        return await self.abort(sent)

    def _go_on(self) -> None:
        self._committing = False
        self._gate()

    def _gate(self) -> None:
        if self._paused or self._committing:
            self._open.clear()
        else:
            self._open.set()

    def _let_go(self) -> None:
        self._paused = self._kept = False
        self._gate()
        for inflight in self._inflight.values():
            inflight.thaw()

    async def _met_again(self) -> None:
        """The engine was restarted: it has forgotten the staged version and a pause."""
        self._updates.forget()
        if self._kept:
            await self._client.pause("keep", clear_cache=False)

    def _traits(self) -> Traits:
        if self._watch.traits is None:
            raise NotReadyError("the engine is not started", "wait until the server is ready")
        return self._watch.traits


class InflightRequest:
    """A request in flight: the tokens received for it, its reader's stream, and the task that reads from the engine.

    `flow` is None until the request may be sent. `ended`: its reader has, or will have, the last delta or an error.
    """

    def __init__(self, request: GenerationRequest, stream: DeltaStream) -> None:
        self.request = request
        self.flow: Flow | None = None
        self.task: asyncio.Task[None] | None = None
        self.ended = False
        self._stream = stream
        self._thawed = asyncio.Event()
        self._thawed.set()

    @property
    def running(self) -> int:
        """Samples being generated."""
        return 0 if self.flow is None or self.ended else self.flow.begun

    def put(self, deltas: Iterable[GenerationDelta]) -> None:
        for delta in deltas:
            self._stream.put(delta)

    def abort(self) -> None:
        """End it with the tokens received. What the engine sampled and has not sent yet was never seen by anybody."""
        flow = self.flow or Flow(self.request, 0, ())
        self.ended = True
        self.put(flow.abort())
        if self.task is not None:
            self.task.cancel()
        self.thaw()

    def fail(self, error: RollmeshError) -> None:
        """End it with `error`, once its reader has the deltas received before."""
        self.ended = True
        self._stream.fail(error)
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()
        self.thaw()

    def freeze(self) -> None:
        """Deltas that still arrive are passed on after `thaw`."""
        if not self.ended:
            self._thawed.clear()

    def thaw(self) -> None:
        self._thawed.set()

    async def thawed(self) -> None:
        await self._thawed.wait()

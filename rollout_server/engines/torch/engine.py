"""The torch engine: streams of deltas in front of an engine core, which decodes in this process or in one of its own.

The reference that the tests compare against, and what runs where vLLM is not installed.

    TorchEngine (event loop) ─ DeltaStreams ◄── outcomes ── Core:  EngineCore   in this process (`core`)
          generate ── submit ───────────────────────────►         CoreProcess  in one of its own (`process.client`)

A rollout server's core has a process of its own: its decode steps and the server's calls would contend for one
interpreter's lock. This module imports no torch, so neither does the server.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

import msgspec
import structlog

from rollout_server.engines.base import (
    EngineStatus,
    GenerationDelta,
    GenerationRequest,
    Outcome,
)
from rollout_server.engines.request_check import check_request
from rollout_server.engines.streams import DeltaStreams
from services.wire.errors import NotReadyError, RollmeshError
from services.wire.sampling import KvPolicy
from services.wire.weights_api import CommitAnswer, PauseMode, StageAnswer

_log = structlog.get_logger()

FIRST_VERSION = 0
NOT_STARTED = EngineStatus("torch", FIRST_VERSION, 0, 0, False, 0, 0, failure="not started")


class CoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a core is made of. `model`: folder; `dtype`: `float32`, `bfloat16` or `float16`.

    `transport`: `auto`, `nixl` or `shm`; `threads`: torch's, for decoding. `weights_key`: manifests must bear its
    signature (None: any is taken). `file_root`: the folder that weight files may be read from. `keep_experts`: which
    experts a mixture chooses is told of requests that ask for it. `adapter`: rank and targets of the adapters that versions
    are; None: they are whole weights.
    """

    model: str
    run_id: str
    dtype: str
    max_running: int
    threads: int
    transport: str
    seed: int
    kv_policy: KvPolicy = "keep"
    weights_key: str | None = None
    file_root: str | None = None
    trust_remote_code: bool = False
    keep_experts: bool = False
    adapter: tuple[int, str | list[str]] | None = None


class Loaded(msgspec.Struct, frozen=True):
    """What a core found in its folder. `outputs`: how many tokens it has logits for, at most `vocabulary`."""

    vocabulary: int
    outputs: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]


class Outcomes(Protocol):
    """Who takes what a core generates. Called on the event loop."""

    def deliver(self, outcomes: Sequence[Outcome]) -> None: ...

    def fail_all(self, error: RollmeshError) -> None:
        """The core generates nothing any more."""
        ...


class Core(Protocol):
    """Decodes requests and serves weights; the methods that `Engine` has do what is said there."""

    @property
    def policy_version(self) -> int: ...

    def preload(self) -> None:
        """Do what can be done before the folder is complete. Blocks."""
        ...

    async def start(self, outcomes: Outcomes) -> Loaded:
        """Load the model and be ready. Raises RollmeshError, saying why, if it cannot."""
        ...

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request that was checked. Raises EngineCrashedError, NotReadyError."""
        ...

    def drop(self, request_id: str) -> None:
        """Abort a request that nobody listens to any more."""
        ...

    async def abort(self, request_ids: list[str] | None) -> int: ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def stage(self, manifest: bytes) -> StageAnswer: ...

    async def commit(self, version: int) -> CommitAnswer: ...

    async def rollback(self, version: int) -> CommitAnswer: ...

    async def weights_digest(self) -> str: ...

    def status(self) -> EngineStatus: ...

    async def close(self) -> None: ...


class TorchEngine:
    """See `rollout_server.engines.base.Engine`.

    It serves the folder's weights as version 0. `weights_digest` before the first commit is that of these, in the layout
    of the model's own parameters.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._streams = DeltaStreams()
        self._loaded: Loaded | None = None

    @property
    def policy_version(self) -> int:
        return self._core.policy_version

    @property
    def max_model_len(self) -> int:
        return 0 if self._loaded is None else self._loaded.max_model_len

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return () if self._loaded is None else self._loaded.eos_token_ids

    def preload(self) -> None:
        """Begin with what needs no complete model folder: imports, the transport. Blocks."""
        self._core.preload()

    async def start(self) -> None:
        """Load the model, rehearse its decoding and decode from now on. Raises UsageError if it cannot be served."""
        self._loaded = await self._core.start(self._streams)
        _log.info("engine_ready", engine="torch", max_model_len=self.max_model_len)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationDelta]:
        self._check(request)
        with self._streams.open(request.request_id, request.gather_s) as stream:
            left = request.n
            try:
                self._core.submit(request)
                while left:
                    for delta in await stream.next():
                        if delta.finish_reason is not None:
                            left -= 1
                        yield delta
            finally:
                if left:
                    self._core.drop(request.request_id)

    async def abort(self, request_ids: list[str] | None = None) -> int:
        return await self._core.abort(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        await self._core.pause(mode)
        if mode == "keep":
            await self._streams.flush()

    async def resume(self) -> None:
        await self._core.resume()

    async def stage(self, manifest: bytes) -> StageAnswer:
        return await self._core.stage(manifest)

    async def commit(self, version: int) -> CommitAnswer:
        return await self._core.commit(version)

    async def rollback(self, version: int) -> CommitAnswer:
        return await self._core.rollback(version)

    async def weights_digest(self) -> str:
        return await self._core.weights_digest()

    def status(self) -> EngineStatus:
        return self._core.status()

    async def close(self) -> None:
        """Stop decoding; requests that are still open end with NotReadyError. Raises DeadlineError if a step hangs."""
        self._streams.fail_all(NotReadyError("the engine is closing", "send the request to another server"))
        await self._core.close()

    def _check(self, request: GenerationRequest) -> None:
        loaded = self._loaded
        if loaded is None:
            raise NotReadyError("the engine is not started", "wait until the server is ready")
        # A model may read more tokens than it has logits for.
        vocabulary = min(loaded.vocabulary, loaded.outputs) if request.prompt_logprobs else loaded.vocabulary
        check_request(
            request, max_model_len=loaded.max_model_len, vocabulary=vocabulary, eos_token_ids=loaded.eos_token_ids
        )

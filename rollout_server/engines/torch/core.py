"""The engine core: a model decoded in continuous batches with a KV cache, and the weights that it is given meanwhile.

EngineCore (event loop)           DecodeLoop (thread)        Scheduler ─ KvCache ─ PolicyForward ─ Sampler
                                                                                    └ Decoder (`load_decoder`)
  submit ────────────────────────────► inbox ─────────────────► add
  stage ──► Receiver (weight threads; small ones here) ──► shadow memory
  commit ────────────────────────────► inbox ──between two steps──► Receiver.commit ──► ModelWeights.flip
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog
import torch

from rollout_server.engines.base import EngineStatus, GenerationRequest
from rollout_server.engines.torch.adapters import MergedAdapters
from rollout_server.engines.torch.decode_loop import DecodeLoop
from rollout_server.engines.torch.decoder import Decoder
from rollout_server.engines.torch.engine import FIRST_VERSION, NOT_STARTED, CoreSettings, Loaded, Outcomes
from rollout_server.engines.torch.forward import PolicyForward
from rollout_server.engines.torch.kv_cache import KvCache
from rollout_server.engines.torch.llama import read_llama
from rollout_server.engines.torch.llama_config import is_llama
from rollout_server.engines.torch.sampler import Sampler
from rollout_server.engines.torch.scheduler import Scheduler
from services.host.process import heavy_imports
from services.host.run_folder import is_complete
from services.wire.errors import NotReadyError, UsageError
from services.wire.weights_api import CommitAnswer, PauseMode, StageAnswer
from weight_bus.manifest.adapter import AdapterPlan, Base
from weight_bus.manifest.manifest import decode_manifest
from weight_bus.memory.throttle import background_threads
from weight_bus.receiver.receiver import Receiver
from weight_bus.transports.base import Reader
from weight_bus.transports.device_choice import reading_memory
from weight_bus.transports.select import make_readers

_log = structlog.get_logger()
_Result = TypeVar("_Result")

_CLOSE_DEADLINE_S = 30.0
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class EngineCore:
    """See `rollout_server.engines.torch.engine.Core`. Raises UsageError, when made, for a dtype that is not served."""

    def __init__(self, settings: CoreSettings) -> None:
        if settings.dtype not in _DTYPES:
            raise UsageError(f"weights of dtype {settings.dtype!r} cannot be served", f"known: {', '.join(_DTYPES)}")
        self._settings = settings
        self._folder = Path(settings.model)
        self._dtype = _DTYPES[settings.dtype]
        self._weight_threads: ThreadPoolExecutor | None = None
        self._readers: list[Reader] | None = None
        self._receiver: Receiver | None = None
        self._base: Base | None = None
        self._decode: DecodeLoop | None = None

    @property
    def policy_version(self) -> int:
        return FIRST_VERSION if self._decode is None else self._decode.version

    def preload(self) -> None:
        """Set the transport up, and import what the folder's model needs, where it is there to be seen. Blocks."""
        if self._readers is not None:
            return
        self._readers = self._make_readers()
        torch.set_num_threads(self._settings.threads)
        if is_complete(self._folder) and not is_llama(self._folder):
            import rollout_server.engines.torch.transformers_decoder  # noqa: F401

    async def start(self, outcomes: Outcomes) -> Loaded:
        """Load the model, rehearse its decoding and start the decode thread. Raises UsageError if it cannot be served."""
        batch, self._receiver, loaded = await asyncio.to_thread(self._load)
        self._weight_threads = background_threads("weights")
        if self._base is not None:
            # Before the first version asks.
            self._weight_threads.submit(self._base.know)
        self._decode = DecodeLoop(
            batch,
            version=FIRST_VERSION,
            threads=self._settings.threads,
            deliver=outcomes.deliver,
            on_crash=outcomes.fail_all,
        )
        self._decode.start()
        return loaded

    def submit(self, request: GenerationRequest) -> None:
        self._running().submit(request)

    def drop(self, request_id: str) -> None:
        self._running().drop(request_id)

    async def abort(self, request_ids: list[str] | None) -> int:
        return await self._running().abort(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        decode = self._running()
        if mode == "abort":
            await decode.abort_and_freeze()
        elif mode == "wait":
            await decode.drain()
        else:
            await decode.freeze()

    async def resume(self) -> None:
        await self._running().resume()

    async def stage(self, manifest: bytes) -> StageAnswer:
        receiver, _ = self._weights()
        decoded = decode_manifest(manifest)
        staged = receiver.stage_at_once(decoded)
        if staged is None:
            staged = await self._on_weight_thread(lambda: receiver.stage(decoded))
        return staged

    async def commit(self, version: int) -> CommitAnswer:
        receiver, _ = self._weights()
        return await self._serve(version, lambda: receiver.commit(version))

    async def rollback(self, version: int) -> CommitAnswer:
        receiver, _ = self._weights()
        return await self._serve(version, lambda: receiver.rollback(version))

    async def _serve(self, version: int, flip: Callable[[], None]) -> CommitAnswer:
        decode = self._running()
        if version == decode.version:
            # Asked again: its answer was lost.
            return CommitAnswer(version, 0.0, decode.running)
        return await decode.commit(version, flip)

    async def weights_digest(self) -> str:
        receiver, _ = self._weights()
        return (await self._on_weight_thread(receiver.digest)).root_digest

    def status(self) -> EngineStatus:
        decode = self._decode
        if decode is None:
            return NOT_STARTED
        return EngineStatus(
            name="torch",
            policy_version=decode.version,
            running=decode.running,
            waiting=decode.waiting,
            paused=decode.paused,
            tokens_generated=decode.tokens,
            commits=decode.commits,
            stalls_ms=decode.stalls_ms(),
            failure=None if decode.failure is None else decode.failure.what,
            prefill_tokens=decode.prefill_tokens,
            staged_version=None if self._receiver is None else self._receiver.staged_version,
            kv_use=decode.kv_use,
        )

    async def close(self) -> None:
        """Stop decoding. Raises DeadlineError if a step hangs."""
        try:
            if self._decode is not None:
                await self._decode.stop(_CLOSE_DEADLINE_S)
        finally:
            if self._weight_threads is not None:
                await asyncio.to_thread(self._weight_threads.shutdown, wait=True, cancel_futures=True)
                self._weight_threads = None
            if self._receiver is not None:
                self._receiver.close()
                self._receiver = None

    async def _on_weight_thread(self, work: Callable[[], _Result]) -> _Result:
        return await asyncio.get_running_loop().run_in_executor(self._weight_threads, work)

    def _running(self) -> DecodeLoop:
        if self._decode is None:
            raise NotReadyError("the engine is not started", "wait until the server is ready")
        return self._decode

    def _weights(self) -> tuple[Receiver, DecodeLoop]:
        if self._receiver is None:
            raise NotReadyError("the engine is not started or has been closed", "wait until the server is ready")
        return self._receiver, self._running()

    def _make_readers(self) -> list[Reader]:
        root = self._settings.file_root
        transport = self._settings.transport
        device = reading_memory(transport, _device())
        return make_readers(transport, file_root=None if root is None else Path(root), device=device)

    def _load(self) -> tuple[Scheduler, Receiver, Loaded]:
        settings = self._settings
        torch.set_num_threads(settings.threads)
        device = _device()
        decoder = load_decoder(
            self._folder,
            self._dtype,
            device,
            trust_remote_code=settings.trust_remote_code,
            keep_experts=settings.keep_experts,
        )
        forward = PolicyForward(decoder)
        slots = KvCache(forward.shape, max_rows=settings.max_running, dtype=self._dtype, device=device)
        batch = Scheduler(
            forward,
            slots,
            Sampler(settings.seed, decoder.outputs, device),
            max_running=settings.max_running,
            max_model_len=decoder.longest,
            eos_token_ids=decoder.ends,
            vocabulary=decoder.outputs,
            device=device,
            kv_policy=settings.kv_policy,
            experts=decoder.experts,
        )
        readers = self._readers or self._make_readers()
        self._readers = None
        receiver = self._make_receiver(ModelWeights(decoder), readers)
        return batch, receiver, Loaded(decoder.vocabulary, decoder.outputs, decoder.longest, decoder.ends)

    def _make_receiver(self, weights: ModelWeights, readers: list[Reader]) -> Receiver:
        settings = self._settings
        given = (settings.run_id, readers, FIRST_VERSION, settings.weights_key)
        if settings.adapter is None:
            return Receiver(weights, *given)
        plan = AdapterPlan(*settings.adapter, self._folder)
        merged, self._base = MergedAdapters(weights, plan), Base(plan)
        return Receiver(merged, *given, prepare=merged.merge, base=self._base)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def load_decoder(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    *,
    trust_remote_code: bool = False,
    keep_experts: bool = False,
) -> Decoder:
    """The model in `folder`, whose own code is run with `trust_remote_code` alone.

    Raises UsageError where there is none, or one that cannot be decoded here, with its experts kept if they are to be.
    """
    found = None if keep_experts else read_llama(folder, dtype, device)
    if found is not None:
        return found
    _log.info("the model is left to transformers", model=str(folder))
    # Here, so that a server without such a model does not spend 1.6 s of CPU on it.
    with heavy_imports():
        from rollout_server.engines.torch.transformers_decoder import load_transformers
    return load_transformers(folder, dtype, device, trust_remote_code=trust_remote_code, keep_experts=keep_experts)


class ModelWeights:
    """Double-buffered weights of a model: `weight_bus.receiver.receiver.WeightTarget`.

        live     p.data ──► storage A ╲╱ storage B        flip: each parameter changes its storage, nothing is copied
        shadow              storage B ╱╲ storage A

    Tied weights are one parameter with several names: one storage, one flip, named once. Names are those that weights are
    published under, whose tensors may be views into the parameters.
    """

    def __init__(self, decoder: Decoder) -> None:
        self._parameters = dict(decoder.weights.named_parameters())
        self._live = {name: parameter.data for name, parameter in self._parameters.items()}
        # A copy, so that its pages are there before the first version is staged.
        self._shadow = {name: tensor.clone() for name, tensor in self._live.items()}
        self._live_views, self._shadow_views = decoder.published(self._live), decoder.published(self._shadow)

    def live(self) -> Mapping[str, torch.Tensor]:
        """The weights being served."""
        return self._live_views

    def shadow(self) -> Mapping[str, torch.Tensor]:
        """Where the next version goes, with the same names, shapes and dtypes."""
        return self._shadow_views

    def flip(self) -> None:
        """Swap live and shadow, between two steps; a second flip serves the old version again."""
        # The tensors must stay ordinary ones, also when the decode thread flips in its inference mode.
        with torch.inference_mode(False):
            for name, parameter in self._parameters.items():
                parameter.data = self._shadow[name]
        self._live, self._shadow = self._shadow, self._live
        self._live_views, self._shadow_views = self._shadow_views, self._live_views

    def flip_back(self) -> None:
        self.flip()

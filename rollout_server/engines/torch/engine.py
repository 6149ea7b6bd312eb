"""The torch engine: a model decoded in continuous batches with a KV cache.

The reference that the tests compare against, and what runs where vLLM is not installed.

    TorchEngine (event loop)          DecodeLoop (thread)        Scheduler ─ KvCache ─ PolicyForward ─ Sampler
                                                                                        └ Decoder (`load_decoder`)
      generate ──submit──────────────────► inbox ─────────────────► add
      stage ──► Receiver (weight threads; small ones here) ──► shadow memory
      commit ────────────────────────────► inbox ──between two steps──► Receiver.commit ──► ModelWeights.flip
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import structlog
import torch

from rollout_server.engines.base import EngineStatus, GenerationDelta, GenerationRequest
from rollout_server.engines.request_check import check_request
from rollout_server.engines.streams import DeltaStreams
from rollout_server.engines.torch.decode_loop import DecodeLoop
from rollout_server.engines.torch.decoder import Decoder
from rollout_server.engines.torch.forward import PolicyForward
from rollout_server.engines.torch.kv_cache import KvCache
from rollout_server.engines.torch.llama import read_llama
from rollout_server.engines.torch.llama_config import is_llama
from rollout_server.engines.torch.sampler import Sampler
from rollout_server.engines.torch.scheduler import Scheduler
from services.host.process import heavy_imports
from services.host.run_folder import is_complete
from services.wire.errors import NotReadyError, UsageError
from services.wire.sampling import KvPolicy
from services.wire.weights_api import CommitAnswer, PauseMode, StageAnswer
from weight_bus.manifest.manifest import decode_manifest
from weight_bus.memory.throttle import background_threads
from weight_bus.receiver.receiver import Receiver
from weight_bus.transports.base import Reader
from weight_bus.transports.select import make_readers

_log = structlog.get_logger()
_Result = TypeVar("_Result")

FIRST_VERSION = 0
_CLOSE_DEADLINE_S = 30.0
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchEngine:
    """See `rollout_server.engines.base.Engine`. `transport`: `auto`, `nixl` or `shm`; `threads`: torch's, for decoding.
    `weights_key`: manifests must bear its signature (None: any is taken). `file_root`: where weight files may be read from.

    It serves the folder's weights as version 0. `weights_digest` before the first commit is that of these, in the layout
    of the model's own parameters.
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
        trust_remote_code: bool = False,
    ) -> None:
        if dtype not in _DTYPES:
            raise UsageError(f"weights of dtype {dtype!r} cannot be served", f"known: {', '.join(_DTYPES)}")
        self._folder = model
        self._run_id = run_id
        self._dtype = _DTYPES[dtype]
        self._max_running = max_running
        self._threads = threads
        self._transport = transport
        self._seed = seed
        self._kv_policy: KvPolicy = kv_policy
        self._weights_key = weights_key
        self._file_root = file_root
        self._trust_remote_code = trust_remote_code
        self._streams = DeltaStreams()
        self._weight_threads: ThreadPoolExecutor | None = None
        self._readers: list[Reader] | None = None
        self._receiver: Receiver | None = None
        self._decode: DecodeLoop | None = None
        self._vocabulary = self._outputs = 0
        self.max_model_len = 0
        self.eos_token_ids: tuple[int, ...] = ()

    @property
    def policy_version(self) -> int:
        return FIRST_VERSION if self._decode is None else self._decode.version

    def preload(self) -> None:
        """Set the transport up, and import what the folder's model needs, where it is there to be seen. Blocks."""
        if self._readers is not None:
            return
        self._readers = make_readers(self._transport, file_root=self._file_root)
        torch.set_num_threads(self._threads)
        if is_complete(self._folder) and not is_llama(self._folder):
            import rollout_server.engines.torch.transformers_decoder  # noqa: F401

    async def start(self) -> None:
        """Load the model, rehearse its decoding and start the decode thread. Raises UsageError if it cannot be served."""
        batch, self._receiver = await asyncio.to_thread(self._load)
        self._weight_threads = background_threads("weights")
        self._decode = DecodeLoop(
            batch,
            version=FIRST_VERSION,
            threads=self._threads,
            deliver=self._streams.deliver,
            on_crash=self._streams.fail_all,
        )
        self._decode.start()
        _log.info("engine_ready", engine="torch", model=str(self._folder), max_model_len=self.max_model_len)

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationDelta]:
        decode = self._running()
        self._check(request)
        with self._streams.open(request.request_id, request.gather_s) as stream:
            left = request.n
            try:
                decode.submit(request)
                while left:
                    for delta in await stream.next():
                        if delta.finish_reason is not None:
                            left -= 1
                        yield delta
            finally:
                if left:
                    decode.drop(request.request_id)

    async def abort(self, request_ids: list[str] | None = None) -> int:
        return await self._running().abort(request_ids)

    async def pause(self, mode: PauseMode) -> None:
        decode = self._running()
        if mode == "abort":
            await decode.abort_and_freeze()
        elif mode == "wait":
            await decode.drain()
        else:
            await decode.freeze()
            await self._streams.flush()

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
            return EngineStatus("torch", FIRST_VERSION, 0, 0, False, 0, 0, failure="not started")
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
        )

    async def close(self) -> None:
        """Stop decoding; requests that are still open end with NotReadyError. Raises DeadlineError if a step hangs."""
        self._streams.fail_all(NotReadyError("the engine is closing", "send the request to another server"))
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

    def _check(self, request: GenerationRequest) -> None:
        # A model may read more tokens than it has logits for.
        vocabulary = min(self._vocabulary, self._outputs) if request.prompt_logprobs else self._vocabulary
        check_request(
            request, max_model_len=self.max_model_len, vocabulary=vocabulary, eos_token_ids=self.eos_token_ids
        )

    def _load(self) -> tuple[Scheduler, Receiver]:
        torch.set_num_threads(self._threads)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        decoder = load_decoder(self._folder, self._dtype, device, trust_remote_code=self._trust_remote_code)
        self._vocabulary, self._outputs = decoder.vocabulary, decoder.outputs
        self.max_model_len, self.eos_token_ids = decoder.longest, decoder.ends
        forward = PolicyForward(decoder)
        slots = KvCache(forward.shape, max_rows=self._max_running, dtype=self._dtype, device=device)
        batch = Scheduler(
            forward,
            slots,
            Sampler(self._seed, decoder.outputs, device),
            max_running=self._max_running,
            max_model_len=self.max_model_len,
            eos_token_ids=self.eos_token_ids,
            vocabulary=decoder.outputs,
            device=device,
            kv_policy=self._kv_policy,
        )
        readers = self._readers or make_readers(self._transport, file_root=self._file_root)
        self._readers = None
        receiver = Receiver(ModelWeights(decoder), self._run_id, readers, FIRST_VERSION, self._weights_key)
        return batch, receiver


def load_decoder(folder: Path, dtype: torch.dtype, device: torch.device, *, trust_remote_code: bool = False) -> Decoder:
    """The model in `folder`, whose own code is run with `trust_remote_code` alone.

    Raises UsageError where there is none, or one that cannot be decoded here.
    """
    found = read_llama(folder, dtype, device)
    if found is not None:
        return found
    _log.info("the model is left to transformers", model=str(folder))
    # Here, so that a server without such a model does not spend 1.6 s of CPU on it.
    with heavy_imports():
        from rollout_server.engines.torch.transformers_decoder import load_transformers
    return load_transformers(folder, dtype, device, trust_remote_code=trust_remote_code)


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

"""vLLM worker extension: runs the weight receiver in the worker, where the weights are.

vLLM mixes this class into its own worker class; methods are reached by name through `collective_rpc`. Replies are bytes
(`weight_bus.vllm.protocol`). Staging and hashing run on threads of their own, so that decoding goes on; a flip runs on
the thread that decodes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch

from services.policies.training.deadlines import within
from services.wire.errors import ConflictError
from services.wire.weights_api import CommitAnswer
from weight_bus.manifest.adapter import AdapterPlan
from weight_bus.manifest.manifest import decode_manifest
from weight_bus.receiver.rank_sharing import SHARING_LEAST_S, RankSharing
from weight_bus.receiver.receiver import Receiver
from weight_bus.vllm.adapters import open_slot, slot_bytes
from weight_bus.vllm.protocol import (
    SHADOW,
    Attached,
    Committed,
    Digest,
    Done,
    Reply,
    Staged,
    encode_reply,
    failure,
)
from weight_bus.vllm.quantised import quantised_layers, quantising_bytes
from weight_bus.vllm.routing import tell_experts
from weight_bus.vllm.sets import shadow_mode, update_bytes
from weight_bus.vllm.slots.attachment import Attachment

_REMEMBERED = 8
_log = structlog.get_logger()


class RollmeshWorker:
    """Mixed into vLLM's worker. It has no constructor; the first three attributes are the worker's."""

    model_runner: Any
    rank: int
    vllm_config: Any
    rollmesh_attachments: dict[int, Attachment] | None = None
    """By their slots."""
    rollmesh_work: dict[int, Future[bytes]] | None = None

    def rollmesh_update_bytes(self) -> int:
        """Bytes that an attachment will hold beside the weights that are served."""
        model = self.model_runner.get_model()
        if self.vllm_config.lora_config is not None:
            return slot_bytes(model)
        parameters = dict(model.named_parameters())
        sets = update_bytes(parameters, shadow_mode(os.environ.get(SHADOW, "device")))
        return sets + quantising_bytes(quantised_layers(model))

    def rollmesh_attach(
        self,
        run_id: str,
        transport: str,
        key: str | None = None,
        file_root: str | None = None,
        shared: str | None = None,
        adapter: tuple[int, str | list[str]] | None = None,
        experts: bool = False,
        slot: int = 1,
    ) -> bytes:
        """Build the views and start the readers. Called once for each run, before its first request. `shared`: memory of
        all ranks; `adapter`: rank and targets of the adapters that are served, None: whole weights are; `experts`:
        whether samples tell which experts were chosen."""

        def attach() -> Reply:
            if self.rollmesh_attachments is None:
                keep_seeds_of_unfinished_prompts(self.model_runner)
                if experts:
                    tell_experts(self.model_runner)
                self.rollmesh_attachments = {}
            model, sharing, plan, place = self.model_runner.get_model(), self._sharing(shared), None, 0
            if adapter is not None:
                plan = AdapterPlan(*adapter, Path(self.vllm_config.model_config.model))
                place = open_slot(self.model_runner, plan.rank, slot)
            attached = Attachment.on(model, run_id, transport, key, file_root, sharing, plan, place, fixed=True)
            self.rollmesh_attachments[slot] = attached
            tensors = attached.weights.shadow().values()
            return Attached(tensors=len(tensors), total_bytes=sum(tensor.nbytes for tensor in tensors))

        return _reply(attach)

    def _sharing(self, path: str | None) -> RankSharing | None:
        if path is None:
            return None
        try:
            # A rank may still pack, or quantise, a version that was superseded.
            total = sum(parameter.nbytes for parameter in self.model_runner.get_model().parameters())
            deadline_s = within(SHARING_LEAST_S, total)
            return RankSharing(Path(path), self.rank, self.vllm_config.parallel_config.world_size, deadline_s)
        except OSError as error:
            # As on another host: the ranks see that not all are here, and each reads everything.
            _log.warning("this rank reads all bytes of an update", rank=self.rank, why=str(error))
            return None

    def rollmesh_detach(self, slot: int) -> bytes:
        """A run of several has ended."""

        def detach() -> Reply:
            self._attached(slot).detach()
            del (self.rollmesh_attachments or {})[slot]
            return Done()

        return _reply(detach)

    def rollmesh_stage(self, manifest: bytes, call: int, slot: int) -> Future[bytes]:
        """Pull a version into shadow memory on a thread; the future holds the reply. `call`: the same on all ranks."""

        def stage() -> Reply:
            return Staged(result=self._attached(slot).receiver.result().stage(decode_manifest(manifest), call))

        return self._attached(slot).threads.submit(_reply, stage)

    def rollmesh_digest(self, slot: int) -> Future[bytes]:
        """Hash what is really served, on a thread."""

        def hashed() -> Reply:
            return Digest(result=self._attached(slot).digest())

        return self._attached(slot).threads.submit(_reply, hashed)

    def rollmesh_start(self, ticket: int, method: str, arguments: tuple[Any, ...]) -> None:
        """Begin `rollmesh_stage` or `rollmesh_digest` where futures cannot be sent; `rollmesh_poll` asks for the answer."""
        if self.rollmesh_work is None:
            self.rollmesh_work = {}
        self.rollmesh_work[ticket] = getattr(self, method)(*arguments)
        while len(self.rollmesh_work) > _REMEMBERED * max(1, len(self.rollmesh_attachments or ())):
            del self.rollmesh_work[min(self.rollmesh_work)]

    def rollmesh_poll(self, ticket: int) -> bytes:
        """The reply; empty while the work goes on."""
        work = (self.rollmesh_work or {}).get(ticket)
        if work is None:
            return encode_reply(failure(ConflictError(f"no work {ticket} is known here", "begin again")))
        return work.result() if work.done() else b""

    def rollmesh_flip(self, version: int, running: int, slot: int) -> bytes:
        """Serve the staged `version` from the next step on."""
        return self._serve(version, running, slot, lambda receiver: receiver.commit(version))

    def rollmesh_flip_back(self, version: int, running: int, slot: int) -> bytes:
        """Serve `version` again from the next step on, which was served before the last flip."""
        return self._serve(version, running, slot, lambda receiver: receiver.rollback(version))

    def rollmesh_unflip(self, version: int, slot: int) -> None:
        """Undo the flip to `version`: another rank refused it."""
        attached = self._attached(slot)
        receiver = attached.served()
        receiver.undo(version)
        attached.flipped(receiver.version)

    def _serve(self, version: int, running: int, slot: int, change: Callable[[Receiver], None]) -> bytes:
        def serve() -> Reply:
            attached = self._attached(slot)
            started = time.monotonic()
            change(attached.served())
            attached.flipped(version)
            ended = time.monotonic()
            return Committed(result=CommitAnswer(version, (ended - started) * 1e3, running), at=ended)

        return _reply(serve)

    def _attached(self, slot: int) -> Attachment:
        attached = (self.rollmesh_attachments or {}).get(slot)
        if attached is None:
            raise ConflictError("the engine core has no receiver yet")
        return attached


def extend_worker(wrapper: Any) -> None:
    """Give a worker the methods of `RollmeshWorker`, where vLLM was started without naming it on its command line."""
    kind = type(wrapper.worker)
    if not issubclass(kind, RollmeshWorker):
        wrapper.worker.__class__ = type(kind.__name__, (kind, RollmeshWorker), {})


def _reply(work: Callable[[], Reply]) -> bytes:
    try:
        return encode_reply(work())
    except Exception as error:  # noqa: BLE001 - crosses a process boundary: raised again, typed, on the other side
        return encode_reply(failure(error))


def keep_seeds_of_unfinished_prompts(runner: Any) -> None:
    """Work around a crash of vLLM 0.32 on CPUs: seeded requests whose prompt is prefilled in chunks. Once for each runner.

        step 1   [ prompt …        samples a token that is discarded: its generator must not advance
        step 2     … rest of it ]  samples the first token

    vLLM rewinds the generator by an offset, which CPU generators do not have ("CPU Generator does not use offset"); that
    ended the engine core. Here such a generator is removed while that step samples.
    """
    if torch.device(runner.device).type != "cpu":
        return
    sample_tokens = runner.sample_tokens

    def sample(*arguments: Any, **named: Any) -> Any:
        seeds: dict[int, torch.Generator] = runner.input_batch.generators
        unfinished = np.flatnonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])
        aside = {int(row): seeds.pop(int(row)) for row in unfinished if int(row) in seeds}
        try:
            return sample_tokens(*arguments, **named)
        finally:
            seeds.update(aside)

    runner.sample_tokens = sample

"""A receiver on a worker's model: of its whole weights, or of one run's adapters beside those of others.

model ── place 0: views · sets · two staging threads · receiver        of run a
      ── place 1: the same                                             of run b
      ── packed copies of the base: made by the first, used by all
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import structlog
import torch

from services.wire.errors import ConflictError
from services.wire.weights_api import DigestAnswer
from weight_bus.manifest.adapter import AdapterPlan, Base
from weight_bus.memory.throttle import background_threads
from weight_bus.receiver.rank_sharing import RankSharing
from weight_bus.receiver.receiver import Receiver
from weight_bus.transports.device_choice import reading_memory
from weight_bus.transports.select import make_readers
from weight_bus.vllm.adapters import VllmAdapters
from weight_bus.vllm.packed.layers import PackedLayers
from weight_bus.vllm.packed.sets import packing
from weight_bus.vllm.protocol import PACKED, SHADOW
from weight_bus.vllm.sets import shadow_mode
from weight_bus.vllm.weights import VllmWeights, check_linears_are_live

_ATTRIBUTE = "rollmesh_attachments"
_log = structlog.get_logger()


class Attachment:
    """A receiver on a worker's model, and its two staging threads: a newer version can supersede one being staged."""

    def __init__(
        self,
        model: torch.nn.Module,
        run_id: str,
        transport: str,
        key: str | None = None,
        file_root: str | None = None,
        sharing: RankSharing | None = None,
        adapter: AdapterPlan | None = None,
        place: int = 0,
        beside: Attachment | None = None,
    ) -> None:
        """`place`: of the adapter's slot in the layers' tensors; `beside`: another run's, on the same base."""
        self.run_id = run_id
        self.fixed = False
        """For the life of the engine; else another run may take its place."""
        self.weights: VllmAdapters | VllmWeights
        prepare: Callable[[int], None]
        packed = packing(os.environ.get(PACKED, "auto"))
        if adapter is None:
            check_linears_are_live(model)
            whole = self.weights = VllmWeights(model, shadow_mode(os.environ.get(SHADOW, "device")), packed=packed)
            storage, prepare = whole.storage, partial(self._prepare, whole)
        else:
            self.weights = VllmAdapters(model, adapter, place)
            storage = {name: parameter.data for name, parameter in model.named_parameters()}
            prepare = self._keep
        self._repacks = adapter is None
        self._packed: PackedLayers | None = None
        if beside is None:
            # It makes layers follow their weights: after the check whether they do.
            alone = isinstance(self.weights, VllmWeights) and self.weights.holds_packed
            if packed == "alone" and not alone:
                _log.warning(
                    "matrices are not held packed alone",
                    why="their dtype or quantisation, adapters or weights.shadow do not allow it",
                )
            self._packed = PackedLayers(model, linears=packed != "off" and not alone)
            self._packed.pack(0, storage)
            self._packed.flip(0)
        self.threads = background_threads("rollmesh-weights")
        base = None if adapter is None else Base(adapter, None if beside is None else beside.base)
        self.base: Base | None = base
        root = None if file_root is None else Path(file_root)
        device = next(model.parameters()).device
        # A NIXL agent takes one to two seconds to start: meanwhile the engine already decodes.
        self.receiver = self.threads.submit(
            lambda: Receiver(
                self.weights,
                run_id,
                make_readers(transport, file_root=root, device=reading_memory(transport, device)),
                key=key,
                prepare=prepare,
                slices=self.weights.slices,
                sharing=sharing,
                base=base,
            )
        )
        if base is not None:
            # Before the first version asks.
            self.threads.submit(base.know)

    def _prepare(self, whole: VllmWeights, version: int) -> None:
        """A version is whole in the shadow."""
        if self._packed is not None:
            self._packed.pack(version, whole.spare)
        self._keep(version)

    def _keep(self, _: int) -> None:
        self.weights.sets.keep()

    def flipped(self, version: int) -> None:
        """The receiver serves `version`: use the copies that were packed of it. An adapter's base stays as it is packed."""
        if self._repacks and self._packed is not None:
            self._packed.flip(version)

    def digest(self) -> DigestAnswer:
        """Of what is really served. Blocks."""
        if isinstance(self.weights, VllmWeights):
            self.weights.check_served()
        return self.receiver.result().digest()

    def served(self) -> Receiver:
        """The receiver. Raises ConflictError until its readers are started: nothing can be staged yet."""
        if not self.receiver.done():
            raise ConflictError("nothing is staged", "the readers are being started")
        return self.receiver.result()

    @classmethod
    def on(
        cls,
        model: torch.nn.Module,
        run_id: str,
        transport: str,
        key: str | None = None,
        file_root: str | None = None,
        sharing: RankSharing | None = None,
        adapter: AdapterPlan | None = None,
        place: int = 0,
        *,
        fixed: bool = False,
    ) -> Attachment:
        """The model's attachment at `place`, made if it has none of this run. Raises ConflictError where another run's is
        `fixed`.

        vLLM's routes and ours share it: both must know of every flip.
        """
        all_of_it: dict[int, Attachment] = model.__dict__.setdefault(_ATTRIBUTE, {})
        found = all_of_it.get(place)
        if found is not None:
            if found.run_id == run_id:
                return found
            if found.fixed:
                raise ConflictError(f"this engine takes manifests of run {found.run_id!r}, not of {run_id!r}")
            found.close()
            found._give_back()
            del all_of_it[place]
        beside = next(iter(all_of_it.values()), None)
        made = cls(model, run_id, transport, key, file_root, sharing, adapter, place, beside)
        made.fixed = fixed
        all_of_it[place] = made
        return made

    def close(self) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        if self._packed is not None:
            self._packed.close()

    def unpack(self) -> None:
        """Let layers multiply by the live weights until the next flip, so that these may be written in place."""
        if self._packed is not None:
            self._packed.unpack()
        if isinstance(self.weights, VllmWeights):
            self.weights.unpack()

    def _give_back(self) -> None:
        """Leave the model as it was before, for the next run's."""
        if self._packed is not None:
            self._packed.give_back()
        if isinstance(self.weights, VllmWeights):
            self.weights.give_back()

    def detach(self) -> None:
        """Stage nothing any more. The base and what is packed of it are other runs', too."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        threading.Thread(target=self._end_readers, name="rollmesh-detach", daemon=True).start()

    def _end_readers(self) -> None:
        # What is being staged is let end first.
        self.threads.shutdown(wait=True)
        if self.receiver.done() and not self.receiver.cancelled() and self.receiver.exception() is None:
            self.receiver.result().close()

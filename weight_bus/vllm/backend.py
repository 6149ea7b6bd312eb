"""vLLM weight transfer backend: vLLM's own update routes accept rollmesh manifests.

    /init_weight_transfer_engine   {"init_info": {"run_id": …, "transport": …}}     readers are started
    /update_weights                {"update_info": {"manifest": base64}}            buckets are pulled into shadow memory
    /finish_weight_update          {"weight_version": "7"}                          flip

vLLM runs each call on the thread that decodes: decoding stops while buckets are pulled, as with vLLM's own backends. A
rollout server with vLLM inside does not have that cost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from services.wire.errors import ConflictError
from weight_bus.manifest.manifest import decode_manifest, manifest_bytes
from weight_bus.vllm.endpoints import file_root, weights_key
from weight_bus.vllm.protocol import BACKEND
from weight_bus.vllm.slots.attachment import Attachment


@dataclass
class ManifestInit(WeightTransferInitInfo):  # type: ignore[misc]
    """`run_id`: the run whose manifests are taken; `transport`: a name that `weight_bus.transports.select` knows."""

    run_id: str
    transport: str = "auto"
    backend: str = BACKEND


@dataclass
class ManifestUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]
    """`manifest`: base64 of an encoded `weight_bus.manifest.manifest.Manifest`."""

    manifest: str


class ManifestTransfer(WeightTransferEngine[ManifestInit, ManifestUpdate]):  # type: ignore[misc]
    """One worker's receiver. Errors reach the caller as the text of an answer with status 500."""

    init_info_cls = ManifestInit
    update_info_cls = ManifestUpdate
    supports_draft_weight_update = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._attached: Attachment | None = None
        self._staged: int | None = None

    def init_transfer_engine(self, init_info: ManifestInit) -> None:
        """Build the views and start the readers, once a run; again it changes nothing.

        Raises ConflictError where the engine has joined the bus of another run.
        """
        self._attached = Attachment.on(self.model, init_info.run_id, init_info.transport, weights_key(), file_root())

    def start_weight_update(self) -> None:
        self._staged = None

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ManifestUpdate) -> None:
        """Stage a version; a later one replaces it. Raises StageError; the old version is served on."""
        if self._attached is None:
            raise ConflictError("no receiver yet", "call /init_weight_transfer_engine first")
        self._staged = None
        manifest = decode_manifest(manifest_bytes(update_info.manifest))
        self._staged = self._attached.receiver.result().stage(manifest).version

    def finish_weight_update(self) -> None:
        """Flip to the staged version. Raises ConflictError with nothing staged."""
        if self._attached is None or self._staged is None:
            raise ConflictError("nothing is staged", "send a manifest through /update_weights first")
        self._attached.receiver.result().commit(self._staged)
        self._attached.flipped(self._staged)
        self._staged = None

    def shutdown(self) -> None:
        attached, self._attached = self._attached, None
        if attached is not None and not attached.fixed:
            attached.close()

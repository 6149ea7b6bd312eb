"""Publishing a folder of safetensors: the bus itself makes the manifest, so that it is useful without our trainer."""

from __future__ import annotations

import asyncio
from pathlib import Path

from services.wire.errors import UsageError
from services.wire.weights_api import PushSnapshot
from weight_bus.coordinator import Coordinator
from weight_bus.manifest import Manifest, encode_manifest
from weight_bus.signing import sign


class Snapshots:
    """`weights_key` signs the manifests."""

    def __init__(self, coordinator: Coordinator, run_id: str, weights_key: str | None) -> None:
        self._coordinator = coordinator
        self._run_id = run_id
        self._weights_key = weights_key
        self._turn = asyncio.Lock()

    async def push(self, order: PushSnapshot) -> tuple[int, bool]:
        """Announce a folder; its version, and whether that is new. Raises UsageError for a folder that holds no model.

        The bytes are hashed once, on a thread; the engines read them from the folder, which must stay as it is until
        the update has settled.
        """
        folder = Path(order.folder)
        if not folder.is_absolute():
            raise UsageError(f"{order.folder!r} is not an absolute path", "engines read the folder by the same name")
        async with self._turn:
            version = self._coordinator.next_version if order.version is None else order.version
            manifest = sign(await asyncio.to_thread(_manifest, folder, self._run_id, version), self._weights_key)
            return version, self._coordinator.announce(manifest, encode_manifest(manifest), hold=order.hold)


def _manifest(folder: Path, run_id: str, version: int) -> Manifest:
    # Hashing needs a library that the bus has no other use for.
    from weight_bus.snapshot import manifest_of_folder

    return manifest_of_folder(folder, run_id, version)

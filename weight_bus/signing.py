"""Whose a manifest is: HMAC-SHA256 with the run's weight key over the manifest's encoding without a signature.

The bus and every receiver check it. A manifest names memory to read and bytes to serve: without the key nobody who can
reach an engine's port can have it serve other weights. A run on loopback may go without.
"""

from __future__ import annotations

import hmac

import msgspec

from weight_bus.errors import SignatureError
from weight_bus.manifest import Manifest, encode_manifest


def sign(manifest: Manifest, key: str | None) -> Manifest:
    """The manifest with the signature of `key`; as it is for None, a run without a key."""
    if key is None:
        return manifest
    return msgspec.structs.replace(manifest, signature=_mac(manifest, key))


def check_signature(manifest: Manifest, key: str | None) -> None:
    """Raise SignatureError unless the manifest bears the signature of `key`. None, a run without a key, takes any."""
    if key is None:
        return
    if not hmac.compare_digest(_mac(manifest, key), manifest.signature):
        found = "bears a wrong signature" if manifest.signature else "is not signed"
        raise SignatureError(
            f"the manifest of version {manifest.version} {found}", "give publisher, bus and engines the same weight key"
        )


def _mac(manifest: Manifest, key: str) -> bytes:
    bare = encode_manifest(msgspec.structs.replace(manifest, signature=b""))
    return hmac.digest(key.encode(), bare, "sha256")

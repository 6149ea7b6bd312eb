"""The manifest: what a policy version is, byte for byte, and where its bytes can be had.

A publisher's arena is one contiguous range of bytes. `Layout` says which tensor lies where in it; buckets cut it into
pieces that are hashed, read and verified one by one:

    arena    |t0 |t1      |t2  |t3                  | … |      tensors, each aligned to 64 bytes
    buckets  |b0          |b1          |b2          | … |      `offset, length, hash`; together they cover the arena

A manifest is published last, when every byte it names is in place; it is never half visible.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from services.wire.errors import WireError

MANIFEST_SCHEMA = 1


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor by its Hugging Face name. `dtype` is torch's name without the prefix (`float32`, `bfloat16`)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class Layout(msgspec.Struct, frozen=True, kw_only=True):
    """Where each tensor lies. `digest` is the blake3 of the entries' canonical encoding: same digest, same layout."""

    tensors: list[TensorEntry]
    total_bytes: int
    digest: str


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """`length` bytes from `offset` of the arena; `hash` is their blake3, hexadecimal."""

    offset: int
    length: int
    hash: str


class NixlSource(msgspec.Struct, frozen=True, kw_only=True, tag="nixl"):
    """The arena as registered memory of a NIXL agent. `address` and `length` are checked before they are used."""

    agent: str
    metadata: bytes
    address: int
    length: int
    device: int


class ShmSource(msgspec.Struct, frozen=True, kw_only=True, tag="shm"):
    """The arena as a file in shared memory on the publisher's host (`host` tells receivers whether it is theirs)."""

    path: str
    length: int
    host: str


Source = NixlSource | ShmSource


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One published policy version. `root_digest` is the blake3 over the bucket hashes in order."""

    schema: int = MANIFEST_SCHEMA
    run_id: str
    version: int
    base_version: int | None = None
    kind: Literal["dense"] = "dense"
    layout: Layout
    buckets: list[Bucket]
    root_digest: str
    sources: list[Source]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    return _encoder.encode(manifest)


def decode_manifest(payload: bytes) -> Manifest:
    """Decode and check. Raises WireError for bytes that are no manifest or whose buckets do not cover the arena."""
    try:
        manifest = _decoder.decode(payload)
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise WireError(f"{len(payload)} bytes are no weight manifest ({error})") from error
    check_manifest(manifest)
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Raise WireError unless buckets cover the arena without gap or overlap and every tensor lies inside it."""
    if manifest.schema != MANIFEST_SCHEMA:
        raise WireError(f"manifest has schema {manifest.schema}, this process reads {MANIFEST_SCHEMA}")
    position = 0
    for bucket in manifest.buckets:
        if bucket.offset != position or bucket.length <= 0:
            raise WireError(f"manifest v{manifest.version}: a bucket starts at {bucket.offset}, expected {position}")
        position += bucket.length
    if position != manifest.layout.total_bytes:
        raise WireError(
            f"manifest v{manifest.version}: buckets cover {position} of {manifest.layout.total_bytes} bytes"
        )
    for tensor in manifest.layout.tensors:
        if tensor.offset < 0 or tensor.nbytes < 0 or tensor.offset + tensor.nbytes > position:
            raise WireError(f"manifest v{manifest.version}: tensor {tensor.name} lies outside the arena")

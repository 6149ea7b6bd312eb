"""The manifest: what a policy version is, byte for byte, and where its bytes can be had.

`Layout` says which tensor lies where in one long range of bytes: the canonical layout, with full shapes. Each publishing
rank is an owner with an arena of its own; where there is more than one, shards say which bytes of which tensor lie in it.
Buckets cut the arenas into pieces that are hashed, read and verified one by one:

    layout     |t0 |t1      |t2  |t3                  | … |      tensors, each aligned to 64 bytes
    owner 0    |t0 |t1, first half |t3, first half    |          `shards`; None: the arena is the whole layout
    owner 1    |t1, second half |t2 |t3, second half  |
    buckets    |b0          |b1          |b2          | … |      `owner, offset, length, hash`; they cover the arenas

A delta is an offer beside the dense bytes: who serves its base may take it, and ends with the same bytes. A manifest is
published last, when every byte it names is in place; it is never half visible. `weight_bus.manifest_check` says which
manifests are sound, `weight_bus.signing` whose they are.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from services.wire.errors import WireError
from weight_bus.manifest_check import check

MANIFEST_SCHEMA = 2


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


class NixlSource(msgspec.Struct, frozen=True, kw_only=True, tag="nixl"):
    """An arena as registered memory of a NIXL agent. `address` and `length` are checked before they are used."""

    agent: str
    metadata: bytes
    address: int
    length: int
    device: int


class ShmSource(msgspec.Struct, frozen=True, kw_only=True, tag="shm"):
    """An arena as a file in shared memory on the publisher's host (`host` tells receivers whether it is theirs)."""

    path: str
    length: int
    host: str


class FileSource(msgspec.Struct, frozen=True, kw_only=True, tag="file"):
    """An arena as `length` bytes from `data_offset` of a safetensors file. `host` as for shared memory; empty: any."""

    path: str
    length: int
    data_offset: int
    host: str


class CollectiveSource(msgspec.Struct, frozen=True, kw_only=True, tag="collective"):
    """An arena that is broadcast to whoever joins `epoch` at the store `host:port`. `backend`: `nccl` or `gloo`."""

    host: str
    port: int
    epoch: int
    backend: str
    length: int


Source = NixlSource | ShmSource | FileSource | CollectiveSource


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """`nbytes` bytes of the layout's tensor number `tensor`, from its byte `tensor_offset`, lie at `offset` of an arena."""

    tensor: int
    tensor_offset: int
    offset: int
    nbytes: int


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """One publishing rank and its arena. `shards` None: the arena is the whole layout. `sources`: any of them serves."""

    total_bytes: int
    sources: list[Source]
    shards: list[Shard] | None = None


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """`length` bytes from `offset` of the arena of owner number `owner`; `hash` is their blake3, hexadecimal."""

    owner: int = 0
    offset: int
    length: int
    hash: str


class DeltaBucket(msgspec.Struct, frozen=True, kw_only=True):
    """How `target_length` bytes from `target_offset` of the canonical layout change: `weight_bus.delta` decodes it.

    The code is `length` bytes from `offset` of the delta's arena; `hash` is their blake3.
    """

    offset: int
    length: int
    hash: str
    target_offset: int
    target_length: int


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What turns the bytes of `base_version`, whose root digest is `base_digest`, into this version's.

    What no bucket targets is unchanged. `total_bytes` is the length of the delta's own arena.
    """

    base_version: int
    base_digest: str
    total_bytes: int
    sources: list[Source]
    buckets: list[DeltaBucket]


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One published policy version.

    `root_digest` is the blake3 over the dense bucket hashes in order: it names the version's bytes, also where a delta
    was taken. `kind` is `delta` where a delta is offered, `base_version` then its base.
    """

    schema: int = MANIFEST_SCHEMA
    run_id: str
    version: int
    kind: Literal["dense", "delta"] = "dense"
    base_version: int | None = None
    layout: Layout
    owners: list[Owner]
    buckets: list[Bucket]
    root_digest: str
    delta: Delta | None = None
    signature: bytes = b""

    @property
    def total_bytes(self) -> int:
        """The dense bytes of all owners' arenas."""
        return sum(owner.total_bytes for owner in self.owners)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Manifest)


def encode_manifest(manifest: Manifest) -> bytes:
    return _encoder.encode(manifest)


def decode_manifest(payload: bytes) -> Manifest:
    """Decode and check. Raises WireError for bytes that are no manifest, or a manifest that is not sound."""
    try:
        manifest = _decoder.decode(payload)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise WireError(f"{len(payload)} bytes are no weight manifest ({error})") from error
    check_manifest(manifest)
    return manifest


def check_manifest(manifest: Manifest) -> None:
    """Raise WireError unless the manifest is of this schema and sound: see `weight_bus.manifest_check`."""
    if manifest.schema != MANIFEST_SCHEMA:
        raise WireError(f"manifest has schema {manifest.schema}, this process reads {MANIFEST_SCHEMA}")
    check(manifest)

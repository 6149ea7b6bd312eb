"""The weight manifest: tensor layout, hashed buckets and sources of one policy version; validation and signature.

`Layout` is the canonical layout: where each tensor, with its full shape, lies in one range of bytes. Buckets cut it into
ranges that are hashed and verified one by one, so that a version's digest does not depend on who publishes which part.
Each publishing rank is an owner with an arena; where there are several, shards say which bytes of which tensor are in it:

    layout     |t0 |t1           |t2  |t3               |      tensors, each aligned to 64 bytes
    buckets    |b0      |b1      |b2      |b3      | … |       `offset, length, hash`; they cover the layout
    owner 0    |t0 |t1, rows 0–7 |t3, columns 0–7 |            `shards`; None: the arena is the whole layout
    owner 1    |t1, rows 8–15 |t2  |t3, columns 8–15 |

A delta is offered beside the dense bytes: an engine that serves its base may take it, and gets the same bytes. A manifest
is published last, when every byte it names is in place.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from typing import Literal

import msgspec

from services.wire.errors import UNDECODABLE, WireError
from services.wire.weights_api import LAST_VERSION, MemoryKind
from weight_bus.errors import SignatureError
from weight_bus.manifest.tiling import Runs, why_not_exact

MANIFEST_SCHEMA = 4


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
    """An arena as registered memory of a NIXL agent. `address` and `length` are checked before they are used.

    `memory`: of the owner's host, or of its GPU number `device`.
    """

    agent: str
    metadata: bytes
    address: int
    length: int
    device: int
    memory: MemoryKind = "DRAM"


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
    """`nbytes` bytes of the layout's tensor number `tensor`, from its byte `tensor_offset`, lie at `offset` of an arena.

    With `run` they are runs of that many bytes: together in the arena, `stride` bytes apart in the tensor. 0: one run.
    """

    tensor: int
    tensor_offset: int
    offset: int
    nbytes: int
    run: int = 0
    stride: int = 0

    @property
    def runs(self) -> tuple[int, int, int]:
        """Bytes of a run, bytes from one to the next, number of runs."""
        return (self.run, self.stride, self.nbytes // self.run) if self.run else (self.nbytes, self.nbytes, 1)


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """One publishing rank and its arena. `shards` None: the arena is the whole layout. `sources`: any of them serves."""

    total_bytes: int
    sources: list[Source]
    shards: list[Shard] | None = None


class Bucket(msgspec.Struct, frozen=True, kw_only=True):
    """`length` bytes from `offset` of the layout; `hash` is their blake3, hexadecimal, padding taken as zeros."""

    offset: int
    length: int
    hash: str


class DeltaBucket(msgspec.Struct, frozen=True, kw_only=True):
    """How `target_length` bytes from `target_offset` of an owner's arena change: `weight_bus.manifest.delta` decodes it.

    The code is `length` bytes from `offset` of the delta's arena; `hash` is their blake3.
    """

    offset: int
    length: int
    hash: str
    target_offset: int
    target_length: int


class DeltaPart(msgspec.Struct, frozen=True, kw_only=True):
    """How one owner's arena changes. `total_bytes` is the length of the codes' own arena; no sources where it is 0."""

    total_bytes: int
    sources: list[Source]
    buckets: list[DeltaBucket]


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What turns the bytes of `base_version`, whose root digest is `base_digest`, into this version's.

    `parts`: one for each owner. What no bucket targets is unchanged.
    """

    base_version: int
    base_digest: str
    parts: list[DeltaPart]

    @property
    def total_bytes(self) -> int:
        """Of all its codes."""
        return sum(part.total_bytes for part in self.parts)


class Adapter(msgspec.Struct, frozen=True, kw_only=True):
    """The layout is that of a low-rank adapter alone (`weight_bus.manifest.adapter`): with the weights of the model folder
    whose digest is `base_digest`, and with no others, it is the version. `alpha / rank` is in B already.
    """

    base_digest: str
    rank: int
    alpha: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """One published policy version.

    `root_digest` is the blake3 over the dense bucket hashes in order: it names the version's bytes, also where a delta
    was taken. `kind` is `delta` where a delta is offered, `base_version` then its base. `adapter`: None where the layout
    is of a whole model's weights.
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
    adapter: Adapter | None = None
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
    """Decode and check. Raises WireError for bytes that are no manifest, or an invalid manifest."""
    try:
        manifest = _decoder.decode(payload)
    except UNDECODABLE as error:
        raise WireError(f"{len(payload)} bytes are no weight manifest ({error})") from error
    check_manifest(manifest)
    return manifest


def manifest_bytes(text: str) -> bytes:
    """The encoded manifest of vLLM's update routes, which carry it as base64. Raises WireError."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise WireError(f"update_info.manifest is no base64 ({error})", "encode the manifest's bytes") from error


_HASH_DIGITS = 64
_HEXADECIMAL = frozenset("0123456789abcdef")


def check_manifest(manifest: Manifest) -> None:
    """Raise WireError, which says what is wrong where, for an invalid manifest; it may come from an attacker.

        layout    every tensor inside it
        owners    one whole arena, or shards: inside their arenas, without overlap, and together every byte of every
                  tensor exactly once
        buckets   by offset, covering the layout without gap or overlap; hashes of 32 bytes
        delta     one part an owner; its buckets cover its arena; their targets ascend inside the owner's without overlap
        adapter   a rank of 1 or more, and a hash of the base

    The receiver checks that the layout's offsets follow from names and shapes, and the root digest from the hashes.
    """
    if manifest.schema != MANIFEST_SCHEMA:
        raise WireError(f"manifest has schema {manifest.schema}, this process reads {MANIFEST_SCHEMA}")
    what = f"manifest v{manifest.version}"
    if manifest.version < 0:
        raise WireError(f"{what}: a version is no negative number")
    if manifest.version > LAST_VERSION:
        raise WireError(f"{what}: no version is higher than {LAST_VERSION}")
    _check_layout(manifest, what)
    _check_coverage(manifest, what)
    _check_buckets(manifest, what)
    delta, base = manifest.delta, manifest.base_version
    if (manifest.kind == "delta") != (delta is not None) or base != (None if delta is None else delta.base_version):
        raise WireError(f"{what}: kind {manifest.kind} and base version {base} contradict the delta it offers")
    if delta is not None:
        _check_delta(manifest, delta, what)
    if manifest.adapter is not None:
        _check_hash(manifest.adapter.base_digest, f"{what}, base of its adapter")
        if manifest.adapter.rank < 1:
            raise WireError(f"{what}: an adapter of rank {manifest.adapter.rank}")


def _check_layout(manifest: Manifest, what: str) -> None:
    total = manifest.layout.total_bytes
    for tensor in manifest.layout.tensors:
        if tensor.offset < 0 or tensor.nbytes < 0 or tensor.offset + tensor.nbytes > total:
            raise WireError(f"{what}: tensor {tensor.name} lies outside the layout's {total} bytes")


def _check_coverage(manifest: Manifest, what: str) -> None:
    """All owners together hold every byte of every tensor exactly once."""
    if not manifest.owners:
        raise WireError(f"{what}: nobody owns its bytes")
    whole = [number for number, owner in enumerate(manifest.owners) if owner.shards is None]
    if whole:
        if len(manifest.owners) > 1:
            raise WireError(f"{what}: owner {whole[0]} holds the whole layout, and there are {len(manifest.owners)}")
        found = manifest.owners[0].total_bytes
        if found != manifest.layout.total_bytes:
            raise WireError(f"{what}: an arena of {found} bytes for a layout of {manifest.layout.total_bytes}")
        return
    for number, owner in enumerate(manifest.owners):
        _check_shards(manifest, owner, f"{what}, owner {number}")
    held: list[list[Runs]] = [[] for _ in manifest.layout.tensors]
    for owner in manifest.owners:
        for shard in owner.shards or ():
            held[shard.tensor].append((shard.tensor_offset, *shard.runs))
    for entry, runs in zip(manifest.layout.tensors, held, strict=True):
        why = why_not_exact(entry.nbytes, runs)
        if why is not None:
            raise WireError(f"{what}: the shards of {entry.name} {why}")


def _check_shards(manifest: Manifest, owner: Owner, what: str) -> None:
    end = 0
    for shard in sorted(owner.shards or (), key=lambda shard: shard.offset):
        if not 0 <= shard.tensor < len(manifest.layout.tensors):
            raise WireError(f"{what}: a shard of tensor {shard.tensor}, of {len(manifest.layout.tensors)}")
        entry = manifest.layout.tensors[shard.tensor]
        if shard.nbytes <= 0 or shard.tensor_offset < 0 or shard.tensor_offset + shard.nbytes > entry.nbytes:
            raise WireError(
                f"{what}: {shard.nbytes} bytes from {shard.tensor_offset} are no shard of {entry.name}, which has "
                f"{entry.nbytes}"
            )
        if shard.run < 0 or (shard.run > 0 and (shard.nbytes % shard.run or shard.stride < shard.run)):
            raise WireError(
                f"{what}: {shard.nbytes} bytes of {entry.name} are no runs of {shard.run}, {shard.stride} apart"
            )
        if shard.offset < end:
            raise WireError(f"{what}: the shard of {entry.name} at {shard.offset} overlaps what ends at {end}")
        end = shard.offset + shard.nbytes
    if end > owner.total_bytes:
        raise WireError(f"{what}: shards end at {end} in an arena of {owner.total_bytes} bytes")


def _check_buckets(manifest: Manifest, what: str) -> None:
    position, end = 0, manifest.layout.total_bytes
    for bucket in manifest.buckets:
        if bucket.offset != position:
            raise WireError(f"{what}: a bucket starts at {bucket.offset}, expected {position}")
        if not 0 < bucket.length <= end - position:
            raise WireError(f"{what}: a bucket of {bucket.length} bytes from {position} leaves the layout")
        _check_hash(bucket.hash, f"{what}, bucket at {bucket.offset}")
        position += bucket.length
    if position != end:
        raise WireError(f"{what}: buckets cover {position} of {end} bytes")


def _check_delta(manifest: Manifest, delta: Delta, what: str) -> None:
    if not 0 <= delta.base_version < manifest.version:
        raise WireError(f"{what}: a delta from version {delta.base_version}, which is not older")
    if len(delta.parts) != len(manifest.owners):
        raise WireError(f"{what}: a delta of {len(delta.parts)} parts for {len(manifest.owners)} owners")
    for part, owner in zip(delta.parts, manifest.owners, strict=True):
        _check_delta_part(part, owner, what)


def _check_delta_part(part: DeltaPart, owner: Owner, what: str) -> None:
    position = target = 0
    for bucket in part.buckets:
        if bucket.offset != position or bucket.length <= 0:
            raise WireError(f"{what}: a delta bucket starts at {bucket.offset}, expected {position}")
        position += bucket.length
        if bucket.target_offset < target or bucket.target_length <= 0:
            raise WireError(f"{what}: a delta bucket targets {bucket.target_offset}, where {target} is already reached")
        target = bucket.target_offset + bucket.target_length
        _check_hash(bucket.hash, f"{what}, delta bucket at {bucket.offset}")
    if position != part.total_bytes:
        raise WireError(f"{what}: delta buckets cover {position} of {part.total_bytes} bytes")
    if target > owner.total_bytes:
        raise WireError(f"{what}: the delta targets byte {target} of an arena of {owner.total_bytes}")


def _check_hash(found: str, what: str) -> None:
    if len(found) != _HASH_DIGITS or not _HEXADECIMAL.issuperset(found):
        raise WireError(f"{what}: {found[:80]!r} is no hash of 32 bytes")


def sign(manifest: Manifest, key: str | None) -> Manifest:
    """The manifest with its HMAC-SHA256 by the run's weight key; unchanged for None, a run without a key.

    The bus and every receiver check it: without the key, nobody who can reach an engine's port can make it serve other
    weights. A run on loopback may have no key.
    """
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

"""Which manifests are sound. Pure: it reads a manifest that may be hostile, and allocates no more than its lists.

    layout    every tensor inside it
    owners    one whole arena, or shards: inside their arenas, no two over each other, and together every byte of every
              tensor exactly once (the coverage proof)
    buckets   by owner and offset, covering each arena without gap or overlap; hashes of 32 bytes
    delta     its buckets cover its arena; their targets ascend inside the layout and never touch each other

Whether the layout's offsets follow from its names and shapes, and whether the root digest follows from the hashes, is
for the receiver to compute.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.wire.errors import WireError

if TYPE_CHECKING:
    from weight_bus.manifest import Delta, Manifest, Owner

_HASH_DIGITS = 64
_HEXADECIMAL = frozenset("0123456789abcdef")


def check(manifest: Manifest) -> None:
    """Raise WireError, which says what is wrong where, for a manifest that is not sound."""
    what = f"manifest v{manifest.version}"
    if manifest.version < 0:
        raise WireError(f"{what}: a version is no negative number")
    _check_layout(manifest, what)
    _check_coverage(manifest, what)
    _check_buckets(manifest, what)
    delta, base = manifest.delta, manifest.base_version
    if (manifest.kind == "delta") != (delta is not None) or base != (None if delta is None else delta.base_version):
        raise WireError(f"{what}: kind {manifest.kind} and base version {base} contradict the delta it offers")
    if delta is not None:
        _check_delta(manifest, delta, what)


def _check_layout(manifest: Manifest, what: str) -> None:
    total = manifest.layout.total_bytes
    for tensor in manifest.layout.tensors:
        if tensor.offset < 0 or tensor.nbytes < 0 or tensor.offset + tensor.nbytes > total:
            raise WireError(f"{what}: tensor {tensor.name} lies outside the layout's {total} bytes")


def _check_coverage(manifest: Manifest, what: str) -> None:
    """The proof that all owners together hold every byte of every tensor exactly once."""
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
    held = sorted(
        (shard.tensor, shard.tensor_offset, shard.nbytes) for owner in manifest.owners for shard in owner.shards or ()
    )
    covered = [0] * len(manifest.layout.tensors)
    for tensor, offset, nbytes in held:
        if offset != covered[tensor]:
            lacks = "lacks" if offset > covered[tensor] else "has twice"
            name = manifest.layout.tensors[tensor].name
            raise WireError(f"{what}: {name} {lacks} bytes between {covered[tensor]} and {offset}")
        covered[tensor] += nbytes
    for entry, end in zip(manifest.layout.tensors, covered, strict=True):
        if end != entry.nbytes:
            raise WireError(f"{what}: the shards of {entry.name} hold {end} of {entry.nbytes} bytes")


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
        if shard.offset < end:
            raise WireError(f"{what}: the shard of {entry.name} at {shard.offset} overlaps what ends at {end}")
        end = shard.offset + shard.nbytes
    if end > owner.total_bytes:
        raise WireError(f"{what}: shards end at {end} in an arena of {owner.total_bytes} bytes")


def _check_buckets(manifest: Manifest, what: str) -> None:
    ends = [owner.total_bytes for owner in manifest.owners]
    number, position = _next_byte(ends, 0, 0)
    for bucket in manifest.buckets:
        if (bucket.owner, bucket.offset) != (number, position):
            raise WireError(
                f"{what}: a bucket starts at {bucket.offset} of owner {bucket.owner}, expected {position} of {number}"
            )
        if not 0 < bucket.length <= (ends[number] if number < len(ends) else 0) - position:
            raise WireError(
                f"{what}: a bucket of {bucket.length} bytes from {position} of owner {number} leaves its arena"
            )
        _check_hash(bucket.hash, f"{what}, bucket at {bucket.offset} of owner {number}")
        number, position = _next_byte(ends, number, position + bucket.length)
    if number != len(ends):
        raise WireError(f"{what}: buckets cover owner {number} up to {position} of {ends[number]} bytes")


def _next_byte(ends: list[int], number: int, position: int) -> tuple[int, int]:
    """The owner and offset where the next bucket begins; an owner without bytes has none."""
    while number < len(ends) and position == ends[number]:
        number, position = number + 1, 0
    return number, position


def _check_delta(manifest: Manifest, delta: Delta, what: str) -> None:
    if not 0 <= delta.base_version < manifest.version:
        raise WireError(f"{what}: a delta from version {delta.base_version}, which is not older")
    position = target = 0
    for bucket in delta.buckets:
        if bucket.offset != position or bucket.length <= 0:
            raise WireError(f"{what}: a delta bucket starts at {bucket.offset}, expected {position}")
        position += bucket.length
        if bucket.target_offset < target or bucket.target_length <= 0:
            raise WireError(f"{what}: a delta bucket targets {bucket.target_offset}, where {target} is already reached")
        target = bucket.target_offset + bucket.target_length
        _check_hash(bucket.hash, f"{what}, delta bucket at {bucket.offset}")
    if position != delta.total_bytes:
        raise WireError(f"{what}: delta buckets cover {position} of {delta.total_bytes} bytes")
    if target > manifest.layout.total_bytes:
        raise WireError(f"{what}: the delta targets byte {target} of a layout of {manifest.layout.total_bytes}")


def _check_hash(found: str, what: str) -> None:
    if len(found) != _HASH_DIGITS or not _HEXADECIMAL.issuperset(found):
        raise WireError(f"{what}: {found[:80]!r} is no hash of 32 bytes")

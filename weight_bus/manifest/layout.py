"""Tensor layout of an arena, its buckets, and the digests (blake3) of both.

    plan_layout   names, shapes, dtype ─► Layout      order as given, aligned to 64 bytes, large ones to mid-page
    plan_buckets  total bytes          ─► ranges      fixed size, the last one shorter
    bucket_pieces range                ─► pieces      which bytes of which tensor lie in it

Padding between tensors is zero, so that the bytes of an arena, and so its digest, follow from the tensors alone. No
torch here: `weight_bus.manifest.tensors` turns ranges into tensors.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import msgspec
from blake3 import blake3

from services.host.process import STREAMED_BYTES
from services.wire.errors import UsageError
from weight_bus.manifest.manifest import Layout, TensorEntry
from weight_bus.memory.arena import PAGE

ALIGNMENT = 64
DEFAULT_BUCKET_BYTES = 16 << 20
ITEM_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


@dataclass(frozen=True)
class Piece:
    """`length` bytes of tensor `tensor` (its index in the layout) from `tensor_offset`, at `bucket_offset` of a bucket."""

    tensor: int
    tensor_offset: int
    bucket_offset: int
    length: int


def plan_layout(shapes: Mapping[str, tuple[int, ...]], dtype: str) -> Layout:
    """Lay tensors of these shapes out in one arena, in the order given, all in the serving `dtype`.

    The same names, shapes, order and dtype give the same digest. Raises UsageError for an unknown dtype or no tensor.
    """
    return plan_mixed_layout({name: (shape, dtype) for name, shape in shapes.items()})


def plan_mixed_layout(tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> Layout:
    """As `plan_layout`, with a dtype for each tensor."""
    if not tensors:
        raise UsageError("there is no tensor to lay out", "give the model's named parameters")
    entries = []
    position = 0
    for name, (shape, dtype) in tensors.items():
        if dtype not in ITEM_BYTES:
            raise UsageError(f"{name}: weights of dtype {dtype!r} cannot be served", f"known: {', '.join(ITEM_BYTES)}")
        nbytes = prod(shape) * ITEM_BYTES[dtype]
        offset = place(position, nbytes)
        entries.append(TensorEntry(name=name, dtype=dtype, shape=tuple(shape), offset=offset, nbytes=nbytes))
        position = offset + nbytes
    total = aligned(position)
    return Layout(tensors=entries, total_bytes=total, digest=_layout_digest(entries, total))


def place(position: int, nbytes: int) -> int:
    """Where a tensor of `nbytes` begins, from `position` on.

    Allocators place large tensors at the beginning of a page; arenas place them in the middle of one, so that copies into
    and out of an arena are free of 4K aliasing (`weight_bus.memory.arena`).
    """
    start = aligned(position)
    return start if nbytes < STREAMED_BYTES else start + (PAGE // 2 - start) % PAGE


def aligned(position: int) -> int:
    """The next multiple of the alignment, 64 bytes."""
    return -(-position // ALIGNMENT) * ALIGNMENT


def plan_buckets(total_bytes: int, bucket_bytes: int) -> list[tuple[int, int]]:
    """`(offset, length)` of consecutive buckets that cover `total_bytes`, each `bucket_bytes` long but the last."""
    if bucket_bytes < 1:
        raise ValueError(f"a bucket needs at least one byte, got {bucket_bytes}")
    return [(offset, min(bucket_bytes, total_bytes - offset)) for offset in range(0, total_bytes, bucket_bytes)]


def bucket_pieces(layout: Layout, offset: int, length: int) -> list[Piece]:
    """The pieces of tensors that lie in `length` bytes from `offset` of the arena, in order; what is left is padding.

    `layout` must come from `plan_layout`: offsets ascend and do not overlap.
    """
    pieces = []
    end = offset + length
    index = max(0, bisect_right(layout.tensors, offset, key=lambda entry: entry.offset) - 1)
    for number in range(index, len(layout.tensors)):
        entry = layout.tensors[number]
        if entry.offset >= end:
            break
        start, stop = max(entry.offset, offset), min(entry.offset + entry.nbytes, end)
        if start < stop:
            pieces.append(Piece(number, start - entry.offset, start - offset, stop - start))
    return pieces


def hash_bytes(data: bytes | bytearray | memoryview, *, threads: int = 1) -> str:
    """blake3 of `data`, hexadecimal. The interpreter lock is released meanwhile."""
    return str(blake3(data, max_threads=threads).hexdigest())


def root_digest(bucket_hashes: Iterable[str]) -> str:
    """The digest that names a version's bytes: blake3 over the bucket hashes (32 raw bytes each) in order."""
    digest = blake3()
    for bucket_hash in bucket_hashes:
        digest.update(bytes.fromhex(bucket_hash))
    return str(digest.hexdigest())


def _layout_digest(entries: list[TensorEntry], total_bytes: int) -> str:
    canonical = [[entry.name, entry.dtype, list(entry.shape), entry.offset, entry.nbytes] for entry in entries]
    return hash_bytes(msgspec.msgpack.encode([canonical, total_bytes]))

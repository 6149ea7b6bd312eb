"""Layouts, buckets and digests: deterministic, aligned, and every byte of every tensor in exactly one bucket."""

from __future__ import annotations

import pytest

pytest.importorskip("blake3")

from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from services.wire.errors import UsageError
from weight_bus.manifest.layout import bucket_pieces, hash_bytes, plan_buckets, plan_layout, root_digest

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=8).map(
    lambda shapes: {f"t{index}": shape for index, shape in enumerate(shapes)}
)


def test_tensors_lie_in_the_order_given_each_on_a_boundary_of_64_bytes() -> None:
    layout = plan_layout({"b": (3,), "a": (4, 5), "c": ()}, "float32")
    assert [(entry.name, entry.offset, entry.nbytes) for entry in layout.tensors] == [
        ("b", 0, 12),
        ("a", 64, 80),
        ("c", 192, 4),
    ]
    assert layout.total_bytes == 256


def test_the_digest_names_names_shapes_order_and_dtype() -> None:
    base = plan_layout({"a": (4, 5), "b": (3,)}, "float32").digest
    assert plan_layout({"a": (4, 5), "b": (3,)}, "float32").digest == base
    others = [
        plan_layout({"b": (3,), "a": (4, 5)}, "float32"),
        plan_layout({"a": (5, 4), "b": (3,)}, "float32"),
        plan_layout({"a": (4, 5), "b": (3,)}, "bfloat16"),
        plan_layout({"a": (4, 5), "B": (3,)}, "float32"),
    ]
    assert len({base, *(layout.digest for layout in others)}) == 5


@given(shapes=SHAPES, bucket_bytes=st.integers(1, 700), dtype=st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]))
def test_every_byte_of_every_tensor_lies_in_exactly_one_bucket(
    shapes: dict[str, tuple[int, ...]], bucket_bytes: int, dtype: str
) -> None:
    layout = plan_layout(shapes, dtype)
    found: dict[int, list[tuple[int, int]]] = {index: [] for index in range(len(shapes))}
    position = 0
    for offset, length in plan_buckets(layout.total_bytes, bucket_bytes):
        assert offset == position
        position += length
        for piece in bucket_pieces(layout, offset, length):
            entry = layout.tensors[piece.tensor]
            assert entry.offset + piece.tensor_offset == offset + piece.bucket_offset
            assert 0 <= piece.bucket_offset <= piece.bucket_offset + piece.length <= length
            found[piece.tensor].append((piece.tensor_offset, piece.length))
    assert position == layout.total_bytes
    for index, entry in enumerate(layout.tensors):
        end = 0
        for start, length in found[index]:
            assert start == end
            end += length
        assert end == entry.nbytes


def test_the_root_digest_is_blake3_over_the_raw_bucket_hashes() -> None:
    hashes = [hash_bytes(b"one"), hash_bytes(b"two")]
    assert root_digest(hashes) == blake3(blake3(b"one").digest() + blake3(b"two").digest()).hexdigest()
    assert root_digest(reversed(hashes)) != root_digest(hashes)


def test_no_tensor_and_an_unknown_dtype_are_refused() -> None:
    with pytest.raises(UsageError, match="no tensor"):
        plan_layout({}, "float32")
    with pytest.raises(UsageError, match="'int3' cannot be served: known: float64"):
        plan_layout({"a": (1,)}, "int3")
    with pytest.raises(ValueError, match="at least one byte"):
        plan_buckets(10, 0)

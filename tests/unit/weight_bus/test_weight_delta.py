"""The delta codec: what is decoded and applied is the new version, bit for bit, and hostile bytes are refused."""

from __future__ import annotations

import struct
import tracemalloc

import pytest

pytest.importorskip("zstandard")

import numpy as np
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from services.wire.errors import WireError
from tests.support.examples import examples
from weight_bus.manifest.delta import apply, decode, encode

WORD_BYTES = st.sampled_from([1, 2, 4])


def versions(seed: int, word_bytes: int, words: int, share: float) -> tuple[bytes, bytes]:
    """Random bits, NaNs among them, of which about `share` of the words change."""
    random = np.random.default_rng(seed)
    old = random.integers(0, 256, words * word_bytes, dtype=np.uint8)
    new = old.copy().reshape(words, word_bytes)
    touched = random.random(words) < share
    new[touched] = random.integers(0, 256, (int(touched.sum()), word_bytes), dtype=np.uint8)
    return old.tobytes(), new.tobytes()


def applied(code: bytes, old: bytes) -> bytes:
    target = bytearray(old)
    apply(decode(code, len(old)), target)
    return bytes(target)


@examples(60)
@given(st.integers(0, 1 << 30), WORD_BYTES, st.integers(1, 4000), st.sampled_from([1e-3, 1e-2, 0.2, 1.0]))
def test_the_old_bytes_with_the_delta_applied_are_the_new_ones(
    seed: int, word_bytes: int, words: int, share: float
) -> None:
    old, new = versions(seed, word_bytes, words, share)
    code = encode(old, new, word_bytes)
    if old == new:
        assert code == b""
        return
    assert applied(code, old) == new
    # What was applied can be applied again, also on top of another base's words that it names.
    assert applied(code, new) == new


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 100_000])
def test_every_gap_around_the_escape_is_exact(gap: int) -> None:
    old = bytes(2 * (gap + 3))
    new = bytearray(old)
    new[2 * gap] = 1
    new[-2] = 7
    found = decode(encode(old, new, 2), len(old))
    assert found.indices.tolist() == [gap, gap + 2]
    assert found.values.tolist() == [1, 7]


def test_nan_payloads_and_negative_zeros_survive() -> None:
    old = struct.pack("<4I", 0x00000000, 0x7FC00000, 0x3F800000, 0x7FC00001)
    new = struct.pack("<4I", 0x80000000, 0x7FC00001, 0x3F800000, 0xFFC12345)
    assert applied(encode(old, new, 4), old) == new


def test_a_sparse_change_is_small() -> None:
    """1 % of bfloat16 words, changed in the last place as an optimizer step at 1e-6 does."""
    random = np.random.default_rng(3)
    old = (random.standard_normal(1 << 19).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    new = old.copy()
    new[random.random(old.size) < 0.01] += 1
    assert len(encode(old.tobytes(), new.tobytes(), 2)) < 0.02 * old.nbytes


@examples(150)
@given(st.data())
def test_hostile_bytes_are_refused_or_stay_inside_the_range(data: st.DataObject) -> None:
    word_bytes = data.draw(WORD_BYTES)
    old, new = versions(data.draw(st.integers(0, 99)), word_bytes, 600, 0.1)
    code = bytearray(encode(old, new, word_bytes))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(code) - 1) | st.integers(0, 12))
        code[place] = data.draw(st.integers(0, 255))
    code = code[: data.draw(st.integers(0, len(code)) | st.just(len(code)))]
    length = data.draw(st.sampled_from([len(old), len(old) // 2, 0, 1]))
    try:
        found = decode(bytes(code), length)
    except WireError:
        return
    assert found.indices.size == found.values.size > 0
    assert found.indices[0] >= 0 and found.indices[-1] < length // found.word_bytes
    assert (np.diff(found.indices) > 0).all()


def framed(count: int, gaps: int, content: bytes, word_bytes: int = 2) -> bytes:
    return struct.pack("<cBII", b"D", word_bytes, count, gaps) + zstandard.ZstdCompressor().compress(content)


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (b"", "0 bytes are no delta"),
        (framed(1, 1, b"\0ab", word_bytes=3), "begins with"),
        (framed(101, 101, b""), "changes 101 of 100 words"),
        (framed(0, 0, b""), "changes 0 of 100 words"),
        (framed(1, 2, b""), "by 2 gaps"),
        (framed(1, 1, bytes(1 << 30)), "holds 1073741824 bytes, its head says 3"),
        (framed(2, 2, bytes([60, 60, 1, 2, 3, 4])), "changes word 121 of a range of 100"),
        (framed(2, 2, bytes([0, 255, 1, 2, 3, 4])), "changes others"),
        (framed(1, 1, bytes(3)) + b"more", "cannot be unpacked"),
        (struct.pack("<cBII", b"D", 2, 1, 1) + b"no frame", "cannot be unpacked"),
    ],
)
def test_what_a_hostile_delta_claims_is_checked_before_it_is_believed(code: bytes, said: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(WireError, match=said):
            decode(code, 200)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()

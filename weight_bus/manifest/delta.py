"""Delta codec for weights: the indices and new values of the words that changed, compressed with zstd.

    encode(old, new)   changed words ─► gaps, one byte each  │ new values, one plane a byte ─► zstd level 1 ─► code
    decode(code)       code ─► indices ascending, values     apply: bytes[indices] = values

    code    'D' │ word bytes │ words changed │ gap codes │ zstd( gap codes ‖ plane 0 ‖ plane 1 ‖ … )
    gaps    words skipped since the last changed one; 255 means "skip 255 words, and read on"

It carries new values, not differences: applied twice, or on top of what it already changed, it ends the same. Words are
compared as bits, so NaN payloads and negative zeros survive. Pure: numpy and zstd, no torch, no clock, no I/O. Bytes from
another process are decoded with memory bounded by the range that they claim to change.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from services.wire.errors import WireError

Words = NDArray[np.unsignedinteger[Any]]
Buffer = bytes | bytearray | memoryview

WORD_DTYPES: Mapping[int, np.dtype[np.unsignedinteger[Any]]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<u2"),
    4: np.dtype("<u4"),
}
_HEADER = struct.Struct("<cBII")
_MAGIC = b"D"
_SKIP = 255
_LEVEL = 1


@dataclass(frozen=True)
class DecodedDelta:
    """`values[i]` (unsigned words of `word_bytes`) is the new bit pattern of word `indices[i]`.

    `indices`: int32 `[n]`, or int64 where the range has 2³¹ words or more; ascending, without repetition, in range.
    """

    word_bytes: int
    indices: NDArray[np.signedinteger[Any]]
    values: Words


def encode(old: Buffer, new: Buffer, word_bytes: int) -> bytes:
    """What turns `old` into `new`, as words of `word_bytes` (1, 2 or 4); empty where nothing changed.

    Both have the same length, a multiple of `word_bytes`. ValueError otherwise: both are this process's own.
    """
    dtype = WORD_DTYPES.get(word_bytes)
    if dtype is None or len(old) != len(new) or len(new) % word_bytes:
        raise ValueError(f"{len(old)} and {len(new)} bytes are not the same number of {word_bytes}-byte words")
    before, after = np.frombuffer(old, dtype), np.frombuffer(new, dtype)
    changed = np.flatnonzero(before != after)
    if not changed.size:
        return b""
    codes = _gap_codes(changed)
    planes = after[changed].view(np.uint8).reshape(-1, word_bytes).T
    raw = np.empty(codes.size + changed.size * word_bytes, np.uint8)
    raw[: codes.size] = codes
    raw[codes.size :].reshape(word_bytes, -1)[:] = planes
    packed = zstandard.ZstdCompressor(level=_LEVEL).compress(raw.data)
    return _HEADER.pack(_MAGIC, word_bytes, changed.size, codes.size) + packed


def changed_share(old: Buffer, new: Buffer, word_bytes: int) -> float:
    """The share of words, 0 to 1, that differ between two ranges as `encode` takes them; 0 for empty ones."""
    before, after = (np.frombuffer(data, WORD_DTYPES[word_bytes]) for data in (old, new))
    return float(np.count_nonzero(before != after)) / max(1, before.size)


def decode(code: Buffer, target_length: int) -> DecodedDelta:
    """The changes to a range of `target_length` bytes. Raises WireError for bytes that cannot be such a code.

    Unpacking takes at most about twice the range's own size, the answer and its making some twenty bytes a changed word.
    """
    word_bytes, count, gap_codes = _read_header(code, target_length)
    raw = np.frombuffer(_unpack(code, gap_codes + count * word_bytes), np.uint8)
    words = target_length // word_bytes
    codes = raw[:gap_codes]
    ends = codes != _SKIP
    if not ends[-1] or int(np.count_nonzero(ends)) != count:
        raise WireError(f"a delta says it changes {count} words and changes others")
    # A skip passes over 255 words; any other code passes over that many and stands on the next.
    positions = np.cumsum(codes.astype(np.int16) + ends, dtype=np.int64)
    last = int(positions[-1]) - 1
    if last >= words:
        raise WireError(f"a delta changes word {last} of a range of {words}")
    indices = (positions[ends] - 1).astype(np.int64 if words >= 1 << 31 else np.int32)
    planes = raw[gap_codes:].reshape(word_bytes, count)
    values = np.ascontiguousarray(planes.T).reshape(-1).view(WORD_DTYPES[word_bytes])
    return DecodedDelta(word_bytes, indices, values)


def apply(decoded: DecodedDelta, target: bytearray | memoryview) -> None:
    """Bring the range `target`, of the length that was decoded for, to the new values."""
    np.frombuffer(target, WORD_DTYPES[decoded.word_bytes])[decoded.indices] = decoded.values


def _gap_codes(changed: NDArray[np.int64]) -> NDArray[np.uint8]:
    gaps = np.diff(changed, prepend=-1) - 1
    skips = gaps // _SKIP
    if not skips.any():
        return gaps.astype(np.uint8)
    codes = np.full(gaps.size + int(skips.sum()), _SKIP, np.uint8)
    codes[np.cumsum(skips + 1) - 1] = (gaps - skips * _SKIP).astype(np.uint8)
    return codes


def _read_header(code: Buffer, target_length: int) -> tuple[int, int, int]:
    """Word bytes, words changed and gap codes, bounded by what a range of `target_length` bytes can need."""
    if len(code) < _HEADER.size:
        raise WireError(f"{len(code)} bytes are no delta")
    magic, word_bytes, count, gap_codes = _HEADER.unpack_from(code)
    if magic != _MAGIC or word_bytes not in WORD_DTYPES or target_length % word_bytes:
        raise WireError(f"no delta of a range of {target_length} bytes begins with {bytes(code[: _HEADER.size]).hex()}")
    words = target_length // word_bytes
    if not 0 < count <= words or not count <= gap_codes <= count + words // _SKIP:
        raise WireError(f"a delta says it changes {count} of {words} words, by {gap_codes} gaps")
    return word_bytes, count, gap_codes


def _unpack(code: Buffer, expected: int) -> bytes:
    packed = memoryview(code)[_HEADER.size :]
    try:
        # The size that a frame states would be allocated unseen.
        stated = zstandard.frame_content_size(packed)
        if stated != expected:
            raise WireError(f"a delta's frame holds {stated} bytes, its head says {expected}")
        raw = zstandard.ZstdDecompressor().decompress(packed, max_output_size=expected, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"a delta of {len(code)} bytes cannot be unpacked ({error})") from error
    if len(raw) != expected:
        raise WireError(f"a delta unpacks to {len(raw)} bytes, its head says {expected}")
    return raw

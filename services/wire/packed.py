"""Token ids, masks and logprobs on the wire: packed little-endian arrays, never lists of numbers.

| array      | element | numpy dtype |
|------------|---------|-------------|
| token ids  | int32   | `<i4`       |
| loss mask  | uint8   | `|u1`       |
| logprobs   | float32 | `<f4`       |
| kept ids   | uint32  | `<u4`       |
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

TOKEN_DTYPE = np.dtype("<i4")
MASK_DTYPE = np.dtype("|u1")
LOGPROB_DTYPE = np.dtype("<f4")
KEPT_DTYPE = np.dtype("<u4")
_EXPERT_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("|u1"), 2: np.dtype("<u2")}
"""By their size in bytes. The largest number says that a choice is not known."""

_AS_PACKED = sys.byteorder == "little"
"""Whether an array of C's `int` or `float` holds its elements as they are packed."""

Int32Array = npt.NDArray[np.int32]
UInt8Array = npt.NDArray[np.uint8]
Float32Array = npt.NDArray[np.float32]


def pack_tokens(token_ids: Sequence[int] | Int32Array) -> bytes:
    """Pack `n` token ids into `4 n` bytes. Raises OverflowError for an id outside int32."""
    if isinstance(token_ids, array) and token_ids.typecode == "i" and _AS_PACKED:
        return token_ids.tobytes()
    return np.asarray(token_ids, dtype=TOKEN_DTYPE).tobytes()


def unpack_tokens(packed: bytes) -> Int32Array:
    """The inverse of `pack_tokens`: an int32 array of shape `[n]` (read-only, no copy)."""
    return np.frombuffer(packed, dtype=TOKEN_DTYPE)


def pack_mask(mask: Sequence[int] | UInt8Array) -> bytes:
    """Pack a 0/1 loss mask into one byte an element."""
    return np.asarray(mask, dtype=MASK_DTYPE).tobytes()


def unpack_mask(packed: bytes) -> UInt8Array:
    """The inverse of `pack_mask`: a uint8 array of shape `[n]` (read-only, no copy)."""
    return np.frombuffer(packed, dtype=MASK_DTYPE)


def pack_logprobs(logprobs: Sequence[float] | Float32Array) -> bytes:
    """Pack `n` natural-log probabilities into `4 n` bytes, rounded to float32."""
    if isinstance(logprobs, array) and logprobs.typecode == "f" and _AS_PACKED:
        return logprobs.tobytes()
    return np.asarray(logprobs, dtype=LOGPROB_DTYPE).tobytes()


def unpack_logprobs(packed: bytes) -> Float32Array:
    """The inverse of `pack_logprobs`: a float32 array of shape `[n]` (read-only, no copy)."""
    return np.frombuffer(packed, dtype=LOGPROB_DTYPE)


def expert_dtype(experts: int) -> np.dtype[Any]:
    """Of the numbers of so many experts, beside the largest one."""
    return _EXPERT_DTYPES[1 if experts < 256 else 2]


def unpack_experts(packed: bytes, layers: int, top: int, itemsize: int) -> npt.NDArray[np.int16]:
    """int16 `[tokens, layers · top]`, −1 where it is not known. Raises ValueError for bytes that are not so."""
    if itemsize not in _EXPERT_DTYPES or layers < 1 or top < 1 or len(packed) % (layers * top * itemsize):
        raise ValueError(f"{len(packed)} bytes are no choices of {layers} layers, {top} of {itemsize} bytes each")
    dtype = _EXPERT_DTYPES[itemsize]
    found = np.frombuffer(packed, dtype=dtype).reshape(-1, layers * top)
    return np.where(found == np.iinfo(dtype).max, -1, found.astype(np.int32)).astype(np.int16)


def pack_kept(numbers: Sequence[int] | npt.NDArray[np.uint32]) -> bytes:
    """Pack ids of kept tokens, or how many there are, into 4 bytes each. Raises OverflowError for one outside uint32."""
    return np.asarray(numbers, dtype=KEPT_DTYPE).tobytes()


def unpack_kept(packed: bytes) -> npt.NDArray[np.uint32]:
    """The inverse of `pack_kept`: a uint32 array of shape `[n]` (read-only, no copy)."""
    return np.frombuffer(packed, dtype=KEPT_DTYPE)

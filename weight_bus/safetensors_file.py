"""The head of a safetensors file: which tensor lies where. Pure reading and writing of the format, without torch.

| 8 bytes: n, little-endian | n bytes: JSON, padded with spaces | data: `data_offsets` count from here |
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import msgspec

from services.wire.errors import UsageError
from weight_bus.layout import ALIGNMENT, ITEM_BYTES
from weight_bus.manifest import Layout

PADDING = "__padding__."
"""Names of entries that stand for the bytes between two tensors: the format allows no hole."""
_MAX_HEAD = 100_000_000
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_TAGS = {dtype: tag for tag, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class FileTensor:
    """One tensor: bytes [`offset`, +`nbytes`) of the file's data. `dtype` is torch's name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class FileHead:
    """`data_offset`: where data begins in the file; `data_bytes`: how much there is. Tensors ascend by offset."""

    path: Path
    data_offset: int
    data_bytes: int
    tensors: list[FileTensor]


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_head(path: Path) -> FileHead:
    """Raises UsageError for a file that is not safetensors, or that holds tensors which cannot be served."""
    try:
        with path.open("rb") as file:
            head_bytes = int.from_bytes(file.read(8), "little")
            if head_bytes > _MAX_HEAD:
                raise UsageError(f"{path} is no safetensors file: its head would be {head_bytes} bytes long")
            raw = file.read(head_bytes)
        size = path.stat().st_size
        entries: dict[str, Any] = msgspec.json.decode(raw, type=dict[str, Any])
        entries.pop("__metadata__", None)
        known = msgspec.convert(entries, dict[str, _Entry])
    except OSError as error:
        raise UsageError(f"cannot read {path} ({error.strerror})") from error
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no safetensors file ({error})") from error
    data_bytes = size - 8 - head_bytes
    tensors = [_tensor(path, name, entry, data_bytes) for name, entry in known.items() if not name.startswith(PADDING)]
    return FileHead(
        path, 8 + head_bytes, data_bytes, sorted(tensors, key=lambda tensor: (tensor.offset, tensor.nbytes))
    )


def make_head(layout: Layout, notes: dict[str, str]) -> bytes:
    """The head of a file whose data is an arena laid out as `layout`, padding included; `notes` go into its metadata."""
    head: dict[str, Any] = {"__metadata__": {"format": "pt", **notes}}
    position = 0
    for entry in layout.tensors:
        _pad(head, position, entry.offset)
        position = entry.offset + entry.nbytes
        head[entry.name] = {"dtype": _TAGS[entry.dtype], "shape": entry.shape, "data_offsets": (entry.offset, position)}
    _pad(head, position, layout.total_bytes)
    raw = json.dumps(head, separators=(",", ":")).encode()
    raw += b" " * (-(8 + len(raw)) % ALIGNMENT)
    return len(raw).to_bytes(8, "little") + raw


def _pad(head: dict[str, Any], start: int, end: int) -> None:
    if start < end:
        head[f"{PADDING}{start}"] = {"dtype": "U8", "shape": (end - start,), "data_offsets": (start, end)}


def _tensor(path: Path, name: str, entry: _Entry, data_bytes: int) -> FileTensor:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise UsageError(f"{path}: {name} is {entry.dtype}, which cannot be served", f"known: {', '.join(_DTYPES)}")
    start, end = entry.data_offsets
    nbytes = prod(entry.shape) * ITEM_BYTES[dtype]
    if min((0, *entry.shape)) < 0 or not 0 <= start <= end <= data_bytes or end - start != nbytes:
        raise UsageError(
            f"{path}: {name} of {nbytes} bytes is said to lie at {start} to {end} of {data_bytes}", "is the file whole?"
        )
    return FileTensor(name, dtype, entry.shape, start, nbytes)

"""safetensors folders as policy versions: make a manifest for any folder, find the newest snapshot of a run.

    manifest_of_folder   a Hugging Face folder, one file or several ─► a manifest with one owner a file
    newest_snapshot      <root>/v0000000012-1f3a…/{model.safetensors, manifest.msgpack, config.json, …}

Snapshots are written by `weight_bus.transports.file`. No torch here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from services.wire.errors import UNDECODABLE, UsageError, WireError
from weight_bus.manifest.layout import (
    ALIGNMENT,
    DEFAULT_BUCKET_BYTES,
    ITEM_BYTES,
    hash_bytes,
    plan_buckets,
    plan_mixed_layout,
    root_digest,
)
from weight_bus.manifest.manifest import (
    Bucket,
    FileSource,
    Layout,
    Manifest,
    Owner,
    Shard,
    TensorEntry,
    decode_manifest,
)
from weight_bus.manifest.shard_map import ShardMap

INDEX_FILE = "model.safetensors.index.json"
MANIFEST_FILE = "manifest.msgpack"
MODEL_FILE = "model.safetensors"
_T = TypeVar("_T")
_SNAPSHOT = re.compile(r"v([0-9]{10})-[0-9a-f]{8}")


@dataclass(frozen=True)
class Snapshot:
    """A version on disk: a folder that loaders of Hugging Face models read, with its manifest."""

    folder: Path
    manifest: Manifest

    @property
    def version(self) -> int:
        return self.manifest.version


def manifest_of_folder(
    folder: Path, run_id: str, version: int, dtype: str | None = None, *, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> Manifest:
    """The unsigned manifest of the safetensors in `folder`; every byte is read once, to be hashed.

    Where `config.json` says that embeddings are tied, an output head that lies there too is left out. `dtype`: refuse a
    folder whose weights are not all of it. Raises UsageError for a folder without safetensors, or with unsound ones.
    """
    heads = [_without_tied(head, folder) for head in _heads(folder)]
    named = {tensor.name: (tensor.shape, tensor.dtype) for head in heads for tensor in head.tensors}
    if len(named) != sum(len(head.tensors) for head in heads):
        raise UsageError(f"{folder} holds a tensor twice", f"add {INDEX_FILE}, which says where each is to be had")
    for name, (_, found) in named.items():
        if dtype is not None and found != dtype:
            raise UsageError(
                f"{folder}: {name} is {found}, not {dtype}", "convert the folder to the serving dtype first"
            )
    layout = plan_mixed_layout(named)
    numbers = {entry.name: number for number, entry in enumerate(layout.tensors)}
    owners = [_owner(head, layout, numbers, alone=len(heads) == 1) for head in heads]
    buckets = list(_hashed(heads, owners, layout, bucket_bytes))
    return Manifest(
        run_id=run_id,
        version=version,
        layout=layout,
        owners=owners,
        buckets=buckets,
        root_digest=root_digest(bucket.hash for bucket in buckets),
    )


def shapes_of_folder(folder: Path) -> dict[str, tuple[int, ...]]:
    """Of the tensors in `folder`'s safetensors, which are not read beyond their headers. Raises as `manifest_of_folder`."""
    return {tensor.name: tensor.shape for head in _heads(folder) for tensor in head.tensors}


def snapshot_name(version: int, digest: str) -> str:
    """The name of a snapshot's folder. Names ascend with versions."""
    return f"v{version:010d}-{digest[:8]}"


def snapshot_folders(root: Path) -> list[Path]:
    """Folders of whole snapshots under `root`, oldest version first; none where `root` does not exist."""
    if not root.is_dir():
        return []
    return sorted(path for path in root.iterdir() if _SNAPSHOT.fullmatch(path.name))


def newest_snapshot(root: Path) -> Snapshot | None:
    """The newest version under `root`, for an engine that starts cold; None when there is none.

    Raises UsageError when its manifest cannot be read: an older version in its place would be a silent step back.
    """
    while folders := snapshot_folders(root):
        path = folders[-1] / MANIFEST_FILE
        try:
            return Snapshot(folders[-1], decode_manifest(path.read_bytes()))
        except WireError as error:
            raise UsageError(
                f"{path} cannot be read ({error})", "remove the folder or write the snapshot again"
            ) from error
        except FileNotFoundError as error:
            # Pruned since the folder was listed.
            if folders[-1].is_dir():
                raise UsageError(f"{folders[-1]} has no {MANIFEST_FILE}", "remove the folder") from error
    return None


def _heads(folder: Path) -> list[FileHead]:
    index = folder / INDEX_FILE
    if not index.is_file():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise UsageError(f"{folder} holds no safetensors", "give a folder as Hugging Face models have it")
        return [read_head(file.resolve()) for file in files]
    homes: dict[str, str] = _json(index, dict[str, dict[str, Any]]).get("weight_map", {})
    heads = []
    for name in sorted(set(homes.values())):
        if Path(name).name != name:
            raise UsageError(f"{index} names {name!r}, which is no file beside it")
        head = read_head((folder / name).resolve())
        tensors = [tensor for tensor in head.tensors if homes.get(tensor.name) == name]
        heads.append(FileHead(head.path, head.data_offset, head.data_bytes, tensors))
    missing = sorted(homes.keys() - {tensor.name for head in heads for tensor in head.tensors})
    if missing or not heads:
        raise UsageError(
            f"{index} names {missing[:3] or 'nothing'}, which its files do not hold", "is the folder whole?"
        )
    return heads


def _without_tied(head: FileHead, folder: Path) -> FileHead:
    config = folder / "config.json"
    if not config.is_file() or not _json(config, dict[str, Any]).get("tie_word_embeddings"):
        return head
    tensors = [tensor for tensor in head.tensors if tensor.name != "lm_head.weight"]
    return FileHead(head.path, head.data_offset, head.data_bytes, tensors)


def _owner(head: FileHead, layout: Layout, numbers: dict[str, int], *, alone: bool) -> Owner:
    source = FileSource(path=str(head.path), length=head.data_bytes, data_offset=head.data_offset, host="")
    shards = [
        Shard(tensor=numbers[tensor.name], tensor_offset=0, offset=tensor.offset, nbytes=tensor.nbytes)
        for tensor in head.tensors
        if tensor.nbytes
    ]
    whole = alone and head.data_bytes == layout.total_bytes
    whole = whole and all(shard.offset == layout.tensors[shard.tensor].offset for shard in shards)
    return Owner(total_bytes=head.data_bytes, sources=[source], shards=None if whole else shards)


def _hashed(heads: list[FileHead], owners: list[Owner], layout: Layout, bucket_bytes: int) -> Iterator[Bucket]:
    buffer = bytearray(min(bucket_bytes, layout.total_bytes))
    maps = [ShardMap(layout, owner.shards) for owner in owners]
    with ExitStack() as stack:
        files = [stack.enter_context(head.path.open("rb", buffering=0)) for head in heads]
        for offset, length in plan_buckets(layout.total_bytes, bucket_bytes):
            view = memoryview(buffer)[:length]
            view[:] = bytes(length)
            for head, file, held in zip(heads, files, maps, strict=True):
                for piece in held.within(offset, length):
                    start = layout.tensors[piece.tensor].offset + piece.tensor_offset - offset
                    _read(file, head, piece.arena, view[start : start + piece.nbytes])
            yield Bucket(offset=offset, length=length, hash=hash_bytes(view))


def _read(file: FileIO, head: FileHead, offset: int, out: memoryview) -> None:
    file.seek(head.data_offset + offset)
    done = 0
    while done < len(out):
        got = file.readinto(out[done:])
        if not got:
            raise UsageError(f"{head.path} became shorter while it was read", "write snapshots to another folder")
        done += got


def _json(path: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind, strict=False)
    except (OSError, *UNDECODABLE) as error:
        raise UsageError(f"cannot read {path} ({error})") from error


# The header of a safetensors file, read and written without torch:
#
#     | 8 bytes: n, little-endian | n bytes: JSON, padded with spaces | data: `data_offsets` count from here |

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
class FileHead:
    """`data_offset`: where data begins in the file; `data_bytes`: its length. Tensors ascend by offset."""

    path: Path
    data_offset: int
    data_bytes: int
    tensors: list[TensorEntry]


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
    except UNDECODABLE as error:
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


def _tensor(path: Path, name: str, entry: _Entry, data_bytes: int) -> TensorEntry:
    dtype = _DTYPES.get(entry.dtype)
    if dtype is None:
        raise UsageError(f"{path}: {name} is {entry.dtype}, which cannot be served", f"known: {', '.join(_DTYPES)}")
    start, end = entry.data_offsets
    nbytes = prod(entry.shape) * ITEM_BYTES[dtype]
    if min((0, *entry.shape)) < 0 or not 0 <= start <= end <= data_bytes or end - start != nbytes:
        raise UsageError(
            f"{path}: {name} of {nbytes} bytes is said to lie at {start} to {end} of {data_bytes}", "is the file whole?"
        )
    return TensorEntry(name=name, dtype=dtype, shape=entry.shape, offset=start, nbytes=nbytes)

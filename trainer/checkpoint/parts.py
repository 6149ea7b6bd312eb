"""Files of tensors that are spread over ranks: each rank writes what it holds, and any number of ranks reads what it needs.

    4 ranks wrote                                             2 ranks read
    model-00000-of-00004.safetensors    rows 0 to 2 of a, … ─┐
    model-00001-of-00004.safetensors    rows 2 to 4 of a, … ─┴─► rows 0 to 4 of a
    …                                                            …

Which indices of a tensor a file has stands in its header, under `parts`: `{name: [shape, spans]}`
(`weight_bus.manifest.local_part`). A file without it has whole tensors, as one rank writes them. Plain safetensors, not
torch's distributed checkpoints: those are read by unpickling.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from services.host.files import sync
from services.policies.training.deadlines import within
from services.wire.errors import DeadlineError, UsageError
from weight_bus.manifest.local_part import Ranges, part_of

_PARTS = "parts"
_POLL_S = 0.02
WRITE_DEADLINE_S = 3600.0
"""For the slowest rank's files, at the least."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Shape of the whole tensor, and the ranges of indices along each dimension that are here."""

    shape: tuple[int, ...]
    spans: tuple[Ranges, ...]


@dataclass(frozen=True)
class Writers:
    """The ranks that write one checkpoint together, into a folder that all of them see.

    `launch`: the same on all ranks that were started together, and another for those of the next start.
    """

    rank: int
    size: int
    launch: str
    deadline_s: float = WRITE_DEADLINE_S

    def file(self, name: str) -> str:
        """What this rank's part of `name`.safetensors is called."""
        return f"{name}-{self.rank:05d}-of-{self.size:05d}.safetensors"

    def making(self, target: Path) -> Path:
        """The folder that becomes `target`."""
        return target.with_name(f".parts-{self.launch}-{target.name}")


def held_part(tensor: Tensor) -> tuple[Tensor, Part | None]:
    """What this rank holds of `tensor`, and which part that is; None: all of it, and nobody else has any."""
    if not isinstance(tensor, DTensor):
        return tensor, None
    part = part_of("a tensor of a checkpoint", tensor)
    return part.local, Part(tuple(part.shape), part.spans)


def is_written_here(tensor: Tensor, rank: int) -> bool:
    """Whether this rank, of those that hold the same part, is the one that writes it."""
    if not isinstance(tensor, DTensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate()
    if coordinate is None or not tensor.to_local().numel():
        return False
    return all(
        place == 0
        for place, placement in zip(coordinate, tensor.placements, strict=True)
        if isinstance(placement, Replicate)
    )


def placed_as(like: Tensor, local: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`local`, which has this rank's part of a tensor of `shape`, as spread over ranks as `like` is; itself where it is
    whole.
    """
    if not isinstance(like, DTensor) or shape != tuple(like.shape):
        return local
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def write_tensors(path: Path, tensors: Mapping[str, Tensor], parts: Mapping[str, Part]) -> None:
    """A safetensors file of them; `parts` says which are parts of larger ones, and which parts. Raises OSError."""
    notes = {"format": "pt"} | ({_PARTS: msgspec.json.encode(parts).decode()} if parts else {})
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata=notes)


def hand_in(target: Path, writers: Writers, sizes: Mapping[str, int]) -> None:
    """This rank's files, of `sizes` bytes, are in the folder that is being made, and durable. Raises OSError."""
    making = writers.making(target)
    for name in sizes:
        sync(making / name)
    noted = making / f"rank-{writers.rank:05d}.json"
    noted.with_suffix(".partial").write_bytes(msgspec.json.encode(sizes))
    noted.with_suffix(".partial").replace(noted)


def collect(target: Path, writers: Writers, nbytes: int) -> dict[str, int]:
    """All ranks' files and their sizes, for rank 0, once each rank has handed them in. `nbytes`: of rank 0's own. Raises
    DeadlineError, OSError."""
    within_s = within(writers.deadline_s, nbytes * writers.size)
    making, ends = writers.making(target), time.monotonic() + within_s
    sizes: dict[str, int] = {}
    for rank in range(writers.size):
        noted = making / f"rank-{rank:05d}.json"
        while not noted.exists():
            if time.monotonic() > ends:
                raise DeadlineError(
                    f"rank {rank} has not written its part of {target.name} within {within_s:g} s",
                    "is checkpoints/ a folder that all ranks see?",
                )
            time.sleep(_POLL_S)
        sizes |= msgspec.json.decode(noted.read_bytes(), type=dict[str, int])
        noted.unlink()
    return sizes


class Stored:
    """The tensors of safetensors files, in however many parts. Closed at the block's end.

    Files are mapped: `let_go` gives back what was read of them, which counts as memory of this process meanwhile.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._open: dict[Path, Any] = {}
        self._where: dict[str, list[tuple[Path, Part]]] = {}

    @staticmethod
    def of_checkpoint(folder: Path, name: str) -> Stored:
        """Those of `name`.safetensors in a checkpoint's folder. Raises FileNotFoundError where there is none."""
        whole = folder / f"{name}.safetensors"
        paths = [whole] if whole.is_file() else sorted(folder.glob(f"{name}-*-of-*.safetensors"))
        if not paths:
            raise FileNotFoundError(2, "No such file", str(whole))
        return Stored(paths)

    def __enter__(self) -> Stored:
        for path in self._paths:
            file = self._file(path)
            parts = msgspec.json.decode((file.metadata() or {}).get(_PARTS, "{}"), type=dict[str, Part])
            for key in file.keys():  # noqa: SIM118 - it is no mapping
                shape = tuple(file.get_slice(key).get_shape())
                part = parts.get(key, Part(shape, tuple(((0, size),) for size in shape)))
                known = self._where.setdefault(key, [])
                if all(part != other for _, other in known):
                    known.append((path, part))
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()

    def let_go(self) -> None:
        """Close the files; they are opened again where more is read."""
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of whole tensors, by name."""
        return {key: parts[0][1].shape for key, parts in self._where.items()}

    def read(self, key: str, like: Tensor | None = None) -> Tensor:
        """What this rank needs for a tensor that is spread over ranks as `like` is; all of it for None, or another shape.

        In the host's memory. Raises ValueError where files lack some of it.
        """
        shape = self._where[key][0][1].shape
        spans: tuple[Ranges, ...] = tuple(((0, size),) for size in shape)
        if isinstance(like, DTensor) and tuple(like.shape) == shape:
            spans = part_of(key, like).spans
        for path, part in self._where[key]:
            if part.spans == spans:
                return _tensor(self._file(path), key)
        dtype = _DTYPES[self._file(path).get_slice(key).get_dtype()]
        out = torch.empty([_length(ranges) for ranges in spans], dtype=dtype)
        self.read_into(key, spans, out)
        return out

    def read_into(self, key: str, spans: tuple[Ranges, ...], out: Tensor) -> int:
        """Write the elements of `spans` into `out`, whose dimensions are as long, in its dtype; returns the bytes read.

        Nothing else of the tensor is read. Raises ValueError where files lack some of it.
        """
        filled = read = 0
        for path, part in self._where[key]:
            held = self._file(path).get_slice(key)
            for block in product(*(_shared(ranges, wanted) for ranges, wanted in zip(part.spans, spans, strict=True))):
                source = tuple(slice(start, start + length) for start, _, length in block)
                place = tuple(slice(start, start + length) for _, start, length in block)
                found = held[source or ...]
                out[place] = found
                filled += found.numel()
                read += found.nbytes
        if filled != out.numel():
            raise ValueError(f"{key}: {filled} of {out.numel()} elements are in the files")
        return read

    def _file(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = safe_open(path, framework="pt")
        return self._open[path]


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def _tensor(file: Any, key: str) -> Tensor:
    found = file.get_tensor(key)
    assert isinstance(found, Tensor)
    return found


def _length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _shared(held: Ranges, wanted: Ranges) -> list[tuple[int, int, int]]:
    """Of one dimension, the indices that are in both: their places among the held and the wanted ones, and how many."""
    found, at = [], 0
    for start, stop in held:
        place = 0
        for first, last in wanted:
            low, high = max(start, first), min(stop, last)
            if low < high:
                found.append((at + low - start, place + low - first, high - low))
            place += last - first
        at += stop - start
    return found


def unspread(key: str, value: Tensor, parameter: Tensor) -> None:
    """Raise UsageError for state of an optimizer that is of one rank's part alone, and has no place in the whole."""
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.numel() > 1:
        raise UsageError(
            f"{key} is of this rank's part of a weight alone: no other number of ranks could go on from it",
            "use trainer.optimizer.kind=adamw without 8 bits, or one rank",
        )


def stale(folder: Path, launch: str) -> Iterator[Path]:
    """Folders that another launch's ranks did not finish."""
    for path in folder.glob(".parts-*"):
        if not path.name.startswith(f".parts-{launch}-"):
            yield path

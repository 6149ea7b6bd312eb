"""Slices of tensors that tensor and expert parallel ranks have, and copies between them and bytes of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from weight_bus.errors import StageError
from weight_bus.manifest.tensors import bytes_under, flat_bytes

Offsets = NDArray[np.int64]


@dataclass(frozen=True)
class Slice:
    """A tensor parallel rank's part of a tensor: `shape` is of the whole, the rank's part begins at `start` along `dim`.

        dim 0   ┌───────────┐          dim 1   ┌───┬───┬───┐
                ├───────────┤ start            │   │ ▓ │   │
                │▓▓▓▓▓▓▓▓▓▓▓│                  │   │ ▓ │   │    both: columns `begin` to `end` of every row
                └───────────┘                  └───┴───┴───┘    (of one row only, where dim is 0)

    Hashes are of whole buckets: ranks that share memory read a part of the bytes each and keep their slices
    (`weight_bus.receiver.shared_staging`), others read all.
    """

    shape: tuple[int, ...]
    dim: int
    start: int

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape can be the slice."""
        others = [size for dim, size in enumerate(shape) if dim != self.dim]
        return (
            len(shape) == len(self.shape)
            and others == [size for dim, size in enumerate(self.shape) if dim != self.dim]
            and self.start + shape[self.dim] <= self.shape[self.dim]
        )


def write_slice(tensor: torch.Tensor, part: Slice, offset: int, data: memoryview) -> None:
    """Copy the bytes of `data` that belong to the slice into `tensor`, which is contiguous.

    `data`: bytes of the whole tensor, from `offset` on.
    """
    for held, found in _both(tensor, part, offset, data):
        held.copy_(found)


def read_slice(tensor: torch.Tensor, part: Slice, offset: int, data: memoryview) -> None:
    """The other way: copy the slice's bytes to their places in `data`. Others are left as they are."""
    for held, found in _both(tensor, part, offset, data):
        found.copy_(held)


def words_of_slice(
    tensor: torch.Tensor, part: Slice, offsets: Offsets, values: NDArray[Any]
) -> tuple[Offsets, NDArray[Any]]:
    """Of words at these bytes of the whole tensor those that are the slice's, at their bytes in it. Words are its
    elements, or parts of them. Raises StageError for words that lie across its edge.
    """
    row, begin, width = _row(tensor, part)
    if any(number % values.dtype.itemsize for number in (row, begin, width)):
        raise StageError(f"delta words of {values.dtype.itemsize} bytes lie across the edge of a slice")
    if not width:
        return offsets[:0], values[:0]
    rows, columns = np.divmod(offsets, row)
    own = (columns >= begin) & (columns < begin + width)
    return rows[own] * width + columns[own] - begin, values[own]


def _row(tensor: torch.Tensor, part: Slice) -> tuple[int, int, int]:
    """Bytes of a row of the whole, the slice's first one in it, and how many are the slice's."""
    across = tensor.element_size() * prod(part.shape[part.dim + 1 :])
    return across * part.shape[part.dim], part.start * across, across * tensor.shape[part.dim]


def _both(
    tensor: torch.Tensor, part: Slice, offset: int, data: memoryview
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of the same bytes: in the slice, and in `data`."""
    row, begin, width = _row(tensor, part)
    if not data or not width:
        return
    kept, whole = bytes_under(tensor).view(-1, width), flat_bytes(data)
    done = 0
    while done < len(data):
        number, column = divmod(offset + done, row)
        rows = (len(data) - done) // row if column == 0 else 0
        if rows:
            found = whole[done : done + rows * row].view(rows, row)
            yield kept[number : number + rows], found[:, begin : begin + width]
            done += rows * row
            continue
        length = min(row - column, len(data) - done)
        first, last = max(column, begin), min(column + length, begin + width)
        if first < last:
            at = done + first - column
            yield kept[number, first - begin : last - begin], whole[at : at + last - first]
        done += length

"""Which part of a whole tensor one rank of an engine holds, and the way of a manifest's bytes into it.

    the whole, as the manifest has it          a rank's slice: `length` of `shape[dim]`, from `start`

    dim 0   ┌───────────┐                      dim 1   ┌───┬───┬───┐
            ├───────────┤ start                        │   │ ▓ │   │
            │▓▓▓▓▓▓▓▓▓▓▓│                              │   │ ▓ │   │   both: columns `begin` to `end` of every row
            └───────────┘                              └───┴───┴───┘   (of one row only, where dim is 0)

Ranks read whole buckets, because hashes are of whole buckets, and keep what is theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from weight_bus.views import bytes_under, flat_bytes


@dataclass(frozen=True)
class Slice:
    """`shape`: of the whole tensor. The rank's own has the same but along `dim`, where it begins at `start`."""

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
    """Put what of `data` belongs to the slice into `tensor`, which is contiguous.

    `data`: bytes of the whole tensor, from `offset` on.
    """
    across = tensor.element_size() * prod(part.shape[part.dim + 1 :])
    row, width = across * part.shape[part.dim], across * tensor.shape[part.dim]
    begin = part.start * across
    if not data or not width:
        return
    target, source = bytes_under(tensor).view(-1, width), flat_bytes(data)
    done = 0
    while done < len(data):
        number, column = divmod(offset + done, row)
        rows = (len(data) - done) // row if column == 0 else 0
        if rows:
            found = source[done : done + rows * row].view(rows, row)
            target[number : number + rows].copy_(found[:, begin : begin + width])
            done += rows * row
            continue
        length = min(row - column, len(data) - done)
        first, last = max(column, begin), min(column + length, begin + width)
        if first < last:
            at = done + first - column
            target[number, first - begin : last - begin].copy_(source[at : at + last - first])
        done += length

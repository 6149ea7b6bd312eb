"""KV cache of the running requests: one row a sample, kept dense; all rows write the same column in a step.

    column      lo                       clock
    row 0        ·  ·  p  p  p  t  t  t  ▒        p prompt, t sampled tokens, ▒ where the next step writes
    row 1        ·  ·  ·  ·  ·  p  p  t  ▒        · before the row's start: masked out
    row 2        p  p  p  p  t  t  t  t  ▒

Every decode step writes one column of all rows, so a step is a slice, without index writes, and a row's position is
`column − start`. A new prompt is placed so that it ends at the clock. When a row finishes, the last row takes its
place. When the clock reaches the end, live columns move back to the front. Rows and columns are allocated on demand.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_FIRST_ROWS = 16
_FIRST_COLUMNS = 128


@dataclass(frozen=True)
class KvShape:
    """Sizes of one token's keys and values: `[layers, …, heads, …, dim]`, the same for every layer.

    `expert_layers`, `expert_top`: of a mixture of experts whose choices are kept beside them, how many layers choose, and
    how many experts each.
    """

    layers: int
    heads: int
    key_dim: int
    value_dim: int
    expert_layers: int = 0
    expert_top: int = 0


@dataclass(frozen=True)
class KvWindow:
    """What one forward reads and writes; it writes the last columns, as many as it is given tokens a row.

    `keys`, `values`: `[layers, rows, heads, columns, dim]` views; `columns`: int64 `[columns]`, their numbers;
    `starts`: int64 `[rows]`, the column of each row's first token. `experts`: int16 `[expert layers, rows, 1, columns,
    top]`, a view too; None where choices are not kept.
    """

    keys: torch.Tensor
    values: torch.Tensor
    columns: torch.Tensor
    starts: torch.Tensor
    experts: torch.Tensor | None = None

    def up_to(self, end: int) -> KvWindow:
        """The part before its column `end`, counted from its first one."""
        experts = None if self.experts is None else self.experts[:, :, :, :end]
        return KvWindow(self.keys[:, :, :, :end], self.values[:, :, :, :end], self.columns[:end], self.starts, experts)

    @property
    def memories(self) -> list[torch.Tensor]:
        """`keys`, `values`, and `experts` where they are kept."""
        return [self.keys, self.values] if self.experts is None else [self.keys, self.values, self.experts]


def on_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor, which shares its memory on a CPU.

    Torch gives the interpreter's lock away in all but a few calls, `Tensor.to` of nothing included, and a busy event loop
    keeps it for a while: so arrays are laid out by numpy.
    """
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.to(device)


class KvCache:
    """Memory for at most `max_rows` samples at once. Belongs to one thread."""

    def __init__(self, shape: KvShape, *, max_rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self._shape = shape
        self._max_rows = max_rows
        self._dtype, self._device = dtype, device
        self._starts: list[int] = []
        self.clear()

    @property
    def rows(self) -> int:
        """How many rows are in use."""
        return len(self._starts)

    @property
    def allocated(self) -> tuple[int, int]:
        """Rows and columns that memory is allocated for."""
        return self._memories[0].shape[1], self._memories[0].shape[3]

    @property
    def use(self) -> float:
        """Share of the allocated places that hold a token of a row, 0 … 1. May be read on any thread: then it is the use
        of about now."""
        rows, columns = self.allocated
        held = len(self._starts) * self._clock - self._starts_sum
        return min(1.0, max(0.0, held / (rows * columns)))

    @property
    def columns(self) -> tuple[int, int]:
        """The first column that a row in use has written, and the one after the last."""
        return self._low, self._clock

    def window(self) -> KvWindow:
        """Views of all rows in use, for a step of one token a row. Call `tick` after it."""
        if self._clock >= self.allocated[1]:
            self._move_columns(minimum_clock=0)
        return self.window_to(self._clock + 1)

    def window_to(self, end: int) -> KvWindow:
        """Views of all rows in use up to column `end` (not with it), to write its last columns, also anew."""
        rows = len(self._starts)
        keys, values, *experts = (memory[:, :rows, :, self._low : end] for memory in self._memories)
        columns = self._columns[self._low : end]
        return KvWindow(keys, values, columns, self._starts_tensor, experts[0] if experts else None)

    def tick(self) -> None:
        """One column has been written."""
        self._clock += 1

    def scratch(self, lengths: Sequence[int], *, blank: bool = False) -> KvWindow:
        """Fresh memory to prefill prompts of these lengths together, each ending at the last column.

        `blank`: not all columns will be written, so their contents must be finite.
        """
        width = max(lengths)
        memories = self._empty(len(lengths), width)
        if blank:
            for memory in memories:
                memory.zero_()
        keys, values, *experts = memories
        starts = on_device(width - np.asarray(lengths, dtype=np.int64), self._device)
        columns = torch.arange(width, device=starts.device)
        return KvWindow(keys, values, columns, starts, experts[0] if experts else None)

    def place(self, prompts: KvWindow, lengths: Sequence[int], copies: Sequence[int]) -> None:
        """Append `copies[i]` rows that begin with prompt `i` of a scratch window of prompts of these `lengths`."""
        width = prompts.keys.shape[3]
        before = len(self._starts)
        after = before + sum(copies)
        if after > self._max_rows:
            raise ValueError(f"{after} rows do not fit {self._max_rows} slots")
        if before == 0 or width > self._clock:
            self._move_columns(minimum_clock=width)
        if after > self.allocated[0]:
            self._grow_rows(after)
        given = prompts.memories
        if after - before != len(lengths):
            pick = on_device(np.repeat(np.arange(len(lengths)), copies), self._device)
            given = [memory[:, pick] for memory in given]
        for memory, prompt in zip(self._memories, given, strict=True):
            memory[:, before:after, :, self._clock - width : self._clock].copy_(prompt)
        for length, count in zip(lengths, copies, strict=True):
            self._starts += [self._clock - length] * count
        self._rows_changed()

    def remove(self, finished: Sequence[int]) -> list[tuple[int, int]]:
        """Free these rows (ascending). Returns the moves `(to, from)` that keep the rest dense, for the caller's lists.

        Apply the moves, then cut the lists to `rows` elements.
        """
        left = len(self._starts) - len(finished)
        gone = set(finished)
        movers = [row for row in range(left, len(self._starts)) if row not in gone]
        moves = list(zip([row for row in finished if row < left], movers, strict=True))
        if moves:
            table = np.array(moves, dtype=np.int64).T
            targets, sources = (on_device(np.ascontiguousarray(each), self._device) for each in table)
            for memory in self._memories:
                live = memory[:, :, :, self._low : self._clock]
                # Indexing is several times faster than index_copy_ and index_select on memory in strides.
                live[:, targets] = live[:, sources]
            for to, source in moves:
                self._starts[to] = self._starts[source]
        del self._starts[left:]
        self._rows_changed()
        return moves

    def copy_of(self, row: int) -> tuple[torch.Tensor, ...]:
        """The keys and values that a row has written, `[layers, heads, tokens, dim]`, in memory of their own; and `[expert
        layers, 1, tokens, top]`, where choices are kept."""
        own = (slice(None), row, slice(None), slice(self._starts[row], self._clock))
        return tuple(memory[own].clone() for memory in self._memories)

    def experts_of(self, row: int) -> torch.Tensor:
        """The choices of a row's tokens, int16 `[tokens, expert layers, top]`. Only where they are kept."""
        own = self._memories[2][:, row, 0, self._starts[row] : self._clock]
        return own.transpose(0, 1)

    def clear(self) -> None:
        """Free all rows, and begin with fresh memory (a masked column that holds NaN would still poison its row)."""
        self._starts.clear()
        self._clock = 0
        self._memories = self._allocate(min(_FIRST_ROWS, self._max_rows), _FIRST_COLUMNS)
        self._columns = torch.arange(_FIRST_COLUMNS, device=self._device)
        self._rows_changed()

    def _rows_changed(self) -> None:
        self._low = min(self._starts, default=self._clock)
        self._starts_sum = sum(self._starts)
        self._starts_tensor = on_device(np.array(self._starts, dtype=np.int64), self._device)

    def _move_columns(self, minimum_clock: int) -> None:
        """Move the live columns towards the front, more memory if need be, so that the clock is at least that."""
        live = self._clock - self._low if self._starts else 0
        rows, columns = self.allocated
        needed = max(live, minimum_clock)
        while needed > columns // 2:
            columns *= 2
        # A quarter of what is free stays in front of the rows, for newcomers with longer prompts.
        clock = needed + (columns - needed) // 4
        before = self._memories
        if columns > before[0].shape[3]:
            self._memories = self._allocate(rows, columns)
            self._columns = torch.arange(columns, device=before[0].device)
        if live:
            used = slice(0, len(self._starts))
            for target, source in zip(self._memories, before, strict=True):
                kept = source[:, used, :, self._low : self._clock]
                target[:, used, :, clock - live : clock].copy_(kept.clone() if target is source else kept)
            self._starts = [start + clock - self._clock for start in self._starts]
        self._clock = clock
        self._rows_changed()

    def _grow_rows(self, needed: int) -> None:
        rows, columns = self.allocated
        while rows < needed:
            rows = min(2 * rows, self._max_rows)
        before = self._memories
        self._memories = self._allocate(rows, columns)
        used, live = slice(0, len(self._starts)), slice(self._low, self._clock)
        for memory, earlier in zip(self._memories, before, strict=True):
            memory[:, used, :, live].copy_(earlier[:, used, :, live])

    def _allocate(self, rows: int, columns: int) -> list[torch.Tensor]:
        # Zeros: a masked column counts 0 × its value, which must be a finite number.
        return [_zeros(sizes, dtype, self._device) for sizes, dtype in self._parts(rows, columns)]

    def _empty(self, rows: int, columns: int) -> list[torch.Tensor]:
        return [torch.empty(sizes, dtype=dtype, device=self._device) for sizes, dtype in self._parts(rows, columns)]

    def _parts(self, rows: int, columns: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Sizes and dtype of keys, values, and choices where they are kept."""
        shape = self._shape
        sizes = shape.layers, rows, shape.heads, columns
        parts: list[tuple[tuple[int, ...], torch.dtype]] = [
            ((*sizes, dim), self._dtype) for dim in (shape.key_dim, shape.value_dim)
        ]
        if shape.expert_layers:
            parts.append(((shape.expert_layers, rows, 1, columns, shape.expert_top), torch.int16))
        return parts


def _zeros(sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU, pages that are there once they are written: to fill gigabytes takes seconds, in which nothing is decoded,
    and most of them are not used for long."""
    count = math.prod(sizes)
    if device.type != "cpu" or not count:
        return torch.zeros(sizes, dtype=dtype, device=device)
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(sizes)

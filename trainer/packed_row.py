"""Rows laid end to end in one, without padding.

rows         a b c d │ e f │ g h                       lengths (4, 2, 2)
positions    0 1 2 3 │ 0 1 │ 0 1                       restart with each row
runs                 (4, 1) (2, 2)                     neighbours of one length: (length, how many)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from services.wire.packed import Int32Array


@dataclass(frozen=True)
class PackedRow:
    """`T` tokens of rows laid end to end. `input_ids`, `position_ids`: int64 `[1, T]`. `starts`: int32 `[rows + 1]`, where
    each begins, and `T`. Invariant: Σ length · count over `runs` is `T`."""

    input_ids: Tensor
    position_ids: Tensor
    starts: Tensor
    runs: tuple[tuple[int, int], ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(length for length, _ in self.runs)


def lay_end_to_end(rows: Sequence[Int32Array], device: torch.device | None = None) -> PackedRow:
    """Rows of at least one token each, in their order. Raises ValueError for none, and for an empty one."""
    lengths = [len(row) for row in rows]
    if not lengths or min(lengths) < 1:
        raise ValueError(f"rows of at least one token are wanted, got lengths {lengths}")
    return PackedRow(
        input_ids=torch.from_numpy(np.concatenate(rows).astype(np.int64))[None].to(device),
        position_ids=torch.from_numpy(np.concatenate([np.arange(length) for length in lengths]))[None].to(device),
        starts=torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device),
        runs=tuple((length, len(list(run))) for length, run in groupby(lengths)),
    )

"""Orders of rank 0 to the other ranks, as they travel: msgspec structs, arrays as their little-endian bytes.

    rank 0   decides ─► an order for each rank, with that rank's rows ─► does its own part
    others   receive ─► do the same part of it                                            every collective is met by all

Each rank runs the same code on the same build: orders carry no schema version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from trainer.algorithms.losses.tokens import BatchSize
from trainer.data.packing import PackedBatch, SharedBatch, lay_passes
from trainer.data.rows import Rows
from trainer.parallel.ranks import Ranks

_DTYPES = {
    "lengths": np.int64,
    "token_ids": np.int32,
    "logprobs": np.float32,
    "ages": np.int16,
    "current_until": np.int64,
    "group": np.int64,
    "advantages": np.float32,
    "temperatures": np.float32,
    "values": np.float32,
    "returns": np.float32,
    "teacher": np.float32,
    "right": np.bool_,
    "kept_counts": np.int32,
    "kept_ids": np.int32,
    "experts": np.int16,
    "segment": np.int64,
}
"""The columns of `Rows`, in its order."""

Pass = dict[str, bytes] | None
"""The columns of a pass's rows that there are; None for an idle pass."""


class Part(msgspec.Struct, frozen=True):
    """One rank's passes of one optimizer step, and `PackedBatch`'s figures of all ranks."""

    passes: list[Pass]
    tokens: int
    segments: int
    right: int
    fresh: int

    def packed(self, device: torch.device, stem_width: int | None) -> PackedBatch:
        size = BatchSize(self.tokens, self.segments, self.right)
        return PackedBatch(lay_passes(rows_of_passes(self.passes), device, stem_width), size, self.fresh)


class Train(msgspec.Struct, frozen=True, tag=True):
    """Make the optimizer steps of a batch, one for each of `parts`. `version`, `skipped`: the learner's before them;
    `settings`: the trainer's in force, JSON; `minibatches`: after so many parts the same ones come once more."""

    version: int
    skipped: int
    parts: list[Part]
    settings: bytes
    run_steps: int
    minibatches: int


class Measure(msgspec.Struct, frozen=True, tag=True):
    """Compute a value for every token of these rows, and tell it."""

    model: Literal["critic", "reference"]
    passes: list[Pass]


class Publish(msgspec.Struct, frozen=True, tag=True):
    """Publish this rank's part of the weights as `version`."""

    version: int


class Digest(msgspec.Struct, frozen=True, tag=True):
    """Hash this rank's part of the weights as `version`; nothing is published."""

    version: int


class Checkpoint(msgspec.Struct, frozen=True, tag=True):
    """Write this rank's part of a checkpoint under `folder`. `version`, `skipped`: the learner's."""

    folder: str
    version: int
    skipped: int


class Gather(msgspec.Struct, frozen=True, tag=True):
    """Take part in gathering the policy's weights."""


class Restore(msgspec.Struct, frozen=True, tag=True):
    """Load the checkpoint of `version`."""

    version: int


class Stop(msgspec.Struct, frozen=True, tag=True):
    """The run has ended, or was interrupted: nothing more will come."""


Order = Train | Measure | Publish | Digest | Checkpoint | Gather | Restore | Stop
_ORDERS: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


def encode(order: Order) -> bytes:
    return msgspec.msgpack.encode(order)


def decode(order: bytes) -> Order:
    return _ORDERS.decode(order)


def tell(ranks: Ranks, order: Order) -> None:
    """From rank 0: the same order to all others. Nothing where there is one rank."""
    if ranks.several:
        ranks.send([encode(order)] * ranks.layout.ranks)


def tell_shares(ranks: Ranks, order: Callable[[int], Order]) -> None:
    """The same, by the share of the rows that each rank has: `order(share)`."""
    if ranks.several:
        encoded = [encode(order(share)) for share in range(ranks.layout.shares)]
        ranks.send([encoded[ranks.layout.share(rank)] for rank in range(ranks.layout.ranks)])


def part_of(batch: SharedBatch, share: int) -> Part:
    """What the ranks of one share are told of a step."""
    size = batch.size
    return Part(passes_of(batch.shares[share]), size.tokens, size.segments, size.right, batch.fresh)


def passes_of(passes: Sequence[Rows | None]) -> list[Pass]:
    """As they travel."""
    return [None if rows is None else _columns(rows) for rows in passes]


def rows_of_passes(passes: Sequence[Pass]) -> list[Rows | None]:
    """The other way."""
    return [None if columns is None else _rows(columns) for columns in passes]


def _columns(rows: Rows) -> dict[str, bytes]:
    there = ((name, getattr(rows, name)) for name in _DTYPES)
    return {name: np.ascontiguousarray(column).tobytes() for name, column in there if column is not None}


def _rows(columns: dict[str, bytes]) -> Rows:
    # Copied: torch takes no array that cannot be written to.
    there: dict[str, npt.NDArray[Any]] = {
        name: np.frombuffer(column, _DTYPES[name]).copy() for name, column in columns.items()
    }
    if "experts" in there:
        there["experts"] = there["experts"].reshape(len(there["token_ids"]), -1)
    return Rows(**{name: there.get(name) for name in _DTYPES})  # type: ignore[arg-type]

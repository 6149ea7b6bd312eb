"""The layout of a trainer's ranks: how many share what, and which rank stands where. Pure.

ranks = replicate · data · context · tensor           a mesh of four dimensions, in this order, `tensor` innermost:
                                                      ranks of one tensor group are neighbours, on one machine

replicate   copies of everything below; each trains on rows of its own
data        weights, gradients and optimizer state are sharded over these; each trains on rows of its own
context     these share the tokens of the same rows
tensor      these share the matrices of each layer, for the same rows
expert      no dimension: the tensor ranks, or where there is one the neighbours among data ranks, that split a layer's
            experts
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

DIMENSIONS = ("replicate", "data", "context", "tensor")


class Coordinate(NamedTuple):
    """Where a rank stands in the mesh."""

    replicate: int
    data: int
    context: int
    tensor: int


@dataclass(frozen=True)
class Layout:
    replicate: int = 1
    data: int = 1
    context: int = 1
    tensor: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        """Raises ValueError for a number below 1, and for experts that neither all tensor ranks nor equal groups of data
        ranks can split."""
        for name in (*DIMENSIONS, "expert"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: there is at least one")
        if self.tensor > 1 and self.expert not in (1, self.tensor):
            raise ValueError(f"expert={self.expert}: the {self.tensor} tensor ranks split experts among all of them")
        if self.tensor == 1 and self.data % self.expert:
            raise ValueError(f"expert={self.expert} does not divide the {self.data} data ranks")

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the mesh, in the order of `DIMENSIONS`."""
        return self.replicate, self.data, self.context, self.tensor

    @property
    def ranks(self) -> int:
        return self.replicate * self.data * self.context * self.tensor

    @property
    def shares(self) -> int:
        """Into how many parts the rows of a batch are split."""
        return self.replicate * self.data

    @property
    def expert_on(self) -> Literal["tensor", "data"] | None:
        """Which ranks split experts; None where none do."""
        if self.expert == 1:
            return None
        return "tensor" if self.tensor > 1 else "data"

    def coordinate(self, rank: int) -> Coordinate:
        """Where `rank`, 0 … ranks − 1, stands. Raises ValueError for another."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} of {self.ranks}")
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        replicate, data = divmod(rest, self.data)
        return Coordinate(replicate, data, context, tensor)

    def rank(self, at: Coordinate) -> int:
        """Which rank stands there."""
        return ((at.replicate * self.data + at.data) * self.context + at.context) * self.tensor + at.tensor

    def share(self, rank: int) -> int:
        """Which part of the rows `rank` trains on: ranks that differ in context or tensor alone have the same."""
        at = self.coordinate(rank)
        return at.replicate * self.data + at.data

    def __iter__(self) -> Iterator[Coordinate]:
        """Every rank's place, in the order of ranks."""
        return (self.coordinate(rank) for rank in range(self.ranks))

    def __str__(self) -> str:
        named = [f"{getattr(self, name)} {name}" for name in (*DIMENSIONS, "expert") if getattr(self, name) > 1]
        return " × ".join(named) or "1 rank"


ALONE = Layout()
"""One process."""


def layout_of(
    ranks: int,
    *,
    data: int | Literal["auto"] = "auto",
    replicate: int = 1,
    tensor: int = 1,
    context: int = 1,
    expert: int = 1,
) -> Layout:
    """The layout of `ranks` processes; `data` auto: what the others leave. Raises ValueError, with the sum, where it is
    none."""
    others = replicate * context * tensor
    if data == "auto":
        if ranks % others:
            raise ValueError(
                f"{ranks} ranks cannot be split: replicate {replicate} × context {context} × tensor {tensor} = {others}"
            )
        data = ranks // others
    if data * others != ranks:
        raise ValueError(
            f"replicate {replicate} × data {data} × context {context} × tensor {tensor} = {data * others} ranks, and "
            f"there are {ranks}"
        )
    return Layout(replicate, data, context, tensor, expert)

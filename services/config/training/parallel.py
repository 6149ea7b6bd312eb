"""Settings of a trainer on several ranks: processes, each with a device of its own, that train one policy together.

`services.policies.training.layout` has the rule by which they share the work, `docs/parallel.md` tells it.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from services.config.base import Section


class ParallelSettings(Section):
    """How many ranks there are of each kind; the trainer's processes are replicate · data · context · tensor. And what
    they do with the weights that they collect."""

    data: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        default="auto",
        description="Ranks that hold a share of weights and optimizer state each, and train on a share of the rows; auto: "
        "as many as were started, one for `rollmesh up`, and as many as split experts",
    )
    replicate: int = Field(default=1, ge=1, description="Copies of all that: data ranks of another machine, say")
    tensor: int = Field(default=1, ge=1, description="Ranks that split each layer's matrices")
    context: int = Field(default=1, ge=1, description="Ranks that split each row's tokens")
    expert: int = Field(
        default=1,
        ge=1,
        description="Ranks that split each layer's experts: all tensor ranks, or with one of these so many of the data "
        "ranks each",
    )
    reshard_after_forward: bool | Literal["auto"] = Field(
        default="auto",
        description="Whether ranks give up each layer's weights after its forward pass, and collect them once more for its "
        "backward pass (FSDP2's word); auto: unless keeping them adds at most a tenth to a step's memory",
    )

    @property
    def least_ranks(self) -> int:
        """How many ranks there are, with as few data ranks for `auto` as can be."""
        return self.least_data * self.replicate * self.tensor * self.context

    @property
    def least_data(self) -> int:
        """How many data ranks there are; for `auto` one, or those that split experts."""
        if self.data != "auto":
            return self.data
        return self.expert if self.tensor == 1 else 1

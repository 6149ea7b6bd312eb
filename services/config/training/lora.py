"""Settings of low-rank adapters (LoRA)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from services.config.base import Section

ALL_LINEAR = "all-linear"


def _named(value: object) -> object:
    if value == ALL_LINEAR or (isinstance(value, list) and value and all(isinstance(name, str) for name in value)):
        return value
    raise ValueError(f'write {ALL_LINEAR}, or a list of module names: ["q_proj", "v_proj"]')


def _none(dropout: float) -> float:
    if dropout:
        raise ValueError("leave it out: the ratio to the engine's policy must come from the weights alone")
    return dropout


Targets = Annotated[Literal["all-linear"] | list[str], BeforeValidator(_named)]


class LoraSettings(Section):
    """y = W·x + (alpha / rank)·B·A·x, of which A and B are trained (Hu et al. 2021, arXiv:2106.09685, section 4.1)."""

    rank: int = Field(
        default=0, ge=0, description="Rows of A and columns of B; 0: no adapters, all weights are trained"
    )
    alpha: int = Field(default=32, ge=1, description="The adapters' part is multiplied by alpha / rank")
    targets: Targets = Field(
        default="all-linear",
        description="Linear layers that get adapters, by the ends of their names; all-linear: all but the language head",
    )
    dropout: Annotated[float, AfterValidator(_none)] = Field(default=0.0, description="0, and nothing else")

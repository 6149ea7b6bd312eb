"""Settings of the devices that `rollmesh up` gives to trainer ranks and engines (`services.policies.placement`)."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from services.config.base import Section


class PlacementSettings(Section):
    devices: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|\d+x(\d+x)?\d+(\.\d+)?)$",
        description="The GPUs: auto, as NVML lists them; cpu: none; or their number and the GiB of each, 8x80",
    )
    shared: Literal["auto", "always", "never"] = Field(
        default="auto", description="Whether trainer and engines share a GPU; auto: where there is one alone"
    )

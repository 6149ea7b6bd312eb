"""Which device's memory the two ends of the wire use, by the settings, the libraries' environment and what is free."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import cast, get_args

import torch

from services.policies.placement.wire_memory import WireMemory, fits, on_device, what_is_missing
from services.policies.training.memory import Estimate
from services.wire.errors import UsageError
from weight_bus.memory.device import CudaMemory, DeviceMemory
from weight_bus.transports.environment import NIXL_BACKEND, NIXL_MEMORY
from weight_bus.transports.select import resolve

Make = Callable[[int], DeviceMemory]
"""A device's memory, by its number."""


def reading_memory(
    transport: str, device: torch.device, environment: Mapping[str, str] = os.environ, make: Make = CudaMemory
) -> DeviceMemory | None:
    """An engine's, whose weights are on `device`; None: the host's.

    Raises UsageError where `weights.nixl.memory=device` and that cannot be.
    """
    missing, remedy = _missing(transport, device, environment)
    if not on_device(_wanted(environment), missing, remedy):
        return None
    return make(_number(device))


def publishing_memory(
    transport: str,
    device: torch.device,
    step: Estimate | None,
    environment: Mapping[str, str] = os.environ,
    make: Make = CudaMemory,
) -> DeviceMemory | None:
    """A trainer's, whose weights are on `device`; None: the host's. `step`: what one takes, by the formula.

    Raises UsageError where `weights.nixl.memory=device` and that cannot be.
    """
    missing, remedy = _missing(transport, device, environment)
    wanted = _wanted(environment)
    if missing is None and wanted == "auto":
        free, _ = torch.cuda.mem_get_info(device)
        if not fits(free, step, torch.cuda.memory_allocated(device)):
            return None
    if not on_device(wanted, missing, remedy):
        return None
    return make(_number(device))


def _missing(transport: str, device: torch.device, environment: Mapping[str, str]) -> tuple[str | None, str]:
    backend = environment.get(NIXL_BACKEND, "UCX")
    return what_is_missing(resolve(transport), str(device), environment.get("UCX_TLS"), backend)


def _wanted(environment: Mapping[str, str]) -> WireMemory:
    wanted = environment.get(NIXL_MEMORY, "auto")
    if wanted not in get_args(WireMemory):
        raise UsageError(f"{NIXL_MEMORY}={wanted} is not known", f"known: {', '.join(get_args(WireMemory))}")
    return cast("WireMemory", wanted)


def _number(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index

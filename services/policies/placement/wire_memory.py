"""Where weights lie on the wire, at either end: in a device's memory or in the host's. Pure.

weights.nixl.memory   host     the host's, at both ends
                      device   a GPU's, or a refusal that says what is missing
                      auto     a GPU's, where nothing is missing
"""

from __future__ import annotations

from typing import Literal

from services.policies.training.memory import SURE, Estimate
from services.wire.errors import UsageError

WireMemory = Literal["auto", "host", "device"]
"""`weights.nixl.memory`."""
_DEVICE_TRANSPORTS = frozenset({"all", "cuda", "cuda_copy"})


def on_device(wanted: WireMemory, missing: str | None, remedy: str) -> bool:
    """Whether a device's memory is used. Raises UsageError where that is `wanted`, and something is `missing`."""
    if wanted == "device" and missing is not None:
        raise UsageError(f"weights.nixl.memory=device cannot be: {missing}", remedy)
    return wanted != "host" and missing is None


def what_is_missing(transport: str, device: str, ucx: str | None, backend: str = "UCX") -> tuple[str | None, str]:
    """Why weights on `device` (torch's word, such as `cuda:0`) cannot go over the wire as they are, and what to do.

    `transport`: as resolved. `ucx`: the transports that UCX was told (`UCX_TLS`); None: none, it gets ours.
    """
    if transport != "nixl":
        return f"weights.transport={transport} reads the host's memory", "set weights.transport=nixl, or leave it out"
    if not device.startswith("cuda"):
        return f"the weights are on {device}, not on a GPU", "set weights.nixl.memory=auto: it is chosen at each end"
    if backend == "UCX" and ucx is not None and not _names_devices(ucx):
        return (
            f"UCX may use {ucx} alone, which do not know a GPU's memory",
            "add cuda_copy, and cuda_ipc for engines on the same machine, to weights.nixl.transports",
        )
    return None, ""


def fits(free: int, step: Estimate | None, held: int) -> bool:
    """Whether what versions are published from goes on a device with `free` bytes beside a step, `held` of whose bytes are
    taken already. `step`: None where that is not known: then it does not.
    """
    if step is None:
        return False
    return step.host.get("publishing", 0) + max(0.0, SURE * step.total - held) <= free


def _names_devices(ucx: str) -> bool:
    if ucx.startswith("^"):
        return not _DEVICE_TRANSPORTS & set(ucx[1:].split(","))
    return bool(_DEVICE_TRANSPORTS & set(ucx.split(",")))

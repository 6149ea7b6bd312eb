"""The GPUs of this machine, as NVML lists them, with the cores that are near each; or those that somebody states.

    NVML ─► bytes, PCI address ─► /sys ─► NUMA node, cores near it ─► Device, a GPU
    "8x80"  eight of 80 GiB       "2x8x80"  on two machines

Devices are numbered in PCI order, as NVML does. CUDA's own order is by speed: a process that is given numbers is told
`CUDA_DEVICE_ORDER=PCI_BUS_ID` too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from services.wire.errors import UsageError
from services.wire.extras import install

VISIBLE = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
_STATED = re.compile(r"(?:(\d+)x)?(\d+)x(\d+(?:\.\d+)?)")
_PCI = Path("/sys/bus/pci/devices")
_CONTROL = Path("/dev/nvidiactl")


@dataclass(frozen=True)
class Device:
    """A GPU. `name`: what CUDA_VISIBLE_DEVICES calls it on its machine, `host`: 0, 1 …; `nbytes`: of its memory.

    `numa`: its NUMA node, `cores`: those near it; None and none where nobody says.
    """

    name: str
    nbytes: int
    host: int = 0
    numa: int | None = None
    cores: tuple[int, ...] = ()
    model: str = ""


def stated_devices(text: str, environ: Mapping[str, str]) -> list[Device]:
    """`8x80`: eight GPUs of 80 GiB, `2x8x80`: on each of two machines.

    Where this process is itself given some by CUDA_VISIBLE_DEVICES, those are meant, in their order. Raises UsageError.
    """
    found = _STATED.fullmatch(text)
    if found is None or not int(found[1] or 1) or not int(found[2]) or not float(found[3]):
        raise UsageError(
            f"{text!r} is no number of GPUs with their GiB", "write 8x80, or 2x8x80 for two machines of eight"
        )
    hosts, count = int(found[1] or 1), int(found[2])
    given = [name.strip() for name in environ.get(VISIBLE, "").split(",") if name.strip()]
    if hosts == 1 and given and len(given) < count:
        raise UsageError(
            f"{text} states {count} GPUs, and {VISIBLE}={environ[VISIBLE]} names {len(given)}", "state as many"
        )
    names = given[:count] if hosts == 1 and given else [str(number) for number in range(count)]
    nbytes = int(float(found[3]) * (1 << 30))
    return [Device(name, nbytes, host) for host in range(hosts) for name in names]


def read_gpus(environ: Mapping[str, str], nvml: Any = None, pci: Path = _PCI) -> list[Device]:
    """The GPUs that NVML lists, of those that CUDA_VISIBLE_DEVICES leaves to this process; none where there is no driver.

    `nvml`: the module `pynvml`, imported where it is None. Raises UsageError where it is missing beside a driver, where
    the driver fails, and for a slice of a GPU (MIG) in CUDA_VISIBLE_DEVICES.
    """
    if nvml is None:
        if find_spec("pynvml") is None:
            if _CONTROL.exists():
                raise UsageError(
                    "there is a GPU's driver, and nvidia-ml-py is not installed, which lists its GPUs",
                    f"{install('torch')}, or state them: placement.devices=8x80",
                )
            return []
        nvml = import_module("pynvml")
    try:
        nvml.nvmlInit()
    except nvml.NVMLError_LibraryNotFound:
        return []
    except nvml.NVMLError as error:
        if not _CONTROL.exists():
            return []
        raise UsageError(
            f"the GPUs cannot be listed ({error})", "see nvidia-smi, or state them: placement.devices=8x80"
        ) from error
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles]
        return [_read(nvml, handles[index], name, pci) for name, index in _visible(environ.get(VISIBLE), uuids)]
    except nvml.NVMLError as error:
        raise UsageError(
            f"a GPU cannot be asked for its memory ({error})", "see nvidia-smi, or state them: placement.devices=8x80"
        ) from error
    finally:
        nvml.nvmlShutdown()


def _visible(given: str | None, uuids: list[str]) -> list[tuple[str, int]]:
    """(name, index) of those that `given` leaves, by the rule of CUDA: what follows an unknown one is not seen."""
    if given is None:
        return [(str(index), index) for index in range(len(uuids))]
    found: list[tuple[str, int]] = []
    for name in (each.strip() for each in given.split(",")):
        if name.startswith("MIG-"):
            raise UsageError(
                f"{VISIBLE}={given} names a slice of a GPU, whose memory NVML does not tell here",
                "state what there is: placement.devices=1x40",
            )
        index = next((number for number, uuid in enumerate(uuids) if name and name in (str(number), uuid)), None)
        if index is None:
            break
        found.append((name, index))
    return found


def _read(nvml: Any, handle: Any, name: str, pci: Path) -> Device:
    # NVML writes the domain with eight digits, the kernel with four, in small letters.
    domain, _, rest = _text(nvml.nvmlDeviceGetPciInfo(handle).busId).lower().partition(":")
    place = pci / f"{domain[-4:]}:{rest}"
    numa = _line(place / "numa_node")
    return Device(
        name,
        int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        numa=int(numa) if numa.isdigit() else None,
        cores=cores_of(_line(place / "local_cpulist")),
        model=_text(nvml.nvmlDeviceGetName(handle)),
    )


def cores_of(text: str) -> tuple[int, ...]:
    """`0-3,8` as its numbers. Raises ValueError for another text."""
    cores: list[int] = []
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores += range(int(first), int(last or first) + 1)
    return tuple(cores)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _line(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""

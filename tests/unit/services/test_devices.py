"""The GPUs of a machine by NVML, by hand, and the cores that a process keeps to."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.host.cores import VARIABLE, as_text, numa_nodes
from services.host.devices import Device, cores_of, read_gpus, stated_devices
from services.wire.errors import UsageError

GIB = 1 << 30


class NvmlError(Exception):
    pass


class LibraryMissingError(NvmlError):
    pass


class Nvml:
    """NVML's calls, over GPUs of 80 GiB at 3B:00.0, 3C:00.0 …"""

    NVMLError = NvmlError
    NVMLError_LibraryNotFound = LibraryMissingError

    def __init__(self, count: int, fails: type[NvmlError] | None = None) -> None:
        self.count, self.fails, self.open = count, fails, 0

    def nvmlInit(self) -> None:
        if self.fails is not None:
            raise self.fails("no driver")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, index: int) -> str:
        return f"GPU-{index:04d}"

    def nvmlDeviceGetPciInfo(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:{0x3B + index:02X}:00.0".encode())

    def nvmlDeviceGetMemoryInfo(self, index: int) -> SimpleNamespace:
        return SimpleNamespace(total=80 * GIB + index)

    def nvmlDeviceGetName(self, index: int) -> bytes:
        return b"a card"


def pci(folder: Path) -> Path:
    for index in range(2):
        place = folder / f"0000:{0x3B + index:02x}:00.0"
        place.mkdir()
        (place / "numa_node").write_text(f"{index}\n")
        (place / "local_cpulist").write_text("0-3,8\n" if index == 0 else "4-7\n")
    return folder


def test_gpus_are_listed_with_their_memory_and_the_cores_near_them(tmp_path: Path) -> None:
    nvml = Nvml(3)
    found = read_gpus({}, nvml, pci(tmp_path))
    assert found == [
        Device("0", 80 * GIB, numa=0, cores=(0, 1, 2, 3, 8), model="a card"),
        Device("1", 80 * GIB + 1, numa=1, cores=(4, 5, 6, 7), model="a card"),
        Device("2", 80 * GIB + 2, model="a card"),
    ]
    assert nvml.open == 0


@pytest.mark.parametrize(
    ("visible", "names"),
    [("2,0", ["2", "0"]), ("GPU-0001", ["GPU-0001"]), ("1,9,0", ["1"]), ("", []), ("-1", [])],
)
def test_only_gpus_that_are_visible_here_are_given_away(visible: str, names: list[str], tmp_path: Path) -> None:
    assert [each.name for each in read_gpus({"CUDA_VISIBLE_DEVICES": visible}, Nvml(3), tmp_path)] == names


def test_a_slice_of_a_gpu_is_to_be_stated(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"placement\.devices=1x40"):
        read_gpus({"CUDA_VISIBLE_DEVICES": "MIG-7"}, Nvml(1), tmp_path)


def test_without_a_driver_there_is_no_gpu(tmp_path: Path) -> None:
    assert read_gpus({}, Nvml(1, LibraryMissingError), tmp_path) == []


def test_gpus_are_stated_by_number_and_memory() -> None:
    assert stated_devices("2x80", {}) == [Device("0", 80 * GIB), Device("1", 80 * GIB)]
    assert [(each.host, each.name) for each in stated_devices("2x2x80", {})] == [(0, "0"), (0, "1"), (1, "0"), (1, "1")]
    mine = stated_devices("2x40.5", {"CUDA_VISIBLE_DEVICES": "4,MIG-7,6"})
    assert [(each.name, each.nbytes) for each in mine] == [("4", int(40.5 * GIB)), ("MIG-7", int(40.5 * GIB))]
    with pytest.raises(UsageError, match=r"states 2 GPUs, and CUDA_VISIBLE_DEVICES=4 names 1"):
        stated_devices("2x80", {"CUDA_VISIBLE_DEVICES": "4"})
    for wrong in ("8", "0x80", "8x", "x80", "8x0"):
        with pytest.raises(UsageError, match="write 8x80"):
            stated_devices(wrong, {})


def test_cores_are_read_and_written_as_the_kernel_does(tmp_path: Path) -> None:
    assert as_text((0, 1, 2, 5, 7, 8)) == "0-2,5,7-8"
    assert cores_of("0-2,5,7-8\n") == (0, 1, 2, 5, 7, 8)
    for number, cores in ((0, "0-3"), (1, "4-7"), (10, "8-9")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(cores)
    assert numa_nodes(range(1, 9), tmp_path) == [(1, 2, 3), (4, 5, 6, 7), (8,)]
    assert numa_nodes([1, 0], tmp_path / "none") == [(0, 1)]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_a_process_keeps_to_the_cores_that_it_is_told() -> None:
    mine = sorted(os.sched_getaffinity(0))
    last = mine[-1]
    code = "import os; from services.host.cores import keep_to_cores as k; k(); print(sorted(os.sched_getaffinity(0)))"

    def kept(told: str, **variables: str) -> str:
        environ = {**os.environ, VARIABLE: told, **variables}
        command = [sys.executable, "-P", "-c", code]
        return subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=30, check=True
        ).stdout.strip()

    assert kept(str(last)) == f"[{last}]"
    assert kept(f"{mine[0]};{last}", LOCAL_RANK="1") == f"[{last}]"
    refused = subprocess.run(
        [sys.executable, "-P", "-m", "services", "--help"],
        env={**os.environ, VARIABLE: "99999"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert refused.returncode == 2
    assert "ROLLMESH_CORES=99999 cannot be kept to" in refused.stderr

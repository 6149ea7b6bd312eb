"""What the test on two GPUs measures (`tests/gpu/test_nixl_devices.py`), with the host's memory at both ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.weights.device_wire import measure_device_wire
from weight_bus.transports.select import nixl_installed

pytestmark = pytest.mark.skipif(not nixl_installed(), reason="nixl is not installed")


async def test_one_process_reads_the_memory_of_another_whole(tmp_path: Path) -> None:
    times = await measure_device_wire((4 << 20) + 3, 2, tmp_path, "cpu", "cpu")
    assert times.equal
    assert len(times.nixl_vs_copy()) == 2 and all(share > 0 for share in times.nixl_vs_copy())

"""NIXL between the memories of two GPUs, beside a copy between the two by the driver."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
import torch

from benchmarks.weights.device_wire import measure_device_wire
from weight_bus.transports.select import nixl_installed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs"),
    pytest.mark.skipif(not nixl_installed(), reason="nixl is not installed"),
]
NBYTES = 1 << 30
LEAST_SHARE = 0.9


async def test_nixl_reads_device_memory_nearly_as_fast_as_a_peer_copy(tmp_path: Path) -> None:
    times = await measure_device_wire(NBYTES, 7, tmp_path, "cuda:0", "cuda:1")
    assert times.equal
    assert median(times.nixl_vs_copy()) >= LEAST_SHARE, (torch.cuda.get_device_name(), times)

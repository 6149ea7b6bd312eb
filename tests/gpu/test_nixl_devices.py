"""NIXL between GPUs' memories, in the product: whole versions, and how fast, beside a copy by the driver."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import msgspec
import pytest
import torch

from benchmarks.weights.device_wire import measure_device_wire
from tests.support.device_trainer import RUN, Trainer, memory_of, weights_of
from tests.weight_parts import PlainTarget
from weight_bus.errors import StageError
from weight_bus.manifest.manifest import NixlSource
from weight_bus.receiver.receiver import Receiver
from weight_bus.transports.nixl import NixlReader
from weight_bus.transports.select import nixl_installed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.alone,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.skipif(not nixl_installed(), reason="nixl is not installed"),
]
NBYTES = 1 << 30
LEAST_SHARE = 0.9


def test_versions_come_from_gpu_to_gpu_and_no_byte_is_served_that_was_not_hashed() -> None:
    """From another process; between two GPUs, where there are two."""
    here = f"cuda:{torch.cuda.device_count() - 1}"
    trainer, memory = Trainer("cuda:0"), memory_of(here)
    target = PlainTarget(weights_of(0, here))
    receiver = Receiver(target, RUN, [NixlReader(30.0, memory)])
    try:
        for version in (1, 2, 3):
            manifest = trainer.publish(version)
            [source] = manifest.owners[0].sources
            assert isinstance(source, NixlSource) and source.memory == "VRAM"
            receiver.stage(manifest)
            receiver.commit(version)
            expected = weights_of(version, here)
            assert all(torch.equal(target.live()[name], tensor) for name, tensor in expected.items())
            assert receiver.digest().root_digest == manifest.root_digest
        manifest = msgspec.structs.replace(trainer.publish(4), delta=None, kind="dense", base_version=None)
        trainer.spoil()
        with pytest.raises(StageError, match="has the hash"):
            receiver.stage(manifest)
        assert receiver.version == 3
    finally:
        receiver.close()
        trainer.end()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
async def test_nixl_reads_device_memory_nearly_as_fast_as_a_peer_copy(tmp_path: Path) -> None:
    times = await measure_device_wire(NBYTES, 7, tmp_path, "cuda:0", "cuda:1")
    assert times.equal
    assert median(times.nixl_vs_copy()) >= LEAST_SHARE, (torch.cuda.get_device_name(), times)

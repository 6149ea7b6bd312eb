"""How long `publish` keeps the trainer, beside one memcpy of the same bytes. A measuring function, no command.

    rounds, interleaved:   memcpy, publish | publish, memcpy | …      both on warm memory, on the calling thread

The manifest of a version is waited for outside the measured time, so that the next `publish` finds a free half.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

import torch

from weight_bus.arena import populate, private_arena
from weight_bus.publisher import Publisher
from weight_bus.transports.base import Exporter


@dataclass(frozen=True)
class PublishTimes:
    """Milliseconds a round. `nbytes`: those that memcpy moves, the bytes of the trainer's own tensors."""

    nbytes: int
    memcpy_ms: list[float]
    publish_ms: list[float]
    manifest_ms: list[float]
    """From the call of `publish` to its manifest."""

    @property
    def publish_vs_memcpy(self) -> float:
        """Medians: how often one memcpy goes into the time that `publish` blocks."""
        return median(self.publish_ms) / median(self.memcpy_ms)


def time_publishing(
    tensors: Mapping[str, torch.Tensor], dtype: str, exporter: Exporter, bucket_bytes: int, rounds: int
) -> PublishTimes:
    """Publish `tensors` (float, contiguous) `rounds` times and copy as many bytes as often. Closes the exporter."""
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    here, there = private_arena(nbytes), private_arena(nbytes)
    for arena in (here, there):
        populate(arena)
    publisher = Publisher("bench", tensors, dtype, exporter, bucket_bytes)
    times = PublishTimes(nbytes, [], [], [])
    try:
        # The first round warms both up and is not counted.
        for number in range(rounds + 1):
            for arm in ("memcpy", "publish") if number % 2 else ("publish", "memcpy"):
                started = time.perf_counter()
                if arm == "memcpy":
                    ctypes.memmove(there.address, here.address, nbytes)
                    times.memcpy_ms.append((time.perf_counter() - started) * 1e3)
                else:
                    publication = publisher.publish(number, tensors)
                    times.publish_ms.append((time.perf_counter() - started) * 1e3)
                    publication.manifest()
                    times.manifest_ms.append((time.perf_counter() - started) * 1e3)
        for figures in (times.memcpy_ms, times.publish_ms, times.manifest_ms):
            del figures[0]
        return times
    finally:
        publisher.close()
        here.close()
        there.close()

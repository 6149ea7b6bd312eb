"""Inputs and progress of one stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from weight_bus.errors import StageError
from weight_bus.manifest.manifest import Manifest
from weight_bus.memory.arena import Arena, private_arena
from weight_bus.receiver.buckets import BucketPlan
from weight_bus.transports.base import Reader


class Progress:
    """Progress of a stage. Written by its thread, read by any."""

    def __init__(self, version: int, total_bytes: int) -> None:
        self.version = version
        self.total_bytes = total_bytes
        self.bytes_read = 0
        self._started = time.monotonic()

    def begin_anew(self, total_bytes: int) -> None:
        self.total_bytes, self.bytes_read = total_bytes, 0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started


class Scratch:
    """Reusable host buffer: transports register it once."""

    def __init__(self) -> None:
        self._arena: Arena | None = None

    def of(self, nbytes: int) -> memoryview:
        if self._arena is None or self._arena.nbytes < nbytes:
            self.close()
            self._arena = private_arena(nbytes)
        return self._arena.view[:nbytes]

    def close(self) -> None:
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()


@dataclass(frozen=True)
class StageJob:
    """Inputs of a stage. `check` raises once a newer version supersedes it; called as bytes arrive.

    `at_once`: on a thread that must not wait; what would have to, raises NotAtOnceError.
    """

    manifest: Manifest
    plan: BucketPlan
    readers: Sequence[Reader]
    scratch: Scratch
    progress: Progress
    check: Callable[[], None]
    at_once: bool = False


def check_hash(manifest: Manifest, index: int, found: str) -> None:
    """Raise StageError unless bucket `index` has the hash that the manifest says."""
    expected = manifest.buckets[index].hash
    if found != expected:
        raise StageError(
            f"version {manifest.version}, bucket {index} has the hash {found[:16]}…, the manifest says {expected[:16]}…"
        )

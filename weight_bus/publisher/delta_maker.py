"""Deltas: how an arena changed from one version to the next, encoded beside its dense bytes where that pays."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from services.wire.errors import RollmeshError
from weight_bus.manifest.delta import WORD_DTYPES, changed_share, encode
from weight_bus.manifest.layout import hash_bytes
from weight_bus.manifest.manifest import DeltaBucket, DeltaPart
from weight_bus.memory.arena import Arena
from weight_bus.publisher.buffer_leases import BUFFERS
from weight_bus.transports.base import Exporter

TARGET_BYTES = 4 << 20
"""Bytes of an arena for one delta bucket: as fast as any size that was measured, and soon given up."""
_SAMPLES, _SAMPLE_BYTES = 8, 64 << 10
_SAMPLE_SLACK = 1.5
"""A code takes 0.85 to 1.3 of the share of changed words (measured): a sample above 1.5 of the bound cannot pay."""
Bytes = Callable[[int, int], memoryview]
"""Of an arena, from one place to another."""

_log = structlog.get_logger()


class DeltaMaker:
    """Encodes how an arena changed since the version before, in words of an element; at most `max_ratio` of its bytes.

        sample ── too much changed ──► none
        each 4 MiB of both buffers ──► code ──► this buffer's delta arena      too large, or the trainer waits ──► none

    Its two arenas are allocated for the first delta.
    """

    def __init__(self, exporter: Exporter, total_bytes: int, item_bytes: int, max_ratio: float) -> None:
        self._exporter = exporter
        self._total = total_bytes
        self._most = int(max_ratio * total_bytes)
        self._word_bytes = min(item_bytes, max(WORD_DTYPES))
        self._arenas: list[Arena] = []

    @property
    def held_bytes(self) -> int:
        return sum(arena.nbytes for arena in self._arenas)

    def make(self, buffer: int, old: Bytes, new: Bytes, give_up: Callable[[], bool]) -> DeltaPart | None:
        """What turns the arena's bytes `old` into `new`; None where no delta is offered.

        `give_up` is asked between two pieces. The code lies in this buffer's delta arena, in the host's memory, until the
        next call for it.
        """
        if not self._total:
            return DeltaPart(total_bytes=0, sources=[], buckets=[])
        if not self._sample_pays(old, new):
            return None
        arena = self._arena(buffer)
        if arena is None:
            return None
        buckets, position = [], 0
        for offset in range(0, self._total, TARGET_BYTES):
            if give_up():
                return None
            length = min(TARGET_BYTES, self._total - offset)
            code = encode(old(offset, offset + length), new(offset, offset + length), self._word_bytes)
            if not code:
                continue
            if position + len(code) > self._most:
                return None
            arena.view[position : position + len(code)] = code
            buckets.append(
                DeltaBucket(
                    offset=position,
                    length=len(code),
                    hash=hash_bytes(code),
                    target_offset=offset,
                    target_length=length,
                )
            )
            position += len(code)
        return DeltaPart(
            total_bytes=position,
            sources=[self._exporter.export(arena)] if buckets else [],
            buckets=buckets,
        )

    def _sample_pays(self, old: Bytes, new: Bytes) -> bool:
        """Whether so little changed in a sample that encoding it all may end under the bound."""
        step = max(_SAMPLE_BYTES, self._total // _SAMPLES // 64 * 64)
        ends = [(offset, min(offset + _SAMPLE_BYTES, self._total)) for offset in range(0, self._total, step)]
        changed = sum(
            changed_share(old(start, end), new(start, end), self._word_bytes) * (end - start) for start, end in ends
        )
        return changed * self._total <= _SAMPLE_SLACK * self._most * sum(end - start for start, end in ends)

    def _arena(self, buffer: int) -> Arena | None:
        if not self._arenas:
            try:
                self._arenas = [self._exporter.allocate(max(self._most, 1)) for _ in range(BUFFERS)]
            except RollmeshError as error:
                # Dense bytes always work: a delta only saves transfer.
                _log.warning("no arenas for weight deltas: publishing dense bytes alone", why=str(error))
                self._most = -1
                return None
        return self._arenas[buffer]

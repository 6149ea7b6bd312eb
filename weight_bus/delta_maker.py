"""Makes the delta that a manifest offers beside its dense bytes, where one is small enough and nobody is kept waiting.

sample ─ too much changed? ─► none
each 4 MiB of both halves ─► code ─► the delta arena of this half      over the share, or the trainer waits ─► none
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from services.wire.errors import RollmeshError
from weight_bus.arena import Arena
from weight_bus.delta import WORD_DTYPES, changed_share, encode
from weight_bus.halves import HALVES
from weight_bus.layout import ITEM_BYTES, hash_bytes
from weight_bus.manifest import Delta, DeltaBucket, Layout, Manifest
from weight_bus.transports.base import Exporter

TARGET_BYTES = 4 << 20
"""How much of the layout one delta bucket changes: as fast as any size that was measured, and soon given up."""
_SAMPLES, _SAMPLE_BYTES = 8, 64 << 10
_SAMPLE_SLACK = 1.5
"""A code takes 0.85 to 1.3 of the share of words that changed (measured): far more than the bound cannot end under it."""

_log = structlog.get_logger()


class DeltaMaker:
    """Deltas of at most `max_ratio` of the layout's bytes. Its two arenas are made when the first delta pays."""

    def __init__(self, exporter: Exporter, layout: Layout, max_ratio: float) -> None:
        self._exporter = exporter
        self._total = layout.total_bytes
        self._most = int(max_ratio * layout.total_bytes)
        smallest = min(ITEM_BYTES[entry.dtype] for entry in layout.tensors)
        self._word_bytes = min(smallest, max(WORD_DTYPES))
        self._arenas: list[Arena] = []

    def make(
        self, half: int, base: Manifest, old: memoryview, new: memoryview, give_up: Callable[[], bool]
    ) -> Delta | None:
        """The delta from `old`, the bytes of `base`, to `new`, both in the canonical layout; None where none is offered.

        `give_up` is asked between two pieces. The code lies in this half's delta arena until the next call for it.
        """
        if not self._sample_pays(old, new):
            return None
        arena = self._arena(half)
        if arena is None:
            return None
        buckets, position = [], 0
        for offset in range(0, self._total, TARGET_BYTES):
            if give_up():
                return None
            length = min(TARGET_BYTES, self._total - offset)
            code = encode(old[offset : offset + length], new[offset : offset + length], self._word_bytes)
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
        return Delta(
            base_version=base.version,
            base_digest=base.root_digest,
            total_bytes=position,
            sources=[self._exporter.export(arena)] if buckets else [],
            buckets=buckets,
        )

    def _sample_pays(self, old: memoryview, new: memoryview) -> bool:
        """Whether so little changed in a sample that encoding it all may end under the bound."""
        step = max(_SAMPLE_BYTES, self._total // _SAMPLES // 64 * 64)
        ends = [(offset, min(offset + _SAMPLE_BYTES, self._total)) for offset in range(0, self._total, step)]
        changed = sum(
            changed_share(old[start:end], new[start:end], self._word_bytes) * (end - start) for start, end in ends
        )
        return changed * self._total <= _SAMPLE_SLACK * self._most * sum(end - start for start, end in ends)

    def _arena(self, half: int) -> Arena | None:
        if not self._arenas:
            try:
                self._arenas = [self._exporter.allocate(max(self._most, 1)) for _ in range(HALVES)]
            except RollmeshError as error:
                # Dense bytes do for everyone: a delta only saves some of their way.
                _log.warning("no arenas for weight deltas: publishing dense bytes alone", why=str(error))
                self._most = -1
                return None
        return self._arenas[half]

"""Copies of weights are exact wherever both ends lie in memory, and arenas lie so that large ones are fast."""

from __future__ import annotations

import numpy as np
import pytest

from services.host.process import STREAMED_BYTES
from weight_bus.manifest.layout import place, plan_layout
from weight_bus.memory.arena import PAGE, copy_bytes, streams_well

ALLOCATED = 64
"""Where in a page torch's large tensors begin."""


@pytest.mark.parametrize("nbytes", [1, STREAMED_BYTES - 1, STREAMED_BYTES, 2 * STREAMED_BYTES + 12_345])
@pytest.mark.parametrize("further", [0, 16, 64, 512, 1024, 4032])
def test_a_copy_is_exact_wherever_it_lies(nbytes: int, further: int) -> None:
    raw = np.random.default_rng(nbytes).integers(0, 256, nbytes + 2 * PAGE, dtype=np.uint8)
    kept = np.zeros(nbytes + 3 * PAGE, dtype=np.uint8)
    source = raw[-raw.ctypes.data % PAGE :][:nbytes]
    begin = -kept.ctypes.data % PAGE + further
    copy_bytes(source.data, kept[begin : begin + nbytes].data)
    assert np.array_equal(kept[begin : begin + nbytes], source)
    assert not kept[:begin].any() and not kept[begin + nbytes :].any()


def test_what_writes_a_little_further_within_a_page_than_it_reads_keeps_to_the_caches() -> None:
    page = 1 << 20
    assert not streams_well(STREAMED_BYTES - 1, page, page)
    assert streams_well(STREAMED_BYTES, page, page)
    assert not streams_well(STREAMED_BYTES, page, page + 64)
    assert not streams_well(STREAMED_BYTES, page, page + 7 * PAGE + 64)
    assert streams_well(STREAMED_BYTES, page + 64, page)


def test_large_tensors_lie_so_that_copies_both_ways_go_past_the_caches() -> None:
    rows = STREAMED_BYTES // 4 // 1024
    layout = plan_layout({"a": (3,), "b": (rows, 1024), "c": (5, 7), "d": (2 * rows, 1024), "e": (1,)}, "float32")
    end = 0
    for entry in layout.tensors:
        assert entry.offset == place(end, entry.nbytes) >= end
        end = entry.offset + entry.nbytes
        if entry.nbytes >= STREAMED_BYTES:
            assert streams_well(entry.nbytes, ALLOCATED, entry.offset)
            assert streams_well(entry.nbytes, entry.offset, ALLOCATED)
        else:
            assert entry.offset % 64 == 0
    assert layout.total_bytes >= end

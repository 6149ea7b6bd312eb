"""Copies of weights are exact wherever both ends lie in memory, and arenas lie so that large ones are fast."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from services.host.process import STREAMED_BYTES
from services.wire.errors import UsageError
from weight_bus.errors import TransportError
from weight_bus.manifest.layout import place, plan_layout
from weight_bus.memory import arena as arenas
from weight_bus.memory.arena import PAGE, copy_bytes, private_arena, shared_arena, streams_well

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


def test_a_copy_into_another_size_or_into_what_cannot_be_written_is_refused() -> None:
    target = bytearray(4)
    with pytest.raises(ValueError, match="3 bytes into 4"):
        copy_bytes(memoryview(b"abc"), memoryview(target))
    assert target == bytes(4)
    with pytest.raises(ValueError, match="writable: False"):
        copy_bytes(memoryview(b"abcd"), memoryview(b"wxyz"))


def test_an_arena_that_cannot_be_mapped_is_an_error_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TransportError, match=f"no arena of {1 << 60} bytes could be mapped"):
        private_arena(1 << 60)
    monkeypatch.setattr(arenas, "shm_directory", lambda: tmp_path)
    with pytest.raises(TransportError, match="no arena of 0 bytes could be mapped at"):
        shared_arena(0, "run")
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(arenas, "shm_directory", lambda: tmp_path / "gone")
    with pytest.raises(UsageError, match=r"cannot make .* \(No such file"):
        shared_arena(64, "run")

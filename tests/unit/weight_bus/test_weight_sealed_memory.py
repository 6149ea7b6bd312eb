"""Sealed arenas and their mappings lie where huge pages can be, and ask for them until the kernel has an answer."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from weight_bus.transports.shm import SealedMapping, _make_huge, memfd_available, sealed_arena

HUGE_PAGE = 2 << 20


@pytest.fixture
def ragged() -> Iterator[None]:
    """An address space with gaps of many sizes, as a process has that has loaded libraries."""
    with ExitStack() as stack:
        between = [stack.enter_context(mmap.mmap(-1, pages * mmap.PAGESIZE)) for pages in range(1, 1500)]
        for each in between[::2]:
            each.close()
        yield


@pytest.mark.skipif(not memfd_available(), reason="no sealed memory here")
@pytest.mark.usefixtures("ragged")
def test_large_arenas_begin_where_a_huge_page_can(run_id: str) -> None:
    with ExitStack() as stack:
        for nbytes in (HUGE_PAGE, 3 * HUGE_PAGE + 4096, 20_000_123, 33_333_333, 5 * HUGE_PAGE - 1):
            arena = sealed_arena(nbytes, run_id)
            stack.callback(arena.close)
            arena.view[:] = content = bytes(range(256)) * (nbytes // 256) + bytes(nbytes % 256)
            mapping = SealedMapping(arena.link, nbytes)
            stack.callback(mapping.close)
            assert (arena.address % HUGE_PAGE, mapping._bytes.ctypes.data % HUGE_PAGE) == (0, 0), nbytes
            found = bytearray(nbytes)
            mapping.read(0, memoryview(found))
            assert found == content


class Asked:
    """Memory of a kernel that answers with these error numbers, then with yes."""

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)

    def madvise(self, advice: int, start: int, length: int) -> None:
        if self.answers:
            raise OSError(self.answers.pop(0), "not now")


@pytest.mark.parametrize(
    ("answers", "huge"),
    [((), True), ((errno.EAGAIN,) * 3, True), ((errno.EINVAL,), False), ((errno.EAGAIN,) * 99, False)],
)
def test_a_page_that_is_held_for_a_moment_is_no_refusal(answers: tuple[int, ...], huge: bool) -> None:
    assert _make_huge(Asked(*answers), 0, HUGE_PAGE) is huge  # type: ignore[arg-type]

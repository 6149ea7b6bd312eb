"""A rank that is gone is named, whatever it did last."""

from __future__ import annotations

import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import Store

from trainer.parallel.watch import Watch

BEAT_S, SILENT_S = 0.05, 1.0


@pytest.fixture
def store() -> Store:
    return TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)


@pytest.fixture
def watch(store: Store) -> Iterator[Callable[..., tuple[Watch, queue.Queue[str]]]]:
    """`watch(rank, others)`: one of two ranks, and what it says before it would end its process."""
    with ExitStack() as stack:

        def make(rank: int, *others: subprocess.Popen[bytes]) -> tuple[Watch, queue.Queue[str]]:
            said: queue.Queue[str] = queue.Queue()
            made = Watch(
                store.clone(),  # type: ignore[attr-defined]
                rank,
                2,
                others,
                ended=said.put,
                beat_s=BEAT_S,
                silent_s=SILENT_S,
            )
            stack.callback(made.close)
            return made, said

        yield make


def test_a_process_that_was_killed_is_named_with_its_signal(
    watch: Callable[..., tuple[Watch, queue.Queue[str]]],
) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        first, said = watch(0, process)
        watch(1)
        process.kill()
        process.wait()
        assert said.get(timeout=10) == "rank 1 ended with signal 9"
    assert first.named() == "rank 1 ended with signal 9"


def test_a_rank_says_why_it_fails(watch: Callable[..., tuple[Watch, queue.Queue[str]]]) -> None:
    _, said = watch(0)
    second, _ = watch(1)
    second.failed("ValueError: no such checkpoint")
    assert said.get(timeout=10) == "rank 1 failed: ValueError: no such checkpoint"


def test_a_rank_without_a_sign_of_life_ends_the_others_and_rank_0_itself(
    store: Store, watch: Callable[..., tuple[Watch, queue.Queue[str]]]
) -> None:
    first, said = watch(0)
    second, heard = watch(1)
    # One that has given none yet may still be starting.
    ends = time.monotonic() + 10.0
    while not store.add("beats/1", 0):
        assert time.monotonic() < ends
        time.sleep(BEAT_S)
    second.close()
    assert said.get(timeout=10).startswith("rank 1 has given no sign of life for 1 s")
    first.close()
    second, heard = watch(1)
    assert heard.get(timeout=10).startswith("rank 0 has given no sign of life")


def test_ranks_that_live_are_left_alone(watch: Callable[..., tuple[Watch, queue.Queue[str]]]) -> None:
    first, said = watch(0)
    second, heard = watch(1)
    with pytest.raises(queue.Empty):
        said.get(timeout=3 * SILENT_S)
    second.close()
    first.close()
    assert heard.empty() and first.named() is None

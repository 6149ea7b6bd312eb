"""Memory of the host that the ranks of one engine share while they stage a version: bytes, and how far each rank is.

    row of rank 0 │ here │ turn · step │ way │ done │      each rank writes its own row and reads the others'
    row of rank 1 │ here │ turn · step │ way │ done │
    part 0 ▒▒▒▒▒▒▒▒▒▒▒▒   part 1 ▒▒▒▒▒▒▒▒▒▒▒▒        the bytes of every other round lie in the same part

A round: every rank writes its share of the bytes into a part, all meet, and each uses what all have written. A rank can be
one round ahead of another, in the other part; it cannot write over bytes that are in use.

The file is made for one engine, and unlinked when all of its ranks have opened it.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

import numpy as np

from weight_bus.errors import StageError

PART_BYTES = 16 << 20
_COLUMNS = 4
_HERE, _PROGRESS, _WAY, _DONE = range(_COLUMNS)
_HEAD_BYTES = mmap.PAGESIZE
_STEPS = 32
_FAILED = (1 << _STEPS) - 1
SHARING_LEAST_S = 120.0
"""For another rank to come to a step; more for one that has more bytes to work on."""
_POLL_S = 0.0005
_ATTEMPTS = 2
"""Of one call: a delta, and the dense bytes after it."""


def sharing_bytes(part_bytes: int = PART_BYTES) -> int:
    """Size of the file."""
    return _HEAD_BYTES + 2 * part_bytes


class Way(IntEnum):
    """What a rank is about to do. KNOWN: nothing, the version lies in its shadow already."""

    DENSE = 1
    DELTA = 2
    KNOWN = 3


class RankSharing:
    """One rank's end. `path`: a file of `sharing_bytes` zeros. Raises OSError where it cannot be opened."""

    def __init__(self, path: Path, rank: int, ranks: int, deadline_s: float = SHARING_LEAST_S) -> None:
        self.rank, self.ranks = rank, ranks
        self._deadline_s = deadline_s
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)
        view = memoryview(self._memory)
        self.part_bytes = (len(view) - _HEAD_BYTES) // 2
        self._parts = [view[_HEAD_BYTES + number * self.part_bytes :][: self.part_bytes] for number in (0, 1)]
        self._rows = np.frombuffer(view, np.int64, ranks * _COLUMNS).reshape(ranks, _COLUMNS)
        self._post(_HERE, 1)

    @property
    def complete(self) -> bool:
        """Whether all ranks have opened the file: those of another host cannot. Each reads everything then."""
        return bool((self._rows[:, _HERE] == 1).all())

    def part(self, number: int) -> memoryview:
        """Of round `number`."""
        return self._parts[number % 2]

    @contextmanager
    def call(self, number: int, check: Callable[[], None], what: str) -> Iterator[Meeting]:
        """One stage of all ranks, whose core calls it by the same ascending number, from 1. An exception ends it for all.

        `check` is called while this rank waits for others, and raises when it need not wait any more. `what`: for errors.
        """
        meeting = Meeting(self, number * _ATTEMPTS, check, what)
        try:
            yield meeting
        except BaseException:
            meeting.fail()
            raise
        meeting.done()

    def _post(self, column: int, value: int) -> None:
        self._rows[self.rank, column] = value

    def _seen(self, rank: int, column: int) -> int:
        return int(self._rows[rank, column])


class Meeting:
    """Where the ranks wait for each other. Steps count from 0 in each turn: the first is `join`."""

    def __init__(self, sharing: RankSharing, turn: int, check: Callable[[], None], what: str) -> None:
        self._sharing, self._turn, self._check, self._what = sharing, turn, check, what
        self._step = 0
        self._over = False

    def join(self, way: Way) -> list[Way]:
        """Ways of all ranks, in their order. Before it returns, none writes into shared memory."""
        self._sharing._post(_WAY, way)
        self._meet(0)
        return [Way(self._sharing._seen(rank, _WAY)) for rank in range(self._sharing.ranks)]

    def meet(self) -> None:
        """Wait until every rank is here. Raises StageError, naming the rank, where one gave up, or the deadline passed."""
        self._step += 1
        self._meet(self._step)

    def skip(self) -> None:
        """This rank has nothing to read, whatever the others do."""
        self._sharing._post(_WAY, Way.KNOWN)
        self._post(0)

    def again(self) -> None:
        """Give this turn up, with all ranks, for the next attempt of the call; `join` it."""
        self.fail()
        self._turn, self._step = self._turn + 1, 0

    def fail(self) -> None:
        """This rank gives up, and with it the others; not once it is `done`: they need nothing more of it."""
        if not self._over:
            self._post(_FAILED)

    def done(self) -> None:
        """This rank was at the last step, and has used what the others wrote."""
        self._over = True
        self._sharing._post(_DONE, self._turn)

    def _post(self, step: int) -> None:
        # One word: turn and step are never seen apart.
        self._sharing._post(_PROGRESS, self._turn << _STEPS | step)

    def _meet(self, step: int) -> None:
        self._post(step)
        deadline = time.monotonic() + self._sharing._deadline_s
        for rank in range(self._sharing.ranks):
            while not self._is_at(rank, step):
                self._check()
                if time.monotonic() > deadline:
                    raise StageError(
                        f"{self._what}: rank {rank} did not come to step {step} within {self._sharing._deadline_s:g} s"
                    )
                time.sleep(_POLL_S)

    def _is_at(self, rank: int, step: int) -> bool:
        turn, at = divmod(self._sharing._seen(rank, _PROGRESS), 1 << _STEPS)
        if turn < self._turn:
            return False
        if turn > self._turn:
            if self._sharing._seen(rank, _DONE) == self._turn:
                return True
            raise StageError(f"{self._what}: rank {rank} has begun another attempt")
        if at == _FAILED:
            raise StageError(f"{self._what}: rank {rank} gave up")
        return at >= step

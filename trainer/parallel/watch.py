"""Watching the ranks: one that is gone ends all, and rank 0 says which it was.

    every rank      counts a beat in the store, every 2 s
    rank 0          a process that it started ended · a rank says that it failed · no beat for 20 s  ─► ends, names it
    others          no beat of rank 0 for 20 s · its store is gone                                   ─► end

A collective that waits for a rank that is gone cannot be called off, so the process ends from here.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

import structlog
from torch.distributed.distributed_c10d import Store

BEAT_S = 2.0
SILENT_S = 20.0
FAILED = 1
_NAMED_WITHIN_S = 2 * BEAT_S

_log = structlog.get_logger()


def _end(why: str) -> None:
    _log.error("a rank is gone: the trainer ends", why=why)
    # Not by an exception: the training thread may wait within a collective.
    os._exit(FAILED)


class Watch:
    """Of rank `rank` of `size`. `store`: used by nobody else at the same time; `others`: processes of ranks 1, 2, …, where
    this one started them. `ended`: what to do where a rank is gone; told why."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        others: Sequence[subprocess.Popen[bytes]] = (),
        *,
        ended: Callable[[str], None] = _end,
        beat_s: float = BEAT_S,
        silent_s: float = SILENT_S,
    ) -> None:
        self._store, self._rank, self._size, self._others, self._ended = store, rank, size, others, ended
        self._beat_s, self._silent_s = beat_s, silent_s
        self._heard: dict[int, tuple[int, float]] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The ranks are about to end as they should."""
        self._closing.set()
        self._thread.join(5.0)

    def failed(self, why: str) -> None:
        """Tell rank 0 why this one ends."""
        self.close()
        try:
            self._store.set(f"failed/{self._rank}", why)
        except RuntimeError:
            # Rank 0 is gone, too.
            return

    def named(self) -> str | None:
        """For rank 0, whose collective failed: which rank is gone, as soon as that shows; None where it does not."""
        self.close()
        ends = time.monotonic() + _NAMED_WITHIN_S
        while time.monotonic() < ends:
            if (why := self._who()) is not None:
                return why
            time.sleep(0.1)
        return None

    def _run(self) -> None:
        try:
            while not self._closing.wait(self._beat_s):
                self._store.add(f"beats/{self._rank}", 1)
                why = self._who() or self._silent()
                if why is not None and not self._closing.is_set():
                    self._ended(why)
                    return
        except RuntimeError as error:
            if not self._closing.is_set():
                self._ended(f"rank {self._rank} reaches the ranks' store no more ({error})")

    def _who(self) -> str | None:
        if self._rank:
            return None
        for rank, process in enumerate(self._others, start=1):
            if (code := process.poll()) is not None:
                said = f": {self._said(rank)}" if self._store.check([f"failed/{rank}"]) else ""
                return f"rank {rank} ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}{said}"
        for rank in range(1, self._size):
            if self._store.check([f"failed/{rank}"]):
                return f"rank {rank} failed: {self._said(rank)}"
        return None

    def _said(self, rank: int) -> str:
        return self._store.get(f"failed/{rank}").decode("utf-8", "replace")

    def _silent(self) -> str | None:
        now = time.monotonic()
        for rank in range(1, self._size) if self._rank == 0 else (0,):
            beats = self._store.add(f"beats/{rank}", 0)
            before, since = self._heard.get(rank, (-1, now))
            # One that has not begun yet is waited for where ranks meet.
            if beats != before or not beats:
                self._heard[rank] = (beats, now)
            elif now - since > self._silent_s:
                return f"rank {rank} has given no sign of life for {now - since:.0f} s"
        return None

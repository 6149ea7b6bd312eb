"""SIGTERM and Ctrl-C.

starting, concluding   at once: SystemExit unwinds, and everything opened is closed (nothing is lost: see `step_log`)
inside `graceful`      the step in hand is finished first; a second signal ends at once
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import structlog

_log = structlog.get_logger()


class Interrupt:
    """`requested`: the signal that asked for the end, None until then. True once one has."""

    def __init__(self) -> None:
        self.requested: int | None = None
        self._graceful = False

    def install(self) -> None:
        """Take over both signals; call it on the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    @contextmanager
    def graceful(self) -> Iterator[None]:
        """Within the block, the first signal only sets `requested`."""
        self._graceful = True
        try:
            yield
        finally:
            self._graceful = False

    def __bool__(self) -> bool:
        return self.requested is not None

    @property
    def exit_code(self) -> int:
        """As a shell reports a process that ended by the signal."""
        return 128 + (self.requested or 0)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        at_once = not self._graceful or self.requested is not None
        self.requested = number
        _log.info("stopping", signal=signal.Signals(number).name, after="now" if at_once else "this step")
        if at_once:
            raise SystemExit(self.exit_code)

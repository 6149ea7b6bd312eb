"""SIGTERM and Ctrl-C: the step in hand is finished, a checkpoint is written, then the trainer ends."""

from __future__ import annotations

import signal
from types import FrameType

import structlog

_log = structlog.get_logger()


class Interrupt:
    """`requested`: the signal that asked for the end, None until then. A second signal of the kind ends at once."""

    def __init__(self) -> None:
        self.requested: int | None = None

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def __bool__(self) -> bool:
        return self.requested is not None

    @property
    def exit_code(self) -> int:
        """As a shell reports a process that ended by the signal."""
        return 128 + (self.requested or 0)

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        _log.info("stopping after this step", signal=signal.Signals(number).name)
        self.requested = number
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

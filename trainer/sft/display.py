"""Progress of a training: a bar on a terminal, log lines elsewhere."""

from __future__ import annotations

import sys

import structlog

_log = structlog.get_logger()


class Display:
    """Used as a context: the bar is there within."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import Progress as Bars

        self._bars = Bars(console=Console(stderr=True), transient=True) if sys.stderr.isatty() else None
        self._rows: dict[str, int] = {}

    def __enter__(self) -> Display:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars is not None:
            self._bars.stop()

    def advance(self, name: str, described: str, step: int, steps: int) -> None:
        """Move the bar of this name; nothing elsewhere than on a terminal."""
        if self._bars is None:
            return
        if name not in self._rows:
            self._rows[name] = int(self._bars.add_task(described, total=steps))
        row = self._rows[name]
        self._bars.update(row, completed=step, description=described)  # type: ignore[arg-type]

    @property
    def has_bar(self) -> bool:
        return self._bars is not None

    def say(self, event: str, **measured: object) -> None:
        """A log line; a plain one above the bar where there is one."""
        if self._bars is None:
            _log.info(event, **measured)
            return
        said = " · ".join(f"{name.replace('_', ' ')} {value}" for name, value in measured.items())
        self._bars.console.print(f"{event}: {said}" if said else event, markup=False, highlight=False)

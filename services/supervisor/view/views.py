"""Views of a run: a screen that is redrawn in place on a terminal, plain lines where there is none."""

from __future__ import annotations

import time
from typing import Protocol

from rich.console import Console
from rich.live import Live

from services.observability.run_view.snapshot import Snapshot
from services.observability.terminal import as_text
from services.supervisor.view.facts import plain_facts, waits_of, warnings_of
from services.supervisor.view.screen import screen

PLAIN_EVERY_S = 5.0


class View(Protocol):
    """Where a run shows itself. `say` is for events, `show` for the state, at most a few times a second."""

    def __enter__(self) -> View: ...

    def __exit__(self, *_: object) -> None: ...

    def say(self, line: str) -> None: ...

    def show(self, snapshot: Snapshot) -> None: ...


def make_view(console: Console, *, plain: bool) -> View:
    """A live view on a terminal, plain lines elsewhere or on request."""
    return PlainView(console) if plain or not console.is_terminal else LiveView(console)


class PlainView:
    """A line an event, and one every few seconds: the share of the start that is done, then the state of training."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = self._said_at = time.monotonic()
        self._said_step = 0
        self._warned: set[str] = set()

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *_: object) -> None: ...

    def say(self, line: str) -> None:
        said = f"{time.monotonic() - self._began:6.1f} s  {as_text(line)}"
        self._console.print(said, markup=False, highlight=False)

    def show(self, snapshot: Snapshot) -> None:
        step, steps = snapshot.step, snapshot.steps
        due = time.monotonic() - self._said_at >= PLAIN_EVERY_S or (step == steps and step != self._said_step)
        if not due:
            return
        self._said_at, self._said_step = time.monotonic(), step
        facts = [f"{name} {value}" for name, value in plain_facts(snapshot)]
        waits = [f"{component} waits for {what}" for component, what in waits_of(snapshot)]
        self.say(" · ".join(facts + waits))
        warnings = warnings_of(snapshot)
        for sign, words in warnings:
            if sign not in self._warned:
                self.say(f"this run may not learn ({sign}): {words}")
        self._warned = {sign for sign, _ in warnings}


class LiveView:
    """One screen that is redrawn in place; events scroll above it."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, line: str) -> None:
        self._live.console.print(as_text(line), markup=False, highlight=False)

    def show(self, snapshot: Snapshot) -> None:
        self._live.update(screen(snapshot, self._live.console.width), refresh=True)

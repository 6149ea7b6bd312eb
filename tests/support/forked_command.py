"""Commands of rollmesh in processes of their own that have their imports already: seconds less each than a new Python.

They are forked from multiprocessing's fork server, which a RankPool uses too. Their environment is that of its start.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.support.rank_pool import PRELOAD


class ForkedCommand:
    """`rollmesh ARGUMENTS…`, whose standard error goes to the file `errors`, behind what is there."""

    def __init__(self, arguments: Sequence[str], errors: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._errors, self._from = errors, errors.stat().st_size if errors.exists() else 0
        self._process: BaseProcess = context.Process(target=_run, args=(list(arguments), str(errors)), daemon=True)
        self._process.start()

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that ended it), None while it runs."""
        return self._process.exitcode

    def send_signal(self, which: signal.Signals) -> None:
        os.kill(self._process.pid or 0, which)

    def errors(self) -> str:
        """What it has written to standard error so far."""
        return self._errors.read_bytes()[self._from :].decode()

    def wait(self, deadline_s: float) -> int:
        """Raises TimeoutError."""
        self._process.join(deadline_s)
        if self._process.exitcode is None:
            raise TimeoutError(f"it still runs after {deadline_s:g} s:\n{self.errors()}")
        return self._process.exitcode


def _run(arguments: list[str], errors: str) -> None:
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    sys.argv = ["rollmesh", *arguments]
    from services.cli import main

    main()

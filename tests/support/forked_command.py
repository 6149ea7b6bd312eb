"""Commands of rollmesh in processes of their own that have their imports already: seconds less each than a new Python.

They are forked from multiprocessing's fork server, which a RankPool uses too; their environment is the caller's.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from services.host.process import missing_tunables
from tests.support.mesh_command import Finished
from tests.support.rank_pool import PRELOAD


class ForkedCommand:
    """`rollmesh ARGUMENTS…`, which writes to the files `out` and `err`, behind what is in `err`."""

    def __init__(self, arguments: Sequence[str], err: Path, out: Path = Path(os.devnull)) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._err, self._from = err, err.stat().st_size if err.exists() else 0
        streams = {1: str(out), 2: str(err)}
        self._process: BaseProcess = context.Process(
            target=_run, args=(list(arguments), streams, dict(os.environ)), daemon=True
        )
        self._process.start()

    def poll(self) -> int | None:
        """Its exit code (negative: the signal that ended it), None while it runs."""
        return self._process.exitcode

    def send_signal(self, which: signal.Signals) -> None:
        os.kill(self._process.pid or 0, which)

    def errors(self) -> str:
        """What it has written to standard error so far."""
        return self._err.read_bytes()[self._from :].decode()

    def wait(self, deadline_s: float) -> int:
        """Raises TimeoutError."""
        self._process.join(deadline_s)
        if self._process.exitcode is None:
            raise TimeoutError(f"it still runs after {deadline_s:g} s:\n{self.errors()}")
        return self._process.exitcode


def run_forked(arguments: Sequence[str], folder: Path, *, deadline_s: float = 120.0) -> Finished:
    """Run a command to its end; what it writes is kept in `folder` meanwhile."""
    out, began = folder / "command.out", time.monotonic()
    out.unlink(missing_ok=True)
    command = ForkedCommand(arguments, folder / "command.err", out)
    code = command.wait(deadline_s)
    return Finished(code, out.read_text(), command.errors(), time.monotonic() - began)


def exit_code_of(program: str, *, deadline_s: float = 120.0) -> int | None:
    """Of a process that executes `program`, with nothing imported but PRELOAD and what that needs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    process = context.Process(target=exec, args=(program,), daemon=True)
    process.start()
    process.join(deadline_s)
    return process.exitcode


def _run(arguments: list[str], streams: dict[int, str], environ: dict[str, str]) -> None:
    os.environ.clear()
    # Without the tunables of memory it would begin again, as a Python without the imports.
    os.environ.update(environ | missing_tunables())
    for number, path in streams.items():
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), number)
    sys.argv = ["rollmesh", *arguments]
    from services.cli import main

    main()

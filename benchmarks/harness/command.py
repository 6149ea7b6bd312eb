"""What the commands of all benchmarks share: a scratch folder, progress on standard error, a table or JSON at the end."""

from __future__ import annotations

import asyncio
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from services.wire.errors import UsageError

Say = Callable[[str], None]
"""Where a line of progress goes."""
ResultT = TypeVar("ResultT")


def progress() -> Say:
    """Lines on standard error: standard output is for the result."""
    return Console(stderr=True, soft_wrap=True, highlight=False).print


def run_measurement(measure: Callable[[Path, Say], Coroutine[Any, Any, ResultT]]) -> ResultT:
    """Run `measure` with a folder for its files, which is removed. SIGTERM ends it as Ctrl-C does: nothing stays behind."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as scratch:
        return asyncio.run(measure(Path(scratch), progress()))


def show(result: object, as_json: bool, *tables: Table) -> None:
    """Print `result` as JSON, or the tables that are made of it."""
    import msgspec

    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n")
        return
    for table in tables:
        Console().print(table)


def check_hidden_size(hidden_size: int) -> None:
    """Raise UsageError for a width that the random policy cannot have."""
    if hidden_size % 32:
        raise UsageError(f"a hidden size of {hidden_size}", "give a multiple of 32")

"""`benchmarks/history.jsonl`: what benchmarks found, a line each, and docs/benchmarks.md, whose tables are made from it.

    ./dev bench NAME … --record   run, and add a line
    ./dev bench docs              write the tables anew from the newest line of each benchmark

A table stands between two marks in the document, of which the first names the benchmark and its figures:

    <!-- history loop: steps_per_s_vs_trl, overhead_ms_per_step.http -->
    …
    <!-- end of history -->
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import typer

from benchmarks.harness.revision import ROOT, here
from services.wire.errors import RollmeshError, UsageError

HISTORY = ROOT / "benchmarks" / "history.jsonl"
DOCUMENT = ROOT / "docs" / "benchmarks.md"
_BLOCK = re.compile(r"<!-- history (?P<name>[a-z]+): (?P<figures>[^>]*?) -->\n.*?<!-- end of history -->", re.DOTALL)
_ROUNDS = ("spread", "rounds")
"""Where results keep single rounds, by the figure's name."""

app = typer.Typer(add_completion=False, rich_markup_mode=None)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One finished measurement. `commit`: what was measured, with `+` where something was not committed."""

    date: str
    commit: str
    benchmark: str
    arguments: list[str]
    result: dict[str, Any]


@app.command(epilog="Example: ./dev bench docs")
def docs(
    check: bool = typer.Option(default=False, help="Write nothing; exit code 1 where a table is not that of its line"),
) -> None:
    """Write the tables of docs/benchmarks.md from the newest lines of benchmarks/history.jsonl."""
    written = DOCUMENT.read_text(encoding="utf-8")
    made = fill(written, read(HISTORY))
    if check and made != written:
        raise RollmeshError(f"{DOCUMENT.name} is not what {HISTORY.name} says", "run ./dev bench docs")
    DOCUMENT.write_text(made, encoding="utf-8")


def read(path: Path) -> dict[str, Line]:
    """The newest line of each benchmark: the last one. Raises UsageError for a line that cannot be read."""
    newest: dict[str, Line] = {}
    for number, packed in enumerate(path.read_bytes().splitlines() if path.exists() else (), 1):
        try:
            line = msgspec.json.decode(packed, type=Line)
        except msgspec.MsgspecError as error:
            raise UsageError(f"line {number} of {path.name} cannot be read ({error})", "mend it") from error
        newest[line.benchmark] = line
    return newest


def record(name: str, arguments: Sequence[str]) -> int:
    """Run a benchmark, show its JSON and add its line to the history; returns its exit code."""
    command = here().command("benchmarks", name, *arguments, "--json")
    ended = subprocess.run(command, env=here().environ, stdout=subprocess.PIPE, check=False)
    sys.stdout.buffer.write(ended.stdout)
    if ended.returncode != 0:
        return ended.returncode
    line = Line(
        date=datetime.now(UTC).date().isoformat(),
        commit=_commit(),
        benchmark=name,
        arguments=list(arguments),
        result=msgspec.json.decode(ended.stdout),
    )
    with HISTORY.open("ab") as history:
        history.write(msgspec.json.encode(line) + b"\n")
    return 0


def fill(document: str, newest: dict[str, Line]) -> str:
    """The document with its tables made anew. Raises UsageError for a benchmark or figure that no line has."""

    def table(found: re.Match[str]) -> str:
        name, figures = found["name"], [figure.strip() for figure in found["figures"].split(",")]
        if name not in newest:
            raise UsageError(f"no line of {HISTORY.name} is of {name!r}", f"run ./dev bench {name} --record")
        head = f"<!-- history {name}: {', '.join(figures)} -->"
        return "\n".join([head, *_table(newest[name], figures), "<!-- end of history -->"])

    return _BLOCK.sub(table, document)


def _table(line: Line, figures: Sequence[str]) -> list[str]:
    called = " ".join(["./dev bench", line.benchmark, *line.arguments])
    rows = [f"`{called}`, {line.date}, commit {line.commit}:", "", "| figure | value | rounds |", "|---|---|---|"]
    for figure in figures:
        rows.append(f"| `{figure}` | {_shown(_found(line, figure))} | {_rounds(line, figure)} |")
    return [*rows, ""]


def _found(line: Line, figure: str) -> Any:
    value: Any = line.result
    # A figure's own name may hold a dot, as `time_to_0.9_vs_trl` does.
    if figure in value:
        return value[figure]
    for part in figure.split("."):
        if not isinstance(value, dict) or part not in value:
            raise UsageError(f"the newest line of {line.benchmark} has no figure {figure!r}", "see history.jsonl")
        value = value[part]
    return value


def _rounds(line: Line, figure: str) -> str:
    for place in _ROUNDS:
        known = line.result.get(place)
        if isinstance(known, dict) and isinstance(known.get(figure), list):
            return ", ".join(_shown(each) for each in known[figure])
    return ""


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "–" if value is None else str(value)


def _commit() -> str:
    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "--porcelain") else "")

"""Figures that are kept, and the document's tables that are made of them."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.harness.history import DOCUMENT, HISTORY, Line, fill, read
from services.wire.errors import UsageError

LOOP = Line(
    date="2026-11-23",
    commit="0123456789ab",
    benchmark="loop",
    arguments=["--rounds", "3"],
    result={
        "time_to_0.9_vs_trl": 0.5,
        "overhead": {"http": 12.34567},
        "never": None,
        "spread": {"time_to_0.9_vs_trl": [0.4, 0.5, 0.6]},
    },
)
DOCUMENT_BEFORE = """before
<!-- history loop: time_to_0.9_vs_trl,overhead.http, never -->
what stood here
<!-- end of history -->
after
"""


def test_a_table_is_made_of_the_newest_line(tmp_path: Path) -> None:
    older = msgspec.structs.replace(LOOP, result={})
    (tmp_path / "history.jsonl").write_bytes(b"\n".join(map(msgspec.json.encode, (older, LOOP))) + b"\n")
    newest = read(tmp_path / "history.jsonl")
    assert newest == {"loop": LOOP}
    filled = fill(DOCUMENT_BEFORE, newest)
    assert filled.splitlines() == [
        "before",
        "<!-- history loop: time_to_0.9_vs_trl, overhead.http, never -->",
        "`./dev bench loop --rounds 3`, 2026-11-23, commit 0123456789ab:",
        "",
        "| figure | value | rounds |",
        "|---|---|---|",
        "| `time_to_0.9_vs_trl` | 0.5 | 0.4, 0.5, 0.6 |",
        "| `overhead.http` | 12.35 |  |",
        "| `never` | – |  |",
        "",
        "<!-- end of history -->",
        "after",
    ]
    assert fill(filled, newest) == filled


def test_a_figure_that_nobody_measured_is_refused() -> None:
    with pytest.raises(UsageError, match=r"no line of history\.jsonl is of 'loop'"):
        fill(DOCUMENT_BEFORE, {})
    with pytest.raises(UsageError, match=r"no figure 'overhead\.http'"):
        fill(DOCUMENT_BEFORE, {"loop": msgspec.structs.replace(LOOP, result={"time_to_0.9_vs_trl": 1.0})})


def test_the_document_says_what_the_history_says() -> None:
    written = DOCUMENT.read_text(encoding="utf-8")
    assert fill(written, read(HISTORY)) == written

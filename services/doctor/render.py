"""Findings as a table for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from services.policies.diagnosis.finding import Finding

_STYLES = {"error": "bold red", "warning": "yellow"}


def as_table(found: Sequence[Finding]) -> RenderableType:
    """A block of four lines for each: what, what was seen, what to do, where more is said. Errors first."""
    if not found:
        return Text("nothing is wrong, as far as can be seen", style="green")
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for number, each in enumerate(sorted(found, key=lambda one: one.severity)):
        if number:
            table.add_row("", "")
        style = _STYLES[each.severity]
        table.add_row(Text(each.severity, style=style), Text(f"{each.id}: {each.cause}", style=style))
        table.add_row("evidence", Text(each.evidence))
        table.add_row("remedy", Text(each.remedy))
        table.add_row("runbook", Text(each.runbook))
    return table

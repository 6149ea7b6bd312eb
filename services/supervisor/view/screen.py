"""Screen of the live view: a pane as wide as the terminal, or two beside one another where there is room for them.

Nothing is wider than the terminal: a line that would be wrapped by it would be drawn over by the next screen. What comes
of models, agents and services is shown as text, whatever characters it has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from services.observability.run_view.snapshot import Snapshot
from services.observability.terminal import BAD, GOOD, HEAD, NOTE, as_text, sampled_text, sparkline
from services.supervisor.view.facts import (
    by_task,
    commit,
    duration,
    held_out,
    part_in_words,
    served,
    staleness,
    waits_of,
    warnings_of,
)
from services.wire.run_metrics import Sample

TWO_PANES_FROM = 110
"""Columns."""
_LABEL, _GAP = 10, 2
_BAR_MOST, _LEAST = 30, 20
_FIGURE = 8
"""Columns of the number in front of a curve."""
_Row = tuple[str, Text]


def screen(snapshot: Snapshot, width: int) -> RenderableType:
    """At most `width` columns wide."""
    if width < TWO_PANES_FROM:
        return _pane([*_main(snapshot, width), *_beside(snapshot, width, lines=2)], width)
    left = (width - _GAP) * 3 // 5
    right = width - _GAP - left
    grid = Table.grid(padding=(0, _GAP, 0, 0), pad_edge=False)
    grid.add_column(width=left)
    grid.add_column(width=right)
    grid.add_row(_pane(_main(snapshot, left), left), _pane(_beside(snapshot, right, lines=8), right))
    return grid


def _pane(rows: Sequence[_Row], width: int) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(width=min(_LABEL, width), no_wrap=True, overflow="ellipsis")
    table.add_column(width=_room(width), overflow="fold")
    for label, value in rows:
        table.add_row(Text(label, style="bold"), value)
    return table


def _room(width: int) -> int:
    """Columns behind the label."""
    return max(1, width - _LABEL - 1)


def _clipped(text: str, width: int, lines: int, style: str = "") -> Text:
    shown = Text(as_text(text), style=style)
    shown.truncate(_room(width) * lines, overflow="ellipsis")
    return shown


def _main(snapshot: Snapshot, width: int) -> list[_Row]:
    rows = [_progress(snapshot, width)]
    rows += [("", _clipped(part_in_words(part), width, 2)) for part in snapshot.phase.parts if part.total]
    if snapshot.metrics is not None:
        rows += _curves(snapshot, width)
        facts = [*by_task(snapshot), *held_out(snapshot)]
        facts.append(("speed", f"{snapshot.metrics.tokens_per_s:,.0f} tokens/s"))
        facts += [("staleness", staleness(snapshot)), ("commit", commit(snapshot)), ("served", served(snapshot))]
        rows += [(label, _clipped(value, width, 1)) for label, value in facts]
    if snapshot.bound is not None:
        rows.append(("bound by", _clipped(str(snapshot.bound), width, 2, HEAD)))
    return rows


def _progress(snapshot: Snapshot, width: int) -> _Row:
    phase = snapshot.phase
    in_steps = phase.name == "training"
    share = f"{snapshot.step}/{snapshot.steps}" if in_steps else f"{phase.share:.0%}"
    left = snapshot.left_s
    words = f" {share}  {phase.name}, {duration(snapshot.elapsed_s)}"
    words += "" if left is None else f", about {duration(left)} left"
    bar = min(_BAR_MOST, _room(width) - len(words))
    full = int(max(0, bar) * phase.share)
    text = Text("█" * full + "░" * (max(0, bar) - full), style=GOOD)
    text.append(words, style="default")
    text.truncate(_room(width), overflow="ellipsis")
    return "step" if in_steps else "start" if phase.of_start else "phase", text


def _curves(snapshot: Snapshot, width: int) -> list[_Row]:
    """A line for each figure: its last value, and all steps from the left to the right."""
    history, wide = snapshot.history, _room(width) - _FIGURE
    rows = []
    for label, values, form in (
        ("success", history.success, "{:.2f}"),
        ("reward", history.reward, "{:.3g}"),
        ("length", history.length, "{:.1f}"),
    ):
        if values and wide > 0:
            finite = [value for value in values if math.isfinite(value)] or [0.0]
            low, high = (0.0, 1.0) if label == "success" else (min(finite), max(finite))
            figure = form.format(values[-1])
            text = Text(f"{figure if len(figure) < _FIGURE else f'{values[-1]:.1g}':<{_FIGURE}}")
            text.append(sparkline(values, low, high, wide), style=HEAD)
            rows.append((label, text))
    return rows


def _beside(snapshot: Snapshot, width: int, lines: int) -> list[_Row]:
    """What is beside the figures where there is room, below them where there is none."""
    rows = [("waits", _clipped(f"{name}: {what}", width, 2, NOTE)) for name, what in waits_of(snapshot)]
    rows += [("warning", _clipped(f"{sign}: {words}", width, 3, BAD)) for sign, words in warnings_of(snapshot)]
    return [*rows, *_sample(snapshot.sample, width, lines)]


def _sample(sample: Sample | None, width: int, lines: int) -> list[_Row]:
    """The last tokens of a prompt, and the answer, which is bold."""
    if sample is None or not sample.segments:
        return []
    segment = sample.segments[0]
    text = sampled_text(segment)
    begins = next((span.start for span in text.spans), 0)
    before = _room(width) * lines // 2
    if begins > before:
        text = Text("…") + text[begins - before :]
    text.truncate(_room(width) * lines, overflow="ellipsis")
    length = "" if sample.tokens is None else f", {sample.tokens} tokens"
    head = _clipped(f"of step {sample.step}, reward {sample.reward:g}{length}", width, 1)
    return [("answer", head), ("", text)]

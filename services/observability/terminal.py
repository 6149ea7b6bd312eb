"""What commands show on a terminal: colours that are read on light and on dark, curves of one line, text of strangers.

A colour stands out from white and from black alike (contrast 3.4 and more, of at most 4.6 that both allow), and is neither
white, black nor yellow where a terminal has sixteen. With NO_COLOR there is none: words say the same.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence

from rich.text import Text

from services.wire.run_metrics import SampledSegment

GOOD, BAD, NOTE, HEAD = "color(28)", "bold color(160)", "color(127)", "bold color(31)"
"""Styles of rich. NOTE: something to look at, which is no fault."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_UNSEEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def sparkline(values: Sequence[float], low: float, high: float, width: int) -> str:
    """One character a place, from the lowest block at `low` to the full one at `high`; a space where there is no number."""
    if not values:
        return ""
    places = min(width, len(values))
    picked = [values[round(i * (len(values) - 1) / max(1, places - 1))] for i in range(places)]
    span = high - low or 1.0
    return "".join(
        _BLOCKS[max(0, min(7, round(7 * (value - low) / span)))] if math.isfinite(value) else " " for value in picked
    )


def as_text(text: str, *, lines: bool = False) -> str:
    """Text of a model, an agent or a service as a terminal may be given it: what would steer it is shown as its escape.

    Control and format characters (directions of writing among them), and what has no character, become `\\x1b` and the
    like. `lines`: line ends and tabs stay.
    """
    kept = "\n\t" if lines else ""
    return "".join(
        character.encode("unicode_escape").decode()
        if unicodedata.category(character) in _UNSEEN and character not in kept
        else character
        for character in text
    )


SAMPLED_BEGINS, SAMPLED_ENDS = "»", "«"


def sampled_text(segment: SampledSegment, *, lines: bool = False, marked: bool = False) -> Text:
    """A segment's text `as_text`, in which what the policy sampled is bold.

    `marked`: and between » and «, for where nothing is bold."""
    shown = as_text(segment.text, lines=lines)
    text, at = Text(), 0
    for span in segment.spans:
        sampled = as_text(span.text, lines=lines)
        found = shown.find(sampled, at) if sampled else -1
        if found >= 0:
            text.append(shown[at:found])
            text.append(f"{SAMPLED_BEGINS}{sampled}{SAMPLED_ENDS}" if marked else sampled, style="bold")
            at = found + len(sampled)
    return text.append(shown[at:])

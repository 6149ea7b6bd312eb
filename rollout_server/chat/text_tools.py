"""Tool calls that a model spells in ordinary tokens, read from an answer's text. Pure.

    content   Let me see.⏎<tool_call>⏎{"name": "f", "arguments": {}}⏎</tool_call>
              │ content  │   one call each; one that is broken, or has no end, stays visible

Where a vocabulary has the tags as tokens of their own, calls are found by these (`renderers.parsers`), whatever the text
around them says; this is for the other vocabularies, where only the text tells.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

OPENING = "<tool_call>"
_BLOCK = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)

TextFormat = Literal["hermes", "xml"]
"""`hermes`: a JSON object with `name` and `arguments`, or a list of them; `xml`: `<function=f>` around `<parameter=x>1`."""


@dataclass(frozen=True, slots=True)
class SpelledCall:
    """One attempt. `raw`: its text, tags included; `name` is None for one that cannot be made. Arguments are unchecked."""

    raw: str
    name: str | None = None
    arguments: Any = None


def read_calls(text: str, form: TextFormat) -> tuple[str, list[SpelledCall]]:
    """What stands before the first call, and the calls. What a model says between or after them is no content, as where
    the tags are tokens."""
    start = text.find(OPENING)
    if start < 0:
        return text, []
    attempts: list[SpelledCall] = []
    for block in _BLOCK.finditer(text, start):
        body, closed = block[1].strip(), bool(block[2])
        found = list(_calls(block[0], body, form)) if closed else []
        attempts += found if found and all(each.name for each in found) else [SpelledCall(block[0])]
    return text[:start], attempts


def _calls(raw: str, body: str, form: TextFormat) -> Iterator[SpelledCall]:
    if form == "xml":
        for function in _FUNCTION.finditer(body):
            parameters = _PARAMETER.finditer(function[2])
            yield SpelledCall(raw, function[1], {each[1]: _value(each[2].strip()) for each in parameters})
        return
    try:
        said = json.loads(body)
    except (ValueError, RecursionError):
        return
    for each in said if isinstance(said, list) else [said]:
        whole = isinstance(each, dict) and isinstance(each.get("name"), str)
        yield SpelledCall(raw, each["name"], each.get("arguments", {})) if whole else SpelledCall(raw)


def _value(text: str) -> Any:
    """JSON where it is some, else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text

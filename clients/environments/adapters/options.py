"""Options of a task's name, `?max_terms=4&easy=true`, as values: numbers, true and false as such, the rest as text."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches

from services.wire.errors import UsageError

Value = str | int | float | bool | None | list[object] | dict[str, object]


def values(options: Mapping[str, str]) -> dict[str, Value]:
    """What is JSON is read as JSON."""
    return {key: _value(text) for key, text in options.items()}


def _value(text: str) -> Value:
    try:
        value: Value = json.loads(text)
    except ValueError:
        return text
    return value


def refuse_unknown(what: str, wanted: Collection[str], known: Collection[str]) -> None:
    """Raise UsageError, with the nearest known one, for an option that `what` does not have."""
    for option in wanted:
        if option not in known:
            near = get_close_matches(option, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(f"{what} has no option {option!r}", f"{hint}known: {', '.join(sorted(known)) or 'none'}")


def no_such(what: str, name: str, known: Collection[str]) -> UsageError:
    """The error for a name that a library does not have, with the nearest known ones."""
    near = get_close_matches(name, known, n=3, cutoff=0.4)
    remedy = f"did you mean {' or '.join(map(repr, near))}?" if near else f"it has {len(known)}, such as {min(known)!r}"
    return UsageError(f"{what} has no {name!r}", remedy)


def pattern(what: str, option: str, text: str | None) -> re.Pattern[str] | None:
    """The regular expression that an option gives, None where it is left out. Raises UsageError for what is none."""
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise UsageError(f"{what}: {option}={text!r} is no regular expression ({error})", "correct it") from error

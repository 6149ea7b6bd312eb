"""Plug-in functions: built-in ones by name, and a user's own as `module:function` with an attribute `entry`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from services.wire.errors import UsageError

Entry = TypeVar("Entry")


def find_entry(name: str, known: Mapping[str, Entry], kind: type[Entry], setting: str) -> Entry:
    """The entry listed under `name`, or the `entry` of the function `name`. Raises UsageError where there is none."""
    if name in known:
        return known[name]
    if ":" not in name:
        near = get_close_matches(name, known, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}, or module:function"
        raise UsageError(f"{setting}={name} is not known", hint)
    entry = getattr(load_function(name), "entry", None)
    if not isinstance(entry, kind):
        raise UsageError(f"{name} has no `entry`", f"give the function an attribute `entry = {kind.__name__}(…)`")
    return entry


def load_function(target: str) -> Any:
    """The function at `module:function`. Raises UsageError where it cannot be imported."""
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{target} cannot be imported ({error})", "write it as module:function") from error

"""Plug-in functions: built-in ones by name, and a user's own as `module:function` or `FILE.py:function`, with an attribute
`entry`, and settings of their own.

    entry.settings, a class ──┐
    trainer.….own, a table ───┴──► its instance: the function's last argument, and `{key}` in the entry's term
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, TypeVar

from services.config.base import Section, idle
from services.config.load import read_section
from services.config.training.algorithm import Own
from services.wire.errors import UsageError

Entry = TypeVar("Entry")
Function = TypeVar("Function", bound=Callable[..., Any])


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
    """The function at `module:function` or `FILE.py:function`. Raises UsageError where it cannot be imported.

    A module is also looked for in the folder where this process was started, after all other places.
    """
    module, _, attribute = target.rpartition(":")
    try:
        return getattr(_of_file(Path(module)) if module.endswith(".py") else _of_name(module), attribute)
    except (ImportError, AttributeError, OSError, SyntaxError) as error:
        remedy = "write it as module:function, or FILE.py:function"
        raise UsageError(f"{target} cannot be imported ({error})", remedy) from error


def _of_name(module: str) -> Any:
    here = str(Path.cwd())
    if here not in sys.path:
        # Behind everything else: what lies there by chance must not take a library's place.
        sys.path.append(here)
    return importlib.import_module(module)


def _of_file(file: Path) -> Any:
    """The module in a file, made once: two entries of it are of the same classes."""
    path = file.expanduser().absolute()
    name = f"_algorithm_of_{path}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is no Python file")
        # Known before it is run: dataclasses and annotations look their module up.
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def own_settings(kind: type[Section] | None, table: Own, section: str, chosen: str) -> Section | None:
    """`table`, the settings under `trainer.{section}.own`, as the class of the entry; None where it has none.

    `chosen`: the setting that chose the entry, for the message. Raises UsageError for an unknown key, with the nearest one,
    for a bad value, and for keys that nobody reads.
    """
    if kind is None:
        for key, value in table.items():
            remedy = "name a settings class in its entry, or leave it out"
            raise idle(f"{section}.own.{key}", value, f"{chosen}, which has no settings of its own", remedy)
        return None
    if not issubclass(kind, Section):
        raise UsageError(f"{chosen}: {kind.__name__} is no Section", "inherit from services.config.base.Section")
    return read_section(kind, table, f"trainer.{section}.own.")


def bound(function: Function, own: Section | None) -> Callable[..., Any]:
    """`function` of its input and the built-in settings alone: where it has settings of its own, they come third."""
    return function if own is None else lambda given, settings: function(given, settings, own)


def term_of(term: str, settings: Mapping[str, object], own: Section | None, target: str) -> str:
    """`term` with its settings in it; its own before others of the same name. Raises UsageError for one there is not."""
    try:
        return term.format(**{**settings, **({} if own is None else dict(own))})
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        raise UsageError(
            f"the term {term!r} of {target} cannot be filled in ({error!r})", "write {key} of its settings in braces"
        ) from error

"""The engine arguments that the installed vLLM has, read from its source: importing vLLM takes seconds.

vllm/engine/arg_utils.py ─► class EngineArgs, AsyncEngineArgs ─► annotated names
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from services.wire.errors import UsageError

_FILE = Path("engine") / "arg_utils.py"
_CLASSES = ("EngineArgs", "AsyncEngineArgs")


def installed_arguments() -> frozenset[str] | None:
    """The names; None where vLLM is not installed, or is written in another way than this one knows."""
    found = find_spec("vllm")
    for folder in [] if found is None else found.submodule_search_locations or []:
        try:
            tree = ast.parse((Path(folder) / _FILE).read_text(encoding="utf-8"))
        except (OSError, SyntaxError, UnicodeDecodeError):
            continue
        names = {
            each.target.id
            for kind in tree.body
            if isinstance(kind, ast.ClassDef) and kind.name in _CLASSES
            for each in kind.body
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
        }
        if names:
            return frozenset(name for name in names if not name.startswith("_"))
    return None


def check_arguments(given: Mapping[str, object]) -> None:
    """Raises UsageError for engine arguments (`[rollout.vllm]`) that the vLLM which is installed here has not, with the
    nearest name."""
    if given:
        check_names(given, installed_arguments())


def check_names(names: Iterable[str], known: frozenset[str] | None) -> None:
    """Raises UsageError, with the nearest name, for an engine argument that vLLM has not. `known`: None checks nothing."""
    for name in names if known is not None else ():
        if name in (known or ()):
            continue
        near = get_close_matches(name, known or (), n=1, cutoff=0.4)
        raise UsageError(
            f"rollout.vllm.{name} is no engine argument of the installed vLLM",
            f"the nearest is {near[0]!r}" if near else "`vllm serve --help=all` lists them",
        )

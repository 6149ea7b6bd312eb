"""Names of tasks: what `rollmesh up --task` takes, checked without importing anything that could play them.

running-sums · guess-number                      built in, with demonstrations for a warm start
sums                                             built in, for a language model that chats
reasoning-gym:chain_sum?max_terms=4              a data set of the library, options as its configuration names them
textarena:GuessTheNumber-v0?max_turns=5          a one-player game of the library
verifiers:my-environment?split=easy              an environment of the library
prompts:./questions.jsonl                        prompts of a file, judged by the reward service
python:my_package.tasks:make  python:./agent.py:make   an object of yours, or what makes one

Options are written as in a URL, but that `+` is a plus: of `%`, `&` and line feeds `%25`, `%26` and `%0A` are written.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import unquote

from services.wire.errors import UsageError
from services.wire.extras import install

DEMONSTRATED = ("running-sums", "guess-number")
"""Tasks of our own that have demonstrations, for a policy that knows nothing yet."""
BUILT_IN = (*DEMONSTRATED, "sums")
"""Tasks of our own."""


@dataclass(frozen=True)
class Library:
    """Where the tasks of a kind come from. `module` is None for files of the user's; `example` is a whole task name."""

    module: str | None
    extra: str
    example: str


LIBRARIES: Mapping[str, Library] = {
    "reasoning-gym": Library("reasoning_gym", install("environments"), "reasoning-gym:chain_sum"),
    "textarena": Library("textarena", install("environments"), "textarena:GuessTheNumber-v0"),
    "verifiers": Library(
        "verifiers", "pip install verifiers, in an environment of its own", "verifiers:my-environment"
    ),
    "prompts": Library(None, "", "prompts:./questions.jsonl"),
    "python": Library(None, "", "python:./agent.py:make"),
}

FILE_OPTIONS = ("held_out",)
"""Options of `prompts:` that name a file."""
_ESCAPED = str.maketrans({"%": "%25", "&": "%26", "\n": "%0A", "\r": "%0D"})
_REST = re.compile(r"[^\x00-\x1f?]+")
_PYTHON = re.compile(r"(?P<where>[^:]+):(?P<attribute>[A-Za-z_][A-Za-z0-9_.]*)")


@dataclass(frozen=True)
class TaskName:
    """`kind:rest?option=value&…`; for a built-in task `kind` is its whole name and `rest` is empty."""

    kind: str
    rest: str = ""
    options: tuple[tuple[str, str], ...] = ()

    @property
    def built_in(self) -> bool:
        return self.kind in BUILT_IN

    @property
    def demonstrated(self) -> bool:
        """Whether a tiny model can be warm-started for it."""
        return self.kind in DEMONSTRATED

    @property
    def python(self) -> tuple[str, str]:
        """Module or file, and attribute, of a `python:` task."""
        found = _PYTHON.fullmatch(self.rest)
        if found is None:
            raise UsageError(
                f"{self.rest!r} names no object", "write python:package.module:name or python:./file.py:name"
            )
        return found["where"], found["attribute"]

    @property
    def called(self) -> str | None:
        """What its environment calls itself; None where that is for the user's code to say."""
        if self.kind == "python":
            return None
        if self.kind == "prompts":
            return f"prompts:{self._table}"
        return f"{self.kind}:{self.rest}" if self.rest else self.kind

    @property
    def _table(self) -> str:
        """The name of the table without its endings."""
        return Path(self.rest.removesuffix(".gz")).stem

    @property
    def label(self) -> str:
        """A short name for folders and keys: lower-case letters, digits and dashes."""
        words = f"{self.kind}-{self._table if self.kind == 'prompts' else self.rest}"
        if self.kind == "python":
            where, attribute = self.python
            words = f"{Path(where).stem if where.endswith('.py') else where}-{attribute}"
        return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-")[:48].rstrip("-") or self.kind

    def with_files(self, absolute: Callable[[str], str]) -> TaskName:
        """With each file in it as `absolute` gives it."""
        if self.kind == "python" and self.python[0].endswith(".py"):
            file, attribute = self.python
            return replace(self, rest=f"{absolute(file)}:{attribute}")
        if self.kind == "prompts":
            options = tuple((key, absolute(value) if key in FILE_OPTIONS else value) for key, value in self.options)
            return replace(self, rest=absolute(self.rest), options=options)
        return self

    def __str__(self) -> str:
        options = "&".join(f"{key}={value.translate(_ESCAPED)}" for key, value in self.options)
        return self.kind + (f":{self.rest}" if self.rest else "") + (f"?{options}" if options else "")


def parse_task(text: str) -> TaskName:
    """Raises UsageError, with the nearest known name, for what cannot be the name of a task."""
    head, _, query = text.partition("?")
    kind, separator, rest = head.partition(":")
    if kind in BUILT_IN:
        if separator or query:
            raise UsageError(f"task {text!r} takes neither a part after {kind!r} nor options", f"write {kind}")
        return TaskName(kind)
    if kind not in LIBRARIES:
        raise UsageError(f"no task {text!r}", _object(text, head) or _nearest(kind))
    if not _REST.fullmatch(rest):
        raise UsageError(f"task {text!r} names nothing of {kind}", f"write it as {LIBRARIES[kind].example}")
    pairs = [part.partition("=") for part in query.split("&")] if query else []
    if not all(key and separator for key, separator, _ in pairs):
        raise UsageError(f"the options of task {text!r} cannot be read", "write ?key=value&key=value")
    options = [(key, unquote(value)) for key, _, value in pairs]
    if len(dict(options)) != len(options):
        raise UsageError(f"task {text!r} gives an option twice", "give each once")
    name = TaskName(kind, rest, tuple(options))
    if kind == "python":
        _ = name.python
    return name


def _object(text: str, head: str) -> str | None:
    """What to write for an object of a file or a module that was named without its kind."""
    found = _PYTHON.fullmatch(head)
    named = found is not None and (found["where"].endswith(".py") or "." in found["where"].strip("./"))
    return f"did you mean python:{text}?" if named else None


def _nearest(kind: str) -> str:
    known = [*BUILT_IN, *(f"{kind}:…" for kind in LIBRARIES)]
    near = get_close_matches(kind, [*BUILT_IN, *LIBRARIES], n=1, cutoff=0.4)
    found = next((name for name in known if near and name.startswith(near[0])), None)
    return (f"did you mean {found!r}? " if found else "") + f"known: {', '.join(known)}"

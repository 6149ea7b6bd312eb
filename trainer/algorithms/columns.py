"""Columns: what a loss or an estimator reads beyond its plain input, a value a token, where its entry names it.

| column      | of a loss                              | of an estimator                  | needs     |
|-------------|----------------------------------------|----------------------------------|-----------|
| `staleness` | optimizer steps, int64                 | at the batch's first step, int64 |           |
| `group`     | its number in what is trained on, int64 | its number in the batch, int64  |           |
| `entropy`   | of the policy there, nats, with gradient | –                              |           |
| `behaviour` | – (it has them)                        | the engine's logprobs            |           |
| `reference` | logprobs of the run's first policy     | the same                         |           |
| `teacher`   | the teacher's logprobs                 | the same                         | a teacher |
| `values`    | the critic's before the batch          | the same                         | a critic  |
| `returns`   | what these should have been            | –                                | a critic  |

What nobody names is not computed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Literal, TypeVar, get_args

from services.wire.errors import UsageError

LossColumn = Literal["staleness", "group", "entropy", "reference", "teacher", "values", "returns"]
AdvantageColumn = Literal["staleness", "group", "behaviour", "reference", "teacher", "values"]
LOSS_COLUMNS: tuple[LossColumn, ...] = get_args(LossColumn)
ADVANTAGE_COLUMNS: tuple[AdvantageColumn, ...] = get_args(AdvantageColumn)

Array = TypeVar("Array")
Name = TypeVar("Name", bound=str)


def check_columns(named: Collection[str], known: Collection[str], of: str) -> None:
    """Raises UsageError for a column that there is not. `of`: whose they are, for the message."""
    for name in named:
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise UsageError(f"{of} reads a column {name!r}, which it cannot have", f"{hint}known: {', '.join(known)}")


def declared(columns: Mapping[Name, Array], name: Name) -> Array:
    """The column. Raises UsageError where the entry does not name it."""
    if name not in columns:
        has = ", ".join(columns) or "none"
        raise UsageError(
            f"column {name!r} is read and not declared (declared: {has})", "name it in the entry's columns"
        )
    return columns[name]

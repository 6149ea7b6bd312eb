"""Finding kept rollouts: by step, task, group, reward, length and text, in order, a page at a time.

Pages of one search are of the same rollouts, however many are written meanwhile: each names the newest that there was when
it began. Text is looked for as it stands, letter for letter, in prompts and answers.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec

from services.run_store.rollouts.database import database_of, reading
from services.run_store.rollouts.record import KeptRollout, decode_kept
from services.wire.errors import NotFoundError, UsageError

SHOWN = 240
"""Characters of prompt and answer in a list."""
MOST_A_PAGE = 500
Order = Literal["step", "reward", "length"]
Range = tuple[float, float]
"""From the first to the second, both included."""


class NoRolloutError(NotFoundError):
    """There is no such rollout (any more)."""

    code = "no_rollout"


def range_of(name: str, text: str | None) -> Range | None:
    """`3` or `3..7`, or open on one side: `3..`; None for none. Raises UsageError for anything else.

    `name`: what it is of, for the message.
    """
    if text is None:
        return None
    low, dots, high = text.partition("..")
    try:
        lowest = float(low) if low or not dots else -math.inf
        found = lowest, (float(high) if high else math.inf) if dots else lowest
    except ValueError as error:
        raise UsageError(f"{name} {text!r} is no number and no range", "write 3, 3..7, 3.. or ..7") from error
    if any(map(math.isnan, found)):
        raise UsageError(f"{name} {text!r} is no range of numbers", "write 3, 3..7, 3.. or ..7")
    return found


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """What is looked for. `member` is of a group alone; `up_to`: no rollout with a higher id, None for all there are."""

    step: Range | None = None
    reward: Range | None = None
    length: Range | None = None
    task: str | None = None
    group: str | None = None
    server: str | None = None
    text: str | None = None
    order: Order = "step"
    descending: bool = True
    offset: int = 0
    limit: int = 50
    up_to: int | None = None


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """A line of a list. `advantage`: the mean over its sampled tokens; versions: −1 where nothing was sampled; `prompt` and
    `answer`: how they begin."""

    id: int
    step: int
    task: str
    group: str
    ordinal: int
    member: int
    reward: float
    length: int
    advantage: float
    first_version: int
    last_version: int
    segments: int
    finish_reason: str
    server: str
    prompt: str
    answer: str


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """`total`: how many there are in all; None where that is not counted (`more` says whether any come after these)."""

    rollouts: list[Found]
    total: int | None
    more: bool
    up_to: int


class Extent(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept: rollouts of steps `first` to `last`. `of`: rollouts that those steps had."""

    rollouts: int
    of: int
    first: int
    last: int
    tasks: list[str]


class RolloutReader:
    """Reads the file in a run's folder of rollouts, opened for each question: it may appear, and grow, at any time.

    Blocks on the disk; questions may be asked from several threads. All raise UsageError where the file cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def written(self) -> tuple[int, int] | None:
        """Other than before where more was written since (nanoseconds, bytes); None where there is no file."""
        path = database_of(self._folder)
        for each in (path.with_name(f"{path.name}-wal"), path):
            with suppress(OSError):
                found = each.stat()
                return found.st_mtime_ns, found.st_size
        return None

    def extent(self) -> Extent | None:
        """None where nothing is kept."""
        with self._asking() as ask:
            if ask is None:
                return None
            ((count, of, first, last),) = ask(
                "SELECT sum(kept), sum(rollouts), min(step), max(step) FROM steps WHERE kept > 0"
            )
            if not count:
                return None
            tasks = [str(task) for (task,) in ask(_TASKS)]
            return Extent(rollouts=count, of=of, first=first, last=last, tasks=tasks)

    def search(self, wanted: Search) -> Page:
        """The page of `wanted.limit` rollouts behind `wanted.offset`."""
        with self._asking() as ask:
            if ask is None:
                return Page(rollouts=[], total=0, more=False, up_to=0)
            up_to = wanted.up_to
            if up_to is None:
                ((up_to,),) = ask("SELECT coalesce(max(id), 0) FROM rollouts")
            where, values = _where(wanted, up_to)
            way = "DESC" if wanted.descending else "ASC"
            order = f"{wanted.order} {way}, id {way}"
            limit = min(wanted.limit, MOST_A_PAGE)
            total: int | None = None
            if len(values) == 1:
                # Of all of them: ids have no gaps.
                ((lowest,),) = ask("SELECT min(id) FROM rollouts")
                total = 0 if lowest is None else max(0, up_to - lowest + 1)
            elif not wanted.text:
                ((total,),) = ask(f"SELECT count(*) FROM rollouts WHERE {where}", values)
            if total is not None and total <= wanted.offset:
                return Page(rollouts=[], total=total, more=False, up_to=up_to)
            # Ids first, of an index where one has all that is asked for; then what is shown of them.
            rows = ask(
                f"SELECT {_LISTED} FROM rollouts WHERE id IN "
                f"(SELECT id FROM rollouts WHERE {where} ORDER BY {order} LIMIT ? OFFSET ?) ORDER BY {order}",
                (*values, limit + 1, wanted.offset),
            )
            if total is None and len(rows) <= limit and (rows or not wanted.offset):
                total = wanted.offset + len(rows)
            return Page(
                rollouts=[_found(row) for row in rows[:limit]], total=total, more=len(rows) > limit, up_to=up_to
            )

    def kept(self, rollout: int) -> KeptRollout:
        """Raises NoRolloutError where there is none of this id, or it has made room for others."""
        with self._asking() as ask:
            rows = [] if ask is None else ask("SELECT body FROM bodies WHERE id = ?", (rollout,))
        if not rows:
            raise NoRolloutError(f"no rollout {rollout} is kept", "the oldest make room for others (samples.max_bytes)")
        return decode_kept(rows[0][0])

    def siblings(self, rollout: int) -> list[Found]:
        """All of its group that one step trained, itself included, in their order. Raises NoRolloutError."""
        with self._asking() as ask:
            rows = (
                []
                if ask is None
                else ask(
                    f"SELECT {_LISTED} FROM rollouts WHERE (group_id, step) = "
                    "(SELECT group_id, step FROM rollouts WHERE id = ?) ORDER BY member, id",
                    (rollout,),
                )
            )
        if not rows:
            raise NoRolloutError(f"no rollout {rollout} is kept", "the oldest make room for others (samples.max_bytes)")
        return [_found(row) for row in rows]

    def pieces(self, tokens: Sequence[int]) -> dict[int, bytes]:
        """What tokens stand for, in bytes: some are a part of a character. Those that are not known are left out."""
        with self._asking() as ask:
            if ask is None:
                return {}
            found: dict[int, bytes] = {}
            for start in range(0, len(tokens), _AT_ONCE):
                some = tokens[start : start + _AT_ONCE]
                marks = ", ".join("?" * len(some))
                found.update(ask(f"SELECT token, text FROM pieces WHERE token IN ({marks})", tuple(some)))
            return found

    @contextmanager
    def _asking(self) -> Iterator[Callable[..., list[tuple[Any, ...]]] | None]:
        with reading(self._folder) as connection:
            try:
                yield None if connection is None else lambda *question: connection.execute(*question).fetchall()
            except sqlite3.Error as error:
                raise UsageError(
                    f"the kept rollouts in {self._folder} cannot be read ({error})", "try again; is the disk whole?"
                ) from error


_TASKS = """
WITH RECURSIVE tasks (task) AS (
    SELECT min(task) FROM rollouts UNION ALL SELECT (SELECT min(task) FROM rollouts WHERE task > tasks.task) FROM tasks
    WHERE task IS NOT NULL
) SELECT task FROM tasks WHERE task IS NOT NULL LIMIT 100
"""
"""Each is one look into the index of tasks."""
_AT_ONCE = 500
"""Older builds of SQLite take 999 values at most."""
_LISTED = (
    "id, step, task, group_id, ordinal, member, reward, length, advantage, first_version, last_version, segments, "
    f"finish_reason, server, substr(prompt, 1, {SHOWN}), substr(answer, 1, {SHOWN})"
)


def _where(wanted: Search, up_to: int) -> tuple[str, tuple[object, ...]]:
    parts, values = ["id <= ?"], list[object]([up_to])
    ranges = (("step", wanted.step), ("reward", wanted.reward), ("length", wanted.length))
    for column, between in ranges:
        if between is not None:
            parts.append(f"{column} BETWEEN ? AND ?")
            values += between
    for column, equal in (("task", wanted.task), ("group_id", wanted.group), ("server", wanted.server)):
        if equal is not None:
            parts.append(f"{column} = ?")
            values.append(equal)
    if wanted.text:
        parts.append("(instr(prompt, ?) OR instr(answer, ?))")
        values += (wanted.text, wanted.text)
    return " AND ".join(parts), tuple(values)


def _found(row: Sequence[Any]) -> Found:
    return Found(**dict(zip(Found.__struct_fields__, row, strict=True)))

"""Appends the rollouts of steps, each step once, and removes those of the oldest steps where the bound is reached."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from services.run_store.rollouts.database import database_of, open_to_write
from services.run_store.rollouts.record import KeptRollout, encode_kept

_FILLED = 0.95
"""Of the bound: from here on the oldest make room, so that what the next step brings still fits."""
_OF_A_STEP = 0.04
"""Of the bound: the most that one step's rollouts may take."""
_ROW_BYTES = 400
"""What a row takes beside its text and its body, indexes included."""

_log = structlog.get_logger()


@dataclass(frozen=True)
class Entry:
    """`prompt`, `answer`: what is searched and shown in lists; `advantage`: the mean over its sampled tokens."""

    kept: KeptRollout
    prompt: str
    answer: str
    advantage: float


class RolloutWriter:
    """`max_bytes`: of the file. Used by one thread at a time."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """Raises UsageError where it cannot be written. A file that is damaged is put aside."""
        self._max_bytes = max_bytes
        self._connection = _opened(folder)
        (newest,) = self._connection.execute("SELECT max(step) FROM steps").fetchone()
        self.newest_step = -1 if newest is None else int(newest)
        """A step up to this one is not written again."""
        (last,) = self._connection.execute("SELECT coalesce(max(id), 0) FROM bodies").fetchone()
        self._next_id = int(last) + 1
        self.known_tokens = {token for (token,) in self._connection.execute("SELECT token FROM pieces")}
        (self._page_bytes,) = self._connection.execute("PRAGMA page_size").fetchone()

    def append(
        self, step: int, version: int, at: float, of: int, entries: Sequence[Entry], pieces: Mapping[int, bytes]
    ) -> int:
        """Rollouts of a step of `of` rollouts that starts from policy `version`, in one transaction; how many were kept.

        None of a step that is there already. `at`: Unix seconds; `pieces`: what tokens stand for that were not known.
        Raises sqlite3.Error, with nothing written, where the disk is full.
        """
        if step <= self.newest_step:
            return 0
        rows, bodies, brought = list[Row](), list[tuple[int, bytes]](), 0
        for entry in entries:
            body, number = encode_kept(entry.kept), self._next_id + len(rows)
            size = len(body) + len(entry.prompt) + len(entry.answer) + _ROW_BYTES
            if brought + size > _OF_A_STEP * self._max_bytes:
                _log.warning(
                    "a rollout is too large to be kept", step=step, bytes=size, samples_max_bytes=self._max_bytes
                )
                continue
            rows.append(_row(number, entry))
            bodies.append((number, body))
            brought += size
        execute = self._connection.execute
        execute("BEGIN IMMEDIATE")
        try:
            self._make_room(brought)
            self._connection.executemany("INSERT OR IGNORE INTO pieces VALUES (?, ?)", pieces.items())
            self._connection.executemany(f"INSERT INTO rollouts VALUES ({'?, ' * (_COLUMNS - 1)}?)", rows)
            self._connection.executemany("INSERT INTO bodies VALUES (?, ?)", bodies)
            execute("INSERT INTO steps VALUES (?, ?, ?, ?, ?)", (step, version, at, of, len(rows)))
            execute("COMMIT")
        except BaseException:
            if self._connection.in_transaction:
                execute("ROLLBACK")
            raise
        self.newest_step = step
        self._next_id += len(rows)
        self.known_tokens.update(pieces)
        return len(rows)

    def close(self) -> None:
        """What is in the log goes into the file, where no reader holds it."""
        self._connection.close()

    def _make_room(self, brought: int) -> None:
        while self._used() + brought > _FILLED * self._max_bytes:
            (oldest,) = self._connection.execute("SELECT min(step) FROM rollouts").fetchone()
            if oldest is None:
                return
            # Ids ascend with the steps.
            self._connection.execute(
                "DELETE FROM bodies WHERE id <= (SELECT max(id) FROM rollouts WHERE step = ?)", (oldest,)
            )
            self._connection.execute("DELETE FROM rollouts WHERE step = ?", (oldest,))
            self._connection.execute("DELETE FROM steps WHERE step <= ?", (oldest,))

    def _used(self) -> int:
        (pages,) = self._connection.execute("PRAGMA page_count").fetchone()
        (free,) = self._connection.execute("PRAGMA freelist_count").fetchone()
        return int(pages - free) * int(self._page_bytes)


_COLUMNS = 16
Row = tuple[int, int, str, str, int, int, float, int, float, int, int, int, str, str, str, str]


def _row(number: int, entry: Entry) -> Row:
    """The columns of `rollouts`, in their order."""
    one = entry.kept.trajectory
    versions = [span.version for segment in one.segments for span in segment.version_spans]
    low, high = (min(versions), max(versions)) if versions else (-1, -1)
    return (
        number, entry.kept.step, one.task, one.group_id, one.group_ordinal, one.member, one.reward, one.sampled_tokens(),
        entry.advantage, low, high, len(one.segments), one.finish_reason, one.server_id,
        _storable(entry.prompt), _storable(entry.answer),
    )  # fmt: skip


def _storable(text: str) -> str:
    """Half of a surrogate pair is no character of UTF-8."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _opened(folder: Path) -> sqlite3.Connection:
    try:
        return open_to_write(folder)
    except sqlite3.DatabaseError as error:
        path = database_of(folder)
        aside = path.with_suffix(".damaged")
        path.replace(aside)
        for beside in ("-wal", "-shm"):
            path.with_name(f"{path.name}{beside}").unlink(missing_ok=True)
        _log.warning("the file of kept rollouts is damaged: a new one is begun", put_aside=str(aside), why=str(error))
        return open_to_write(folder)

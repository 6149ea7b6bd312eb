"""The file of kept rollouts: its tables, and how it is opened to write and to read.

A writer that was killed leaves whole transactions: SQLite's write-ahead log sees to it. Readers never hold it up.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from services.wire.errors import UsageError

NAME = "rollouts.sqlite3"
FORMAT = 1
_PAGE_BYTES = 8192
_WRITE_AHEAD_PAGES = 256
"""Taken over into the file once so many were written: the log beside it stays at a few MiB."""
_BUSY_S = 5.0
_MAPPED_BYTES = 1 << 30

_TABLES = f"""
CREATE TABLE steps (
    step INTEGER PRIMARY KEY, version INTEGER NOT NULL, at REAL NOT NULL, rollouts INTEGER NOT NULL, kept INTEGER NOT NULL
);
CREATE TABLE rollouts (
    id INTEGER PRIMARY KEY, step INTEGER NOT NULL, task TEXT NOT NULL, group_id TEXT NOT NULL, ordinal INTEGER NOT NULL,
    member INTEGER NOT NULL, reward REAL NOT NULL, length INTEGER NOT NULL, advantage REAL NOT NULL,
    first_version INTEGER NOT NULL, last_version INTEGER NOT NULL, segments INTEGER NOT NULL, finish_reason TEXT NOT NULL,
    server TEXT NOT NULL, prompt TEXT NOT NULL, answer TEXT NOT NULL
);
CREATE TABLE bodies (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE INDEX by_step ON rollouts (step);
CREATE INDEX by_task ON rollouts (task, step);
CREATE INDEX by_group ON rollouts (group_id);
CREATE INDEX by_reward ON rollouts (reward);
CREATE INDEX by_length ON rollouts (length);
CREATE TABLE pieces (token INTEGER PRIMARY KEY, text BLOB NOT NULL);
PRAGMA user_version = {FORMAT};
"""


def database_of(folder: Path) -> Path:
    """The file in a run's folder of rollouts."""
    return folder / NAME


def open_to_write(folder: Path) -> sqlite3.Connection:
    """The file in `folder`, made where there is none.

    Raises UsageError where it cannot be written, or is of a later format; sqlite3.DatabaseError where what is there is no
    such file.
    """
    path = database_of(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # One thread writes at a time, and not always the one that opened it.
        connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    except (OSError, sqlite3.OperationalError) as error:
        raise UsageError(f"cannot write {path} ({error})", "free disk space, or correct its permissions") from error
    try:
        connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA secure_delete = OFF")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_WRITE_AHEAD_PAGES}")
        connection.execute(f"PRAGMA journal_size_limit = {_WRITE_AHEAD_PAGES * _PAGE_BYTES}")
        if _format(connection, path) == 0:
            connection.executescript(f"BEGIN; {_TABLES} COMMIT;")
    except sqlite3.OperationalError as error:
        connection.close()
        raise UsageError(f"cannot write {path} ({error})", "free disk space, or correct its permissions") from error
    except BaseException:
        connection.close()
        raise
    return connection


@contextmanager
def reading(folder: Path) -> Iterator[sqlite3.Connection | None]:
    """The file in `folder`, read only; None where there is none. Raises UsageError where it cannot be read."""
    path = database_of(folder)
    if not path.is_file():
        yield None
        return
    try:
        connection = _open_to_read(path)
    except sqlite3.DatabaseError as error:
        raise UsageError(f"{path} cannot be read ({error})", "it was written by `rollmesh up`: is it whole?") from error
    with closing(connection):
        # Made a moment ago, by a trainer that begins: its tables come with its format.
        yield connection if _format(connection, path) else None


def _open_to_read(path: Path) -> sqlite3.Connection:
    """A folder that may not be written holds no log of a writer: such a file does not change."""
    last: sqlite3.DatabaseError | None = None
    for how in ("mode=ro", "immutable=1"):
        if how == "immutable=1" and path.with_name(f"{NAME}-wal").exists():
            break
        connection = sqlite3.connect(
            f"file:{quote(str(path.absolute()))}?{how}",
            uri=True, timeout=_BUSY_S, isolation_level=None, check_same_thread=False,
        )  # fmt: skip
        try:
            connection.execute("PRAGMA query_only = ON")
            connection.execute(f"PRAGMA mmap_size = {_MAPPED_BYTES}")
            connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        except sqlite3.DatabaseError as error:
            connection.close()
            last = error
            continue
        return connection
    assert last is not None
    raise last


def _format(connection: sqlite3.Connection, path: Path) -> int:
    (found,) = connection.execute("PRAGMA user_version").fetchone()
    if found > FORMAT:
        raise UsageError(
            f"{path} is of format {found}, this rollmesh reads up to {FORMAT}",
            "read it with the rollmesh that wrote it",
        )
    return int(found)

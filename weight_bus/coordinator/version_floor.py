"""The order of versions across restarts of the bus: what may be announced, and the record of what was, in a file.

A signature does not expire: whoever saved an old manifest could show it to a bus that has just started and remembers
nothing. So the bus writes down what it announced last, and takes nothing older.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import msgspec
import structlog

from services.host.files import write_whole
from services.wire.errors import UNDECODABLE, ConflictError, UsageError

FURTHEST_AHEAD = 1_000_000_000
"""Optimizer steps beyond what is known: no run makes so many between two versions."""

_log = structlog.get_logger()


class Announced(msgspec.Struct, frozen=True, kw_only=True):
    """The newest version that was announced, and the digest of its bytes."""

    run_id: str
    version: int
    root_digest: str


@dataclass(frozen=True)
class Known:
    """What a bus knows of versions: from its file, from its own announcements, from what live engines serve."""

    before: Announced | None = None
    highest: int | None = None
    served: int | None = None

    @property
    def newest(self) -> int:
        """The newest version that there is, as far as is known; 0 where nothing is."""
        before = None if self.before is None else self.before.version
        return max(number for number in (before, self.highest, self.served, 0) if number is not None)


def why_out_of_order(version: int, root_digest: str, known: Known) -> str | None:
    """Why a version that this process has not announced yet cannot be announced; None where it can. Pure.

    What engines serve counts until the first announcement only: then the bus itself knows what is newest.
    """
    before = known.before
    if before is not None and version < before.version:
        return f"version {version} is older than {before.version}, which was published before the bus started"
    if before is not None and version == before.version and root_digest != before.root_digest:
        return f"version {version} was published with other bytes before the bus started"
    if known.highest is None and known.served is not None and version < known.served:
        return f"version {version} is older than {known.served}, which an engine serves"
    if version > known.newest + FURTHEST_AHEAD:
        return f"version {version} is more than {FURTHEST_AHEAD} steps beyond {known.newest}, the newest that is known"
    return None


class VersionFloor:
    """What a bus has announced last, kept in `path`; without one it is forgotten when the process ends.

    Raises UsageError for a file that cannot be read, or is another run's: a bus must not start as if it knew nothing.
    """

    def __init__(self, run_id: str, path: Path | None = None) -> None:
        self._run_id, self._path = run_id, path
        self._writing = asyncio.Lock()
        self._before = None if path is None else _read(path, run_id)
        """What was announced before this process started."""
        self._written = -1 if self._before is None else self._before.version

    def check(self, version: int, root_digest: str, highest: int | None, served: Collection[int]) -> None:
        """Raise ConflictError for a version that `why_out_of_order` refuses."""
        why = why_out_of_order(version, root_digest, self.known(highest, served))
        if why is not None:
            again = "" if self._path is None else f"; for another run under the same name remove {self._path}"
            raise ConflictError(why, f"publish a newer version{again}")

    def known(self, highest: int | None, served: Collection[int]) -> Known:
        """`highest`: announced by this process; `served`: what each live engine serves."""
        return Known(self._before, highest, max(served, default=None))

    def digest_of(self, version: int) -> str:
        """The digest of what was announced before this process started; empty for another version."""
        return self._before.root_digest if self._before is not None and self._before.version == version else ""

    async def keep(self, version: int, root_digest: str) -> None:
        """Write down that a version was announced, unless a newer one is. A disk that fails is said in the log."""
        if self._path is None:
            return
        async with self._writing:
            if version <= self._written:
                return
            record = Announced(run_id=self._run_id, version=version, root_digest=root_digest)
            try:
                await asyncio.to_thread(write_whole, self._path, msgspec.json.encode(record), durable=True)
            except OSError as error:
                _log.warning("the announced version cannot be written down", path=str(self._path), why=repr(error))
                return
            self._written = version


def _read(path: Path, run_id: str) -> Announced | None:
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Announced)
    except FileNotFoundError:
        return None
    except (OSError, *UNDECODABLE) as error:
        raise UsageError(
            f"{path} cannot be read ({error})", "it is the bus's own: name another file, or remove it"
        ) from error
    if found.run_id != run_id:
        raise UsageError(f"{path} belongs to run {found.run_id!r}, not {run_id!r}", "give each run a file of its own")
    return found

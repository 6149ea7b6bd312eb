"""The runs that a dashboard shows: named folders, or all below one root; which of them run now, and with which Redis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services.host.run_folder import RunFolder, found_run, is_held, run_folders
from services.wire.errors import NotFoundError, UsageError


@dataclass(frozen=True)
class OpenRun:
    """`folder` is None for a run that is known by its Redis alone, `redis_url` for one that has ended.

    `redis_url` is without a password. `told`: it was named, and does not come from the folder.
    """

    name: str
    run_id: str
    folder: RunFolder | None
    redis_url: str | None
    told: bool = False


class OpenRuns:
    """`folders`: those that were named; empty: all in `root`. `live`: a run whose Redis was named."""

    def __init__(
        self, folders: Sequence[RunFolder] = (), root: Path | None = None, live: OpenRun | None = None
    ) -> None:
        self._folders, self._root, self._live = tuple(folders), root, live

    def all(self) -> list[OpenRun]:
        """The one that runs first, else as they were named, or the newest first. Reads the names in the root anew."""
        folders = self._folders or (run_folders(self._root) if self._root is not None else [])
        found = [self._live] if self._live is not None else []
        known = {run.run_id for run in found}
        found += [run for run in map(_opened, folders) if run.run_id not in known]
        return sorted(found, key=lambda run: run.redis_url is None)

    def named(self, name: str) -> OpenRun:
        """Raises NotFoundError."""
        for run in self.all():
            if run.name == name:
                return run
        raise NotFoundError(f"no run {name[:100]!r} is open here", "GET /api/runs lists them")


def _opened(folder: RunFolder) -> OpenRun:
    redis_url = None
    if folder.redis_url.is_file() and is_held(folder):
        redis_url = folder.redis_url.read_text(encoding="utf-8").strip()
    return OpenRun(folder.root.name, _run_id(folder), folder, redis_url)


def open_runs(names: Sequence[str], root: Path, run_id: str | None, redis_url: str | None) -> OpenRuns:
    """As a command line names them. Raises UsageError for a run that is not there, or half an address of one."""
    if (run_id is None) != (redis_url is None):
        raise UsageError("--run-id and --redis-url say together which run is followed", "give both, or none")
    if run_id is None or redis_url is None:
        return OpenRuns([found_run(name, root) for name in names], root)
    # A plane without a trainer has a folder, too, in which no run id stands.
    plain = [folder for folder in map(_folder, names) if folder.config.is_file() and not folder.run_id.is_file()]
    named = {folder.root for folder in plain}
    folders = [found_run(name, root) for name in names if _folder(name).root not in named]
    own = next((folder for folder in folders if _run_id(folder) == run_id), next(iter(plain), None))
    name = run_id if own is None else own.root.name
    return OpenRuns(folders, None, OpenRun(name, run_id, own, redis_url, told=True))


def _folder(name: str) -> RunFolder:
    return RunFolder(Path(name).expanduser().absolute())


def _run_id(folder: RunFolder) -> str:
    return folder.run_id.read_text(encoding="utf-8").strip()


def as_it_is_now(run: OpenRun) -> OpenRun:
    """The same run, with the Redis that it has now: it may have ended, or begun again."""
    return run if run.told or run.folder is None else _opened(run.folder)

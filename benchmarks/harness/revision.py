"""Another commit of this project, to be measured beside the checkout that a benchmark is called from.

revision ──► commit ──► .dev/revisions/<commit>  its files ──same dependencies?──yes──► our Python
                                                                 └──no──► an environment of its own
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.security.keys import without_keys
from services.wire.errors import RollmeshError, UsageError

ROOT = Path(__file__).parents[2]
HERE = "here"


@dataclass(frozen=True)
class Checkout:
    """The files of one commit, and the Python that has what they need. `name`: of the commit, or `here`."""

    name: str
    folder: Path
    python: Path

    def command(self, module: str, *arguments: str) -> list[str]:
        """Runs one of its modules, whatever else is installed."""
        # -P: the folder that the user stands in must not shadow its packages.
        return [str(self.python), "-P", "-m", module, *arguments]

    @property
    def environ(self) -> dict[str, str]:
        """Environment variables for its processes: its own modules come before those that are installed."""
        return {**without_keys(os.environ), "PYTHONPATH": str(self.folder)}


def here() -> Checkout:
    """The checkout that this module is of, changes that are in no commit included."""
    return compiled(Checkout(HERE, ROOT, Path(sys.executable)))


def checkout(revision: str, say: Callable[[str], None]) -> Checkout:
    """The files of a commit, made once. Raises UsageError for a revision that there is not."""
    commit = _commit(revision)
    folder = ROOT / ".dev" / "revisions" / commit
    if not (folder / "pyproject.toml").exists():
        say(f"taking the files of {commit} into {folder.relative_to(ROOT)}")
        packed = _git("archive", "--format=tar", commit)
        with tarfile.open(fileobj=io.BytesIO(packed)) as files:
            # Python 3.11.4 has it, and later ones warn without it.
            files.extraction_filter = getattr(tarfile, "data_filter", None)
            files.extractall(folder)
    if _needs(folder) == _needs(ROOT):
        return compiled(Checkout(commit, folder, Path(sys.executable)))
    say(f"{commit} needs other packages: making its environment")
    made = subprocess.run(["./dev", "run", "true"], cwd=folder, env=without_keys(os.environ), check=False)
    if made.returncode != 0:
        raise RollmeshError(f"the environment of {commit} cannot be made", f"run `./dev run true` in {folder}")
    return compiled(Checkout(commit, folder, folder / ".venv" / "bin" / "python"))


def compiled(made: Checkout) -> Checkout:
    """With bytecode of all its modules. Where Python is told to write none (PYTHONDONTWRITEBYTECODE), a checkout without
    it would compile them at each start: an eighth of what a start takes. Raises RollmeshError where that fails."""
    packages = [str(each.parent) for each in made.folder.glob("*/__init__.py") if each.parent.name != "tests"]
    command = [str(made.python), "-m", "compileall", "-q", *packages]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise RollmeshError(f"{made.folder} cannot be compiled: {(ended.stdout + ended.stderr)[-1000:]}")
    return made


def _commit(revision: str) -> str:
    try:
        return _git("rev-parse", "--verify", "--quiet", "--short=12", f"{revision}^{{commit}}").decode().strip()
    except subprocess.CalledProcessError as error:
        raise UsageError(f"there is no commit {revision!r} in {ROOT}", "name one: a hash, a branch, HEAD~3") from error


def _git(*arguments: str) -> bytes:
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=True).stdout
    except FileNotFoundError as error:
        raise UsageError("there is no git, which knows other commits", "install git") from error


def _needs(folder: Path) -> tuple[Any, Any]:
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project["dependencies"], project["optional-dependencies"]

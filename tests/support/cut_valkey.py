"""A Valkey that is killed and started again; its file may lose its end meanwhile, as by a disk that failed."""

from __future__ import annotations

import subprocess
from pathlib import Path

from services.supervisor.launch_plan import ValkeyPlan
from tests.conftest import free_port, wait_for_port

_EVERY_WRITE = ("--appendfsync", "always")
"""What was acknowledged is in the file. Otherwise Valkey keeps writes to itself while the file is flushed to a slow disk,
for up to two seconds, and kill -9 loses them.
"""


class CutValkey:
    """Runs from the start; `close` ends it."""

    def __init__(self, folder: Path) -> None:
        self.plan = ValkeyPlan(data_dir=folder, port=free_port())
        self.start()

    @property
    def written(self) -> int:
        """Bytes of its file."""
        return self._file.stat().st_size

    @property
    def _file(self) -> Path:
        return next((self.plan.data_dir / "appendonlydir").glob("*.incr.aof"))

    def come_back(self, length: int) -> None:
        """kill -9, all of the file after `length` bytes lost, started again."""
        self.kill()
        with self._file.open("r+b") as file:
            file.truncate(length)
        self.start()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def start(self) -> None:
        command = [*self.plan.command(), *_EVERY_WRITE]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_port(self.plan.port, self._process)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=10)

"""A Valkey whose append-only file loses its end while it is down, as by a disk that failed or a replica that was behind."""

from __future__ import annotations

import subprocess
from pathlib import Path

from services.supervisor.launch_plan import ValkeyPlan
from tests.conftest import free_port, wait_for_port


class CutValkey:
    """Runs from the start; `close` ends it."""

    def __init__(self, folder: Path) -> None:
        self.plan = ValkeyPlan(data_dir=folder, port=free_port())
        self._process = self._start()

    @property
    def written(self) -> int:
        """Bytes of its file."""
        return self._file.stat().st_size

    @property
    def _file(self) -> Path:
        return next((self.plan.data_dir / "appendonlydir").glob("*.incr.aof"))

    def come_back(self, length: int) -> None:
        """kill -9, all of the file after `length` bytes lost, started again."""
        self._process.kill()
        self._process.wait()
        with self._file.open("r+b") as file:
            file.truncate(length)
        self._process = self._start()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=10)

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(self.plan.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_port(self.plan.port, process)
        return process

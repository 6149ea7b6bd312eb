"""Child processes: each leads a process group of its own, writes one log, and is ended with everything it started.

start ──► running ──► exited by itself ─────────────────────────────► rest of its group killed
             └──stop──► SIGTERM ──► exited | deadline ──► SIGKILL ──► rest of its group killed
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from services.host.files import end_of
from services.policies.backoff import MISUSE, RUN_FAILED, GiveUp, RestartPolicy
from services.policies.diagnosis.logs import last_words
from services.supervisor import reaper as reaper
from services.wire.errors import RollmeshError, UsageError

Role = Literal["service", "job"]
MARK = "ROLLMESH_SUPERVISOR"
"""The environment variable by which the reaper finds children that it was not told of."""


@dataclass(frozen=True)
class ProcessSpec:
    """A process to run. `environment` is added to the supervisor's own; `name` names its log.

    A `service` runs until it is told to stop; a `job` ends with 0 when it is done. `restarts`: what follows its death.
    """

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    role: Role = "service"
    restarts: RestartPolicy = field(default_factory=RestartPolicy)
    inherited: tuple[int, ...] = ()
    """File descriptors that stay open in it."""


class Reaper:
    """The supervisor's end of the reaper's pipe."""

    def __init__(self, shm_prefix: Path) -> None:
        self._shm_prefix = shm_prefix
        self.mark = secrets.token_hex(8)
        """Of this run's processes: the value of MARK among their environment variables."""
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Reaper:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", reaper.__file__, stdin=asyncio.subprocess.PIPE, start_new_session=True
        )
        self._tell(f"mark {MARK}={self.mark}")
        self._tell(f"shm {self._shm_prefix}")
        return self

    async def __aexit__(self, *_: object) -> None:
        self._tell("bye")
        if self._process is not None:
            await self._process.wait()

    def started(self, group: int) -> None:
        self._tell(f"group {group}")

    def ended(self, group: int) -> None:
        self._tell(f"gone {group}")

    def _tell(self, line: str) -> None:
        if self._process is None or self._process.stdin is None:
            raise RuntimeError("use the reaper as an async context manager")
        # A reaper that was killed cannot be told anything; the run itself goes on.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._process.stdin.write(f"{line}\n".encode())


class Child:
    """One running process and its group. `log`: where its output goes."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path, reaper: Reaper | None = None) -> None:
        self.name = name
        self.process = process
        self._log = log
        self._reaper = reaper
        self.started_at = time.monotonic()

    @classmethod
    async def start(cls, spec: ProcessSpec, log: Path, reaper: Reaper) -> Child:
        """Start it, its output appended to `log`. Raises OSError when the program cannot be run."""
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *spec.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **spec.environment, MARK: reaper.mark},
                start_new_session=True,
                pass_fds=spec.inherited,
            )
        reaper.started(process.pid)
        return cls(spec.name, process, log, reaper)

    @property
    def pid(self) -> int:
        """Also the id of its process group."""
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.returncode is None

    async def until(self, ready: Callable[[], Awaitable[bool]], deadline_s: float) -> None:
        """Return once `ready` says so. Raises RollmeshError, with the end of the log, when the process ends or is late."""
        try:
            async with asyncio.timeout(deadline_s):
                while not await ready():
                    self.check()
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise RollmeshError(f"{self.name} was not ready within {deadline_s:.0f} s", self.tail()) from error

    def check(self) -> None:
        """Raise RollmeshError if the process has ended."""
        if self.process.returncode is not None:
            raise RollmeshError(f"{self.name} ended with {describe_exit(self.process.returncode)}", self.tail())

    def tail(self) -> str:
        """The end of its log."""
        return log_tail(self._log, _CHILD_TAIL_LINES).strip() or "it wrote no log"

    async def wait(self) -> int:
        """Its exit code (negative: the signal that ended it), once it and the rest of its group are gone."""
        code = await self.process.wait()
        self.kill()
        if self._reaper is not None:
            self._reaper.ended(self.pid)
        return code

    def terminate(self) -> None:
        """Ask the process to end. What it started is its own to end, or is killed after it."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill the whole group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def stop(self, deadline_s: float, *, group: bool = False) -> int:
        """Terminate, and kill whatever is left after `deadline_s`. `group`: what it started has that long too."""
        self.terminate()
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.shield(self.process.wait())
                if group:
                    await self._group_gone()
        except TimeoutError:
            self.kill()
        return await self.wait()

    async def _group_gone(self) -> None:
        """Children may outlive their parent a little: they still give back memory that they share."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            while True:
                os.killpg(self.pid, 0)
                await asyncio.sleep(_POLL_S)


def log_tail(log: Path, lines: int) -> str:
    """The last lines of a log that may not exist, for an error message."""
    return "\n".join(end_of(log, 16384).splitlines()[-lines:])


Say = Callable[[str], None]
"""Where a line for the user goes."""

_TAIL_LINES = 15
_CHILD_TAIL_LINES = 60
_POLL_S = 0.05


class ServiceFailedError(RollmeshError):
    """A process of the mesh kept dying, or never became ready."""

    code = "service_failed"


class ManagedProcess:
    """Starts one process, watches it, restarts it when it dies, and gives up after too many deaths.

    `run` returns when a job is done; cancelling it leaves the process to `stop`.
    """

    def __init__(self, spec: ProcessSpec, logs: Path, reaper: Reaper, say: Say) -> None:
        self.spec = spec
        self.name = spec.name
        self.log = logs / f"{self.name}.log"
        self.restarts = 0
        self.child: Child | None = None
        self._reaper = reaper
        self._say = say

    async def run(self) -> None:
        """Raises ServiceFailedError, with the end of its log, when it keeps dying; UsageError when it refuses to start."""
        in_a_row = 0
        while True:
            self.child = await Child.start(self.spec, self.log, self._reaper)
            code = await self.child.wait()
            if code == 0 and self.spec.role == "job":
                return
            lived_s = time.monotonic() - self.child.started_at
            decision = self.spec.restarts.after_exit(code, lived_s, in_a_row)
            ended = f"{self.name} ended with {describe_exit(code)} after {lived_s:.1f} s"
            if isinstance(decision, GiveUp):
                raise self._failure(code, ended, decision.why)
            self._say(f"{ended}: starting it again in {decision.delay_s:g} s (log: {self.log})")
            self.restarts += 1
            in_a_row = decision.in_a_row
            await asyncio.sleep(decision.delay_s)

    def _failure(self, code: int, ended: str, why: str) -> RollmeshError:
        said = last_words(log_tail(self.log, _TAIL_LINES))
        if code == MISUSE:
            return UsageError(f"{self.name} cannot start", said or f"see {self.log}")
        if code == RUN_FAILED:
            return ServiceFailedError(f"{self.name} gave the run up: {said}", f"see {self.log}")
        tail = log_tail(self.log, _TAIL_LINES)
        last = tail.rpartition("\n")[2]
        if last_words(last) != last:
            # It said why, in a line that is for people.
            return ServiceFailedError(f"{ended}; {why}: {last_words(last)}", f"see {self.log}")
        return ServiceFailedError(f"{ended}; {why}", f"see {self.log}, which ends in\n{tail}")

    async def stop(self, deadline_s: float) -> None:
        if self.child is not None:
            await self.child.stop(deadline_s)


def describe_exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"

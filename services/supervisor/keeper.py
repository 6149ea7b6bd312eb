"""Keeping one process of the mesh: start it, watch it, start it again when it dies, say so, and give up in good time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from services.policies.backoff import MISUSE, GiveUp, RestartPolicy
from services.supervisor.processes import Child, Janitor, ProcessSpec, log_tail
from services.wire.errors import RollmeshError, UsageError

Role = Literal["service", "job"]
Say = Callable[[str], None]
"""Where a line for the user goes."""

_TAIL_LINES = 15


class ServiceFailedError(RollmeshError):
    """A process of the mesh kept dying, or never became ready."""

    code = "service_failed"


@dataclass(frozen=True)
class Post:
    """A place in the mesh. A `service` runs until it is told to stop; a `job` ends with 0 when it is done."""

    process: ProcessSpec
    role: Role
    restarts: RestartPolicy = field(default_factory=RestartPolicy)


class Keeper:
    """Keeps one post filled. `run` returns when a job is done; cancelling it leaves the process to `stop`."""

    def __init__(self, post: Post, logs: Path, janitor: Janitor, say: Say) -> None:
        self.post = post
        self.name = post.process.name
        self.log = logs / f"{self.name}.log"
        self.restarts = 0
        self.child: Child | None = None
        self._janitor = janitor
        self._say = say

    async def run(self) -> None:
        """Raises ServiceFailedError, with the end of its log, when it keeps dying; UsageError when it refuses to start."""
        in_a_row = 0
        while True:
            self.child = await Child.start(self.post.process, self.log, self._janitor)
            code = await self.child.wait()
            if code == 0 and self.post.role == "job":
                return
            lived_s = time.monotonic() - self.child.started_at
            decision = self.post.restarts.after_exit(code, lived_s, in_a_row)
            ended = f"{self.name} ended with {describe_exit(code)} after {lived_s:.1f} s"
            if isinstance(decision, GiveUp):
                raise self._failure(code, ended, decision.why)
            self._say(f"{ended}: starting it again in {decision.delay_s:g} s (log: {self.log})")
            self.restarts += 1
            in_a_row = decision.in_a_row
            await asyncio.sleep(decision.delay_s)

    def _failure(self, code: int, ended: str, why: str) -> RollmeshError:
        if code == MISUSE:
            said = log_tail(self.log, 1).removeprefix("rollmesh: ")
            return UsageError(f"{self.name} cannot start", said or f"see {self.log}")
        tail = log_tail(self.log, _TAIL_LINES)
        return ServiceFailedError(f"{ended}; {why}", f"see {self.log}, which ends in\n{tail}")

    async def stop(self, deadline_s: float) -> None:
        if self.child is not None:
            await self.child.stop(deadline_s)


def describe_exit(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"

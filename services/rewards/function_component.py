"""Reward component of a user's function: samples wait for one of its worker processes; a lost worker is replaced.

submit ──► waiting (bounded) ──► a free worker calls ──► value | failure
              └──given up: passed over                └──given up: the worker is killed and another one started
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import structlog

from services.config.rewards import RewardComponent
from services.policies.backoff import growing_delay
from services.policies.rewards import Failure
from services.rewards.component import Score, settle
from services.rewards.sandbox.protocol import Failed, Files, Limits, Outcome, Sample
from services.rewards.sandbox.worker_handle import WorkerLostError, WorkerProcess, lost
from services.wire.errors import RollmeshError

_log = structlog.get_logger()
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 10.0


class FunctionScorer:
    """Scores by one function, in `component.workers` processes.

    `hidden`: keys, which no call may read. `must_hold`: it does not start where a limit cannot be enforced.
    """

    def __init__(
        self, component: RewardComponent, max_waiting: int, *, hidden: Sequence[Path] = (), must_hold: bool = True
    ) -> None:
        self._name, self._function, self._options = component.name, component.called, component.options
        self._workers = component.workers
        self._limits = Limits(
            time_s=component.time_limit_s,
            memory_mib=component.memory_mib,
            network=component.network,
            processes=component.starts_processes,
        )
        self._files = Files(
            folder=str(Path.cwd()),
            readable=[str(each.absolute()) for each in component.readable],
            hidden=[str(each.absolute()) for each in hidden],
        )
        self._must_hold = must_hold
        self._max_waiting = max_waiting
        self._waiting: deque[tuple[Sample, asyncio.Future[Score]]] = deque()
        self._some_wait = asyncio.Event()
        self._ever_alive = False
        self._trouble: str | None = f"no worker of {self._name} has started yet"
        self.not_confined: list[str] = []

    @property
    def full(self) -> bool:
        return len(self._waiting) >= self._max_waiting

    def not_ready(self) -> list[str]:
        # Not while a worker is replaced: samples wait for that.
        return [] if self._trouble is None else [self._trouble]

    def submit(self, sample: Sample) -> asyncio.Future[Score]:
        future: asyncio.Future[Score] = asyncio.get_running_loop().create_future()
        if self._options:
            sample = msgspec.structs.replace(sample, metadata={**self._options, **sample.metadata})
        self._waiting.append((sample, future))
        self._some_wait.set()
        return future

    async def run(self) -> None:
        """Raises UsageError for a function that cannot be called when the first worker starts."""
        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(self._workers):
                    workers.create_task(self._keep_worker(), name=f"rewards-{self._name}")
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed

    async def _keep_worker(self) -> None:
        failures = 0
        while True:
            try:
                worker = await WorkerProcess.start(self._function, self._limits, self._files, must_hold=self._must_hold)
            except RollmeshError as error:
                if not self._ever_alive:
                    raise
                failures += 1
                self._trouble = f"no worker of {self._name} starts any more ({error})"
                _log.error("reward worker does not start", component=self._name, why=str(error))
                await asyncio.sleep(growing_delay(failures, _FIRST_PAUSE_S, _LONGEST_PAUSE_S))
                continue
            if not self._ever_alive:
                _log.info("reward function confined", component=self._name, held_by=worker.held_by)
                if worker.not_confined:
                    missing = worker.not_confined
                    _log.warning("reward function not held to all limits", component=self._name, missing=missing)
            failures, self._ever_alive, self._trouble = 0, True, None
            self.not_confined = worker.not_confined
            try:
                await self._use(worker)
            finally:
                await worker.close()

    async def _use(self, worker: WorkerProcess) -> None:
        """Serve calls until the worker is lost."""
        while True:
            sample, future = await self._next()
            calling = asyncio.create_task(worker.call(sample))
            try:
                waited: list[asyncio.Future[Any]] = [calling, future]
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if not calling.done():
                    return  # Nobody waits for this call any more, and it cannot be stopped otherwise.
                settle(future, _score(calling.result()))
            except WorkerLostError as error:
                _log.warning("reward worker lost", component=self._name, why=str(error))
                settle(future, _score(lost(error)))
                return
            finally:
                calling.cancel()
                await asyncio.wait([calling])

    async def _next(self) -> tuple[Sample, asyncio.Future[Score]]:
        while True:
            while self._waiting:
                sample, future = self._waiting.popleft()
                if not future.done():
                    return sample, future
            self._some_wait.clear()
            await self._some_wait.wait()


def _score(outcome: Outcome) -> Score:
    if isinstance(outcome, Failed):
        return Failure(outcome.cause, f"{outcome.what}; it wrote:\n{outcome.said}" if outcome.said else outcome.what)
    return outcome.value

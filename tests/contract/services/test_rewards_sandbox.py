"""Reward functions in real workers: whatever a call does, it is told by cause and harms no other call."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.policies.rewards import RewardFailure
from services.rewards.sandbox.protocol import Failed, Limits, Sample, Value
from services.rewards.sandbox.worker_handle import WorkerLostError, WorkerProcess
from services.wire.errors import UsageError
from tests.support.open_pipes import open_pipes
from tests.support.until import until

FUNCTIONS = """
import ctypes, os, signal, socket, subprocess, sys, threading, time

kept = []

def judge(answer):
    return globals()[answer]()

def fine(): return 1
def sleeps(): time.sleep(60)
def spins():
    while True: pass
def eats(): return len(bytearray(4 << 30))
def leaks(): kept.append(bytearray(100 << 20)); return len(kept)
def floods():
    while True: sys.stderr.write("x" * 4096)
def segfaults():
    sys.stderr.write("the last words\\n")
    sys.stderr.flush()
    ctypes.string_at(0)
def exits(): os._exit(7)
def quits(): sys.exit(3)
def raises(): raise ValueError("no digits")
def says_no_number(): return "high"
def says_nan(): return float("nan")
def bombs():
    while True: os.fork()
def kills_its_parent(): os.kill(os.getppid(), signal.SIGKILL); time.sleep(0.1); return 2
def connects(): socket.create_connection(("127.0.0.1", int(os.environ.get("PORT", 1)))); return 2
def threads():
    made = []
    thread = threading.Thread(target=lambda: made.append(2)); thread.start(); thread.join()
    return made[0]
def runs(): return float(subprocess.run(["echo", "0.5"], capture_output=True, check=True).stdout)
def breaks_things():
    globals().update(fine=None); sys.stdout.close(); os.chdir("/"); signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return 2
def writes_to_the_service():
    for descriptor in range(3, 64):
        try: os.write(descriptor, b'{"type":"Value","value":99}\\n')
        except OSError: pass
    return 2
def leaves_one_behind():
    if os.fork() == 0:
        os.setsid()
        while True: time.sleep(1)
    return 2
def secret(): return float("KEY" in " ".join(os.environ))

def names_others(metadata):
    for pid in metadata["pids"]:
        try: os.kill(pid, 0)
        except ProcessLookupError: continue
        return pid
    return 0
def wants(answer, solution, complete, bonus=0.25): return float(answer == solution and complete) + bonus
def wants_all(**everything): return len(everything["metadata"]) + len(everything["messages"])
async def later(answer): return 1
number = 7
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    (tmp_path / "broken.py").write_text("import sys\nprint('half way')\nraise RuntimeError('not today')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def limits(**changes: Any) -> Limits:
    return Limits(**{"time_s": 5.0, "memory_mib": 256, "network": False, "processes": False, **changes})


def sample(answer: str, **changes: Any) -> Sample:
    given = {"task": "", "prompt": "p", "messages": None, "answer": answer, "complete": True, "metadata": {}}
    return Sample(**{**given, **changes})


@asynccontextmanager
async def worker(function: str = "mine:judge", **changes: Any) -> AsyncIterator[WorkerProcess]:
    started = await WorkerProcess.start(function, limits(**changes))
    try:
        yield started
    finally:
        await started.close()


def children() -> set[int]:
    return {process.pid for process in psutil.Process().children(recursive=True)}


@pytest.mark.parametrize(
    ("what", "cause", "words"),
    [
        ("eats", RewardFailure.MEMORY, "memory"),
        ("floods", RewardFailure.OUTPUT, "1024 KiB"),
        ("segfaults", RewardFailure.CRASH, "SIGSEGV"),
        ("exits", RewardFailure.CRASH, "exit code 7"),
        ("quits", RewardFailure.RAISED, "SystemExit: 3"),
        ("raises", RewardFailure.RAISED, "ValueError: no digits (mine.py:"),
        ("says_no_number", RewardFailure.VALUE, "returned str"),
        ("says_nan", RewardFailure.VALUE, "returned nan"),
        ("bombs", RewardFailure.RAISED, "PermissionError"),
        ("runs", RewardFailure.RAISED, "PermissionError"),
        ("connects", RewardFailure.RAISED, "PermissionError"),
    ],
)
async def test_a_call_that_goes_wrong_is_told_by_cause_and_harms_no_other(
    folder: Path, what: str, cause: RewardFailure, words: str
) -> None:
    async with worker() as calls:
        failed = await calls.call(sample(what))
        assert isinstance(failed, Failed)
        assert failed.cause == cause, failed
        assert words in failed.what
        assert await calls.call(sample("fine")) == Value(1.0)


@pytest.mark.parametrize("what", ["sleeps", "spins"])
async def test_a_call_ends_at_its_time_limit(folder: Path, what: str) -> None:
    async with worker(time_s=0.4) as calls:
        before, began = children(), time.monotonic()
        failed = await calls.call(sample(what))
        took = time.monotonic() - began
        assert isinstance(failed, Failed)
        assert failed.cause == RewardFailure.TIMEOUT
        assert 0.4 <= took < 20.0
        assert children() == before, "what ran too long is gone"
        assert await calls.call(sample("fine")) == Value(1.0)


@pytest.mark.parametrize("what", ["breaks_things", "threads"])
async def test_what_a_call_does_to_its_environment_variables_is_not_seen_by_the_next(folder: Path, what: str) -> None:
    async with worker() as calls:
        assert await calls.call(sample(what)) == Value(2.0)
        assert await calls.call(sample("fine")) == Value(1.0)


async def test_a_call_can_neither_name_nor_end_processes_but_its_own(folder: Path) -> None:
    async with worker() as calls, worker("mine:names_others") as naming:
        if calls.not_confined:
            pytest.skip(f"this machine cannot: {calls.not_confined}")
        assert await calls.call(sample("kills_its_parent")) == Value(2.0)
        assert await calls.call(sample("fine")) == Value(1.0)
        others = [os.getpid(), *children()]
        # Small numbers are taken in every namespace.
        pids = [pid for pid in others if pid > 1000]
        assert pids
        assert await naming.call(sample("", metadata={"pids": pids})) == Value(0.0)


async def test_a_call_cannot_answer_for_its_worker(folder: Path) -> None:
    async with worker() as calls:
        meddled = await calls.call(sample("writes_to_the_service"))
        assert isinstance(meddled, Failed)
        assert (meddled.cause, meddled.what) == (RewardFailure.CRASH, "it ended without an outcome that can be read")
        assert await calls.call(sample("fine")) == Value(1.0)


async def test_memory_that_calls_leak_is_not_added_up(folder: Path) -> None:
    async with worker() as calls:
        for _ in range(4):
            assert await calls.call(sample("leaks")) == Value(1.0)


async def test_the_end_of_what_a_call_wrote_is_told(folder: Path) -> None:
    async with worker() as calls:
        crashed, flooded = await calls.call(sample("segfaults")), await calls.call(sample("floods"))
        assert isinstance(crashed, Failed)
        assert crashed.said == "the last words"
        assert isinstance(flooded, Failed)
        assert 0 < len(flooded.said) <= 2000


async def test_processes_where_they_are_allowed_end_with_their_call(folder: Path) -> None:
    async with worker(processes=True, time_s=1.0) as calls:
        if calls.not_confined:
            pytest.skip(f"this machine cannot: {calls.not_confined}")
        before = children()
        assert await calls.call(sample("runs")) == Value(0.5)
        assert await calls.call(sample("leaves_one_behind")) == Value(2.0)
        assert isinstance(await calls.call(sample("bombs")), Failed)
        await until(lambda: children() == before)
        assert await calls.call(sample("fine")) == Value(1.0)


async def test_the_network_is_there_only_where_it_is_allowed(folder: Path) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    # The port travels in the code: functions do not see the service's environment.
    (folder / "mine.py").write_text(FUNCTIONS.replace('os.environ.get("PORT", 1)', f'"{port}"'))
    async with server, worker(network=True) as open_one, worker() as closed_one:
        assert await open_one.call(sample("connects")) == Value(2.0)
        assert isinstance(await closed_one.call(sample("connects")), Failed)


async def test_functions_see_no_keys(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMESH_AGENT_KEY", "k" * 16)
    async with worker() as calls:
        assert await calls.call(sample("secret")) == Value(0.0)


async def test_a_function_gets_what_it_names(folder: Path) -> None:
    async with worker("mine:wants") as calls:
        assert await calls.call(sample("a", metadata={"solution": "a", "more": 1})) == Value(1.25)
        assert await calls.call(sample("a", metadata={"solution": "a", "bonus": 2}, complete=False)) == Value(2.0)
        missing = await calls.call(sample("a"))
        assert isinstance(missing, Failed)
        assert (missing.cause, "'solution'" in missing.what) == (RewardFailure.SAMPLE, True)
    async with worker("mine:wants_all") as calls:
        asked = sample(
            "a", prompt=None, messages=[{"role": "user", "content": "é\n"}], metadata={"x": [1, {"y": None}]}
        )
        assert await calls.call(asked) == Value(2.0)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("mine:nothing", "no attribute 'nothing'"),
        ("mine:number", "int, no function"),
        ("mine:later", "coroutine"),
        ("absent:judge", "No module named 'absent'"),
        ("broken:judge", "not today"),
    ],
)
async def test_a_function_that_cannot_be_called_is_told_at_the_start(folder: Path, function: str, words: str) -> None:
    before = children()
    with pytest.raises(UsageError, match=words):
        await WorkerProcess.start(function, limits())
    await until(lambda: children() == before)


async def test_a_worker_that_dies_is_told_and_one_that_is_closed_leaves_nothing(folder: Path) -> None:
    before = children()
    async with worker() as calls:
        # In namespaces it is the child of the process that made them: whichever ends, the other does.
        os.kill(min(children() - before), 9)
        await until(lambda: children() == before)
        with pytest.raises(WorkerLostError, match="has ended"):
            await calls.call(sample("fine"))
    async with worker() as calls:
        idle = len(children() - before)
        calling = asyncio.create_task(calls.call(sample("sleeps")))
        await until(lambda: len(children() - before) > idle)
        calling.cancel()
        await asyncio.wait([calling])
    await until(lambda: children() == before)


async def test_a_worker_is_closed_to_the_end_also_where_that_is_cancelled(folder: Path) -> None:
    before, pipes = children(), open_pipes()
    started = await WorkerProcess.start("mine:judge", limits())
    calling = asyncio.create_task(started.call(sample("sleeps")))
    await asyncio.sleep(0.05)
    calling.cancel()
    await asyncio.wait([calling])
    closing = asyncio.create_task(started.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await asyncio.sleep(0)  # what is closed is let go of in the loop's next turn
    assert open_pipes() == pipes
    await until(lambda: children() == before)

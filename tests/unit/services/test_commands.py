"""A process with pipes is ended to the end, whoever is cancelled meanwhile and whatever else holds the pipes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from asyncio.subprocess import PIPE, Process

import pytest

from services.host.commands import end_piped
from tests.support.open_pipes import open_pipes
from tests.support.until import until


async def shell(command: str) -> Process:
    return await asyncio.create_subprocess_exec(
        *("sh", "-c", command), stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
    )


async def test_pipes_are_closed_also_where_the_end_is_cancelled() -> None:
    before = open_pipes()
    process = await shell("sleep 0.3 & echo begun; exec sleep 60")
    assert process.stdout is not None
    assert await process.stdout.readline() == b"begun\n"
    ending = asyncio.create_task(end_piped(process, within_s=20.0))
    for _ in range(3):
        await asyncio.sleep(0.02)
        ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    await asyncio.sleep(0)  # what is closed is let go of in the loop's next turn
    assert process.returncode == -signal.SIGKILL
    assert open_pipes() == before


async def test_full_pipes_keep_nobody_waiting() -> None:
    before = open_pipes()
    process = await shell("exec cat /dev/zero")
    assert process.stdout is not None
    await process.stdout.readexactly(1 << 20)
    await end_piped(process, within_s=20.0)
    await asyncio.sleep(0)
    assert open_pipes() == before


async def test_what_the_process_leaves_behind_keeps_nobody_waiting() -> None:
    before = open_pipes()
    process = await shell("sleep 60 & echo begun; exec sleep 60")
    assert process.stdout is not None
    await process.stdout.readline()
    began = time.monotonic()
    await end_piped(process, within_s=0.2)
    assert time.monotonic() - began < 20.0
    os.killpg(process.pid, signal.SIGKILL)
    await until(lambda: open_pipes() == before)

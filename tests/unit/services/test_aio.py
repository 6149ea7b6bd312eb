"""Asyncio helpers: the first error of tasks that ran at once; work done to its end although the wait is cancelled."""

from __future__ import annotations

import asyncio

import pytest

from services.host.aio import first_failure, to_its_end
from services.wire.errors import ConflictError


async def _raise(error: Exception) -> None:
    raise error


async def test_the_first_of_our_errors_comes_out_alone() -> None:
    with pytest.raises(ConflictError, match="one"), first_failure():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_raise(ConflictError("one")))
            tasks.create_task(_raise(ConflictError("two")))


async def test_nothing_that_is_not_ours_is_hidden() -> None:
    with pytest.raises(ExceptionGroup) as failed, first_failure():
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(_raise(ConflictError("one")))
            tasks.create_task(_raise(ZeroDivisionError()))
    assert failed.group_contains(ZeroDivisionError)


async def test_a_cancelled_wait_ends_only_after_its_work() -> None:
    """As a mesh is stopped: a signal that comes meanwhile must not leave half of it running."""
    begun, go_on, done = asyncio.Event(), asyncio.Event(), []

    async def stop() -> None:
        begun.set()
        await go_on.wait()
        done.append("the rest")

    waiting = asyncio.create_task(to_its_end(stop()))
    await begun.wait()
    for _ in range(2):
        waiting.cancel()
        await asyncio.sleep(0)
        assert not waiting.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert done == ["the rest"]


async def test_work_that_fails_says_so_although_the_wait_is_cancelled() -> None:
    async def fail() -> None:
        await asyncio.sleep(0.01)
        raise ConflictError("the work's own")

    waiting = asyncio.create_task(to_its_end(fail()))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(ConflictError, match="the work's own"):
        await waiting

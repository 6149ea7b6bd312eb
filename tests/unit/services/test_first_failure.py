"""Errors of tasks that ran at once: the first of them, and no group where all of them are ours."""

from __future__ import annotations

import asyncio

import pytest

from services.host.aio import first_failure
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

"""Work for a caller ends with the caller: in the task of the call, over real connections."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from fastapi import FastAPI, Request, Response

from services.http.app import make_app
from services.http.connection import Caller
from services.http.streaming import EventStream
from services.http.while_connected import ClientGoneError, until_gone, while_connected
from services.wire.errors import DeadlineError
from tests.support.raw_http import connected, head
from tests.support.served_app import served
from tests.support.until import until

Work = Callable[[], AsyncGenerator[bytes, None]]


@asynccontextmanager
async def _nothing(_: FastAPI) -> AsyncIterator[None]:
    yield


class Job:
    """What became of the work of a call."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.free = asyncio.Event()
        self.ended: list[str] = []
        self.raised: list[str] = []

    async def run(self) -> str:
        self.begun.set()
        try:
            await self.free.wait()
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        self.ended.append("done")
        return "done"

    async def events(self) -> AsyncGenerator[bytes, None]:
        try:
            yield b"data: 1\n\n"
            await self.run()
            yield b"data: 2\n\n"
        finally:
            self.ended.append("closed")


def service(job: Job, **options: object) -> FastAPI:
    app = make_app("work", "0", _nothing, not_ready=list)

    @app.post("/work")
    async def work(request: Request) -> Response:
        await request.body()
        try:
            return Response(await while_connected(request, job.run(), **options))  # type: ignore[arg-type]
        except Exception as error:
            job.raised.append(type(error).__name__)
            task = asyncio.current_task()
            assert task is not None
            # Whoever bounds the time of a call looks at this.
            job.raised.append(f"cancelling {task.cancelling()}")
            raise

    @app.post("/events")
    async def events(request: Request) -> Response:
        await request.body()
        return EventStream(job.events())

    return app


async def test_work_is_cancelled_when_its_caller_goes_away() -> None:
    job = Job()
    async with served(service(job)) as url, connected(url) as connection:
        await connection.send(head("POST", "/work"))
        await job.begun.wait()
        connection.close()
        await until(lambda: job.ended == ["cancelled"] and len(job.raised) == 2)
    assert job.raised == [ClientGoneError.__name__, "cancelling 0"]


async def test_work_is_answered_where_its_caller_stays() -> None:
    job = Job()
    async with served(service(job)) as url, connected(url) as connection:
        await connection.send(head("POST", "/work"))
        await job.begun.wait()
        job.free.set()
        answer = await connection.answer()
    assert (answer.status, answer.body) == (200, b"done")
    assert (job.ended, job.raised) == (["done"], [])


async def test_what_a_check_raises_ends_the_work() -> None:
    job, looks = Job(), 0

    def check() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise DeadlineError("no progress", "wait")

    async with served(service(job, check=check, check_every_s=0.01)) as url, connected(url) as connection:
        await connection.send(head("POST", "/work"))
        answer = await connection.answer()
    assert (answer.status, answer.code) == (504, "deadline")
    assert (job.ended, job.raised) == (["cancelled"], ["DeadlineError", "cancelling 0"])


async def test_a_stream_is_closed_when_its_caller_goes_away() -> None:
    job = Job()
    async with served(service(job)) as url, connected(url) as connection:
        await connection.send(head("POST", "/events"))
        await job.begun.wait()
        connection.close()
        await until(lambda: job.ended == ["cancelled", "closed"])


async def test_a_call_that_others_cancel_is_cancelled() -> None:
    job = Job()
    request = Request({"type": "http", "state": {}})
    call = asyncio.create_task(while_connected(request, job.run()))
    await job.begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert job.ended == ["cancelled"]


@pytest.mark.parametrize("check_every_s", [None, 60.0], ids=["no check", "a check"])
async def test_a_call_leaves_nothing_for_the_garbage_collector(check_every_s: float | None) -> None:
    # What only the collector finds stops the event loop when it does, for longer the more calls there were.
    async def call() -> None:
        await until_gone(Caller(), asyncio.sleep(0), lambda: None, check_every_s)

    gc.collect()
    gc.disable()
    try:
        task = asyncio.create_task(call())
        await task
        seen = weakref.ref(task)
        del task
        await asyncio.sleep(0)  # the event loop lets go of it
        assert seen() is None
    finally:
        gc.enable()

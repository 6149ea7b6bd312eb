"""The trainer's event loop in its own thread: deadlines end a wait, and failures come up where they are asked for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future

import pytest

from services.wire.errors import ConflictError, DeadlineError
from tests.support.until import until
from trainer.io_loop import Background, WaitSign


@pytest.fixture
def background() -> Iterator[Background]:
    made = Background()
    yield made
    made.close()


def test_an_answer_that_takes_too_long_is_cancelled_and_says_what_took_long(background: Background) -> None:
    ended: Future[str] = Future()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.set_result("cancelled")
            raise

    with pytest.raises(DeadlineError, match=r"reading took longer than 0\.01 s"):
        background.call(hang(), "reading", 0.01)
    assert ended.result(5) == "cancelled"
    background.check()


def test_a_timeout_of_the_work_itself_is_no_deadline_of_ours(background: Background) -> None:
    async def give_up() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        background.call(give_up(), "reading", 5.0)


def test_the_first_failure_of_a_spawned_task_is_raised_at_every_check(background: Background) -> None:
    async def fail(why: str) -> None:
        raise ConflictError(why)

    background.check()
    for why in ("one", "two"):
        with pytest.raises(ConflictError, match=why):
            background.result(background.spawn(fail(why), why), why, 5.0)
    for _ in range(2):
        with pytest.raises(ConflictError, match="one"):
            background.check()


def test_a_watched_future_fails_the_check_but_a_cancelled_one_does_not(background: Background) -> None:
    cancelled: Future[None] = Future()
    background.watch(cancelled, "cancelled")
    cancelled.cancel()
    background.check()
    failed: Future[None] = Future()
    background.watch(failed, "failed")
    failed.set_exception(ConflictError("of somebody else"))
    with pytest.raises(ConflictError, match="of somebody else"):
        background.check()


def test_a_task_that_is_not_essential_fails_nobody(background: Background) -> None:
    async def fail() -> None:
        raise ConflictError("a figure that cannot be shown")

    with pytest.raises(ConflictError):
        background.result(background.spawn(fail(), "figures", essential=False), "figures", 5.0)
    background.check()


class Board:
    """A wait board that takes nothing at first."""

    def __init__(self) -> None:
        self.failures, self.written = 1, list[str | None]()
        self.began, self.goes_on = threading.Event(), asyncio.Event()

    async def post(self, waiting_for: str) -> bool:
        return await self._write(waiting_for)

    async def clear(self) -> bool:
        return await self._write(None)

    async def _write(self, what: str | None) -> bool:
        self.began.set()
        await self.goes_on.wait()
        if self.failures:
            self.failures -= 1
            return False
        self.written.append(what)
        return True


def test_a_board_that_cannot_be_written_gets_the_newest_wait_and_no_older_one(background: Background) -> None:
    board = Board()
    sign = WaitSign(board, background)  # type: ignore[arg-type]
    sign.post("step 1")
    assert board.began.wait(5)
    for step in (2, 3):
        sign.post(f"step {step}")

    async def go_on() -> None:
        board.goes_on.set()
        await until(lambda: bool(board.written), 10.0)

    background.call(go_on(), "writing", 15.0)
    background.check()
    assert board.written == ["step 3"]


def test_closing_cancels_what_still_runs_and_may_be_repeated() -> None:
    background = Background()
    waits = background.spawn(asyncio.Event().wait(), "waits")
    background.close()
    background.close()
    with pytest.raises(CancelledError):
        waits.result(5)

"""Answers that outlive their connection: replayed byte for byte, joined in flight, given up when nobody comes."""

from __future__ import annotations

import asyncio

import pytest

from rollout_server.sessions.responses import Answer, AnswerLostError, Answers, RequestKey
from services.wire.errors import ConflictError, RollmeshError, UsageError
from tests.support.rollout_host import until

FIRST, AGAIN = RequestKey(b"a"), RequestKey(b"a", retry=1)


class Generating:
    """An answer of three chunks whose pace a test sets. `captured`: whether it came to count."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.captured = False

    async def __call__(self, answer: Answer) -> None:
        answer.put(b"1")
        answer.put(b"2")
        await self.go.wait()
        await answer.heard()
        self.captured = True
        answer.put(b"3")


async def read(answers: Answers, answer: Answer) -> list[bytes]:
    with answers.listening(answer, 0.0):
        return [chunk async for chunk in answer.stream()]


async def test_whoever_comes_later_gets_every_chunk_from_the_first() -> None:
    answers, generating = Answers(), Generating()
    answer = answers.start(FIRST, generating)
    first = asyncio.create_task(read(answers, answer))
    await until(lambda: answer.listeners == 1)
    joined = answers.repeated(AGAIN)
    assert joined is answer
    second = asyncio.create_task(read(answers, joined))
    generating.go.set()
    assert b"".join(await first) == b"".join(await second) == b"123"
    replayed = answers.repeated(RequestKey(b"a", retry=2))
    assert replayed is answer
    with answers.listening(replayed, 0.0):
        assert await replayed.whole() == b"123"


async def test_an_answer_that_nobody_hears_never_counts() -> None:
    answers, generating = Answers(), Generating()
    answer = answers.start(FIRST, generating)
    with answers.listening(answer, 0.05):
        await answer.begun()
    generating.go.set()
    await until(lambda: answer.ended)
    assert isinstance(answer.error, AnswerLostError)
    assert not generating.captured
    assert answers.repeated(AGAIN) is None


async def test_a_retry_within_the_patience_saves_the_answer() -> None:
    answers, generating = Answers(), Generating()
    answer = answers.start(FIRST, generating)
    with answers.listening(answer, 30.0):
        await answer.begun()
    generating.go.set()
    await asyncio.sleep(0)
    assert not generating.captured
    again = answers.repeated(AGAIN)
    assert again is answer
    assert b"".join(await read(answers, again)) == b"123"
    assert generating.captured


async def test_giving_up_waits_until_the_unheard_have_ended_and_leaves_the_others() -> None:
    answers, heard, unheard = Answers(), Generating(), Generating()
    listened = answers.start(FIRST, heard)
    reading = asyncio.create_task(read(answers, listened))
    await until(lambda: listened.listeners == 1)
    alone = answers.start(RequestKey(b"b"), unheard)
    await answers.give_up_unheard()
    assert alone.ended
    assert not listened.ended
    heard.go.set()
    assert b"".join(await reading) == b"123"


async def test_a_failure_reaches_all_listeners_and_the_call_may_be_tried_again() -> None:
    async def refuse(_: Answer) -> None:
        raise UsageError("no")

    answers = Answers()
    answer = answers.start(FIRST, refuse)
    for _ in range(2):
        with answers.listening(answer, 0.0), pytest.raises(UsageError):
            await answer.whole()
    assert answers.repeated(AGAIN) is None


async def test_a_bug_is_told_as_one_and_does_not_hang_the_listener() -> None:
    async def stumble(_: Answer) -> None:
        raise ZeroDivisionError

    answers = Answers()
    answer = answers.start(FIRST, stumble)
    with answers.listening(answer, 0.0), pytest.raises(RollmeshError, match="ZeroDivisionError"):
        await answer.whole()


async def test_ending_all_tells_the_listeners_why() -> None:
    answers = Answers()
    answer = answers.start(FIRST, Generating())
    reading = asyncio.create_task(read(answers, answer))
    await until(lambda: answer.listeners == 1)
    answers.cancel_all(ConflictError("aborted"))
    with pytest.raises(ConflictError):
        await reading


async def test_only_the_last_answers_are_kept() -> None:
    async def say(answer: Answer) -> None:
        answer.put(b"x" * 100_000)

    answers = Answers()
    for number in range(30):
        answer = answers.start(RequestKey(str(number).encode()), say)
        with answers.listening(answer, 0.0):
            await answer.whole()
    await until(lambda: not answers._tasks)
    kept = [number for number in range(30) if answers.repeated(RequestKey(str(number).encode(), retry=1)) is not None]
    assert kept == list(range(20, 30))  # a mebibyte of them

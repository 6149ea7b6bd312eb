"""Partial answers: what says nothing is written with the next chunk, and no chunk is shown before it is written."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rollout_server.completions.base import AnswerContext, AnswerDeps, AnswerService
from rollout_server.engines.base import GenerationRequest
from rollout_server.journal.records import PartialHead, PartialPart
from rollout_server.sessions.group import Group
from rollout_server.sessions.responses import Answer, RequestKey
from rollout_server.sessions.session import Session, Terms
from services.wire.errors import NotReadyError
from services.wire.rollout_api import SamplingLimits
from services.wire.sampling import SamplingParams
from tests.support.memory_journal import MemoryJournal
from tests.support.scripted_engine import ScriptedEngine
from tests.support.until import until

PROMPT = [5, 6]
EVERY = 8
"""Tokens that a stream may have sampled and not said, until they are written all the same."""


class HeldJournal(MemoryJournal):
    """`additions`: what was to be written together, each with what is done once the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.additions: list[tuple[list[PartialHead | PartialPart], asyncio.Future[None]]] = []

    def add_partial(self, group_id: str, partial: str, *parts: PartialHead | PartialPart) -> asyncio.Future[None]:
        super().add_partial(group_id, partial, *parts)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.additions.append((list(parts), done))
        return done


def a_session() -> Session:
    terms = Terms("any", "train", SamplingLimits(), 600.0)
    group = Group("g", 0, 1, "any", "train", 600.0)
    session = group.next_session("s", terms, b"")
    group.add(session)
    return session


@asynccontextmanager
async def answering(journal: MemoryJournal, tokens: int, said_every: int) -> AsyncIterator[Answer]:
    """An answer of so many tokens, all sampled, that says something with every so manieth and does not end."""
    engine, sampled_all, session = ScriptedEngine(answer_length=tokens), asyncio.Event(), a_session()

    async def produce(context: AnswerContext) -> None:
        request = GenerationRequest("r", PROMPT, SamplingParams(max_tokens=tokens), stream=True)
        sampled = 0
        async for delta in context.generate(request):
            sampled += len(delta.token_ids)
            if sampled % said_every == 0:
                context.show(b"%d;" % sampled)
        sampled_all.set()
        await asyncio.Event().wait()

    service = AnswerService(AnswerDeps(engine, journal, _clear, EVERY), lambda error: None)  # type: ignore[arg-type]
    answer = await service.ask(session, RequestKey(b"body", call="call"), "a-1", produce)
    async with asyncio.timeout(5.0):
        await sampled_all.wait()
    try:
        yield answer
    finally:
        session.memory.answers.cancel_all(NotReadyError("the test is over", "go on"))
        await until(lambda: answer.ended)


async def _clear() -> None:
    """The engine always takes requests."""


async def test_what_says_nothing_is_written_with_the_next_chunk_in_parts_of_its_own() -> None:
    journal = HeldJournal()
    async with answering(journal, tokens=7, said_every=3):
        pass
    (head, *first), second = (parts for parts, _ in journal.additions)
    assert isinstance(head, PartialHead)
    parts = [part for part in [*first, *second] if isinstance(part, PartialPart)]
    assert ([len(first), len(second)], [part.number for part in parts]) == ([3, 3], [1, 2, 3, 4, 5, 6])
    assert [len(part.tokens) for part in parts] == [4] * 6, "a part for each delta, as it came"


async def test_a_chunk_is_shown_once_what_it_was_made_of_is_written() -> None:
    journal = HeldJournal()
    shown = []
    async with answering(journal, tokens=6, said_every=2) as answer:
        assert (len(journal.additions), answer.chunks) == (3, [])
        assert answer.bytes_to_come == b"2;4;6;", "what is kept for retries is whole"
        for _, done in journal.additions[:2]:
            done.set_result(None)
            await asyncio.sleep(0)
            shown.append(list(answer.chunks))
    assert shown == [[b"2;"], [b"2;", b"4;"]]


@pytest.mark.parametrize("failure", [NotReadyError("Redis is away", "wait"), None], ids=["failed", "cancelled"])
async def test_a_chunk_that_is_not_written_is_not_shown(failure: NotReadyError | None) -> None:
    journal = HeldJournal()
    async with answering(journal, tokens=4, said_every=2) as answer:
        (_, first), (_, second) = journal.additions
        first.set_result(None)
        second.cancel() if failure is None else second.set_exception(failure)
        await asyncio.sleep(0)
        assert answer.chunks == [b"2;"]


async def test_a_stream_that_says_nothing_for_long_is_written_all_the_same() -> None:
    journal = MemoryJournal()
    async with answering(journal, tokens=2 * EVERY + 3, said_every=1000):
        pass
    head, *parts = await journal.read_partial("s/call")
    assert isinstance(head, PartialHead)
    assert [part.number for part in parts if isinstance(part, PartialPart)] == list(range(1, 2 * EVERY + 1))

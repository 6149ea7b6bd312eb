"""A group whose opener goes away: written whole, swept soon, and taken up by the same call when it comes again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from redis.asyncio import Redis

from rollout_server.journal.journal import Journal
from rollout_server.journal.records import GroupBegan, GroupEnded, SessionBegan
from rollout_server.lifecycle.admission import AdmissionGate
from rollout_server.lifecycle.open import SessionOpener
from rollout_server.lifecycle.takeover import Takeover
from rollout_server.sessions.group import GroupRegistry
from services.policies.admission import AdmissionRules
from services.run_store.client import connect
from services.run_store.discovery import ServiceRegistry
from services.run_store.keys import RunKeys
from services.run_store.ledger import Ledger
from services.run_store.status import WaitBoard
from services.wire.errors import CapacityError, ConflictError, DrainingError, SessionConcludedError
from services.wire.rollout_api import OpenGroup, Purpose, SamplingBody
from services.wire.session_api import OpenSession

NAME = "0" * 32
CALL = OpenGroup(task="running-sums", group_size=2, sampling=SamplingBody(max_tokens=4), purpose="evaluate")


class WatchedJournal(Journal):
    """Says when it is asked to write a group's first lines."""

    def __init__(self, redis: Redis, run_id: str, server_id: str) -> None:
        super().__init__(redis, run_id, f"{server_id}/1", server_id, lambda group, error: None)
        self.asked = asyncio.Event()

    def open(self, began: GroupBegan, sessions: Sequence[SessionBegan], then: Callable[[], Any]) -> asyncio.Future[Any]:
        self.asked.set()
        return super().open(began, sessions, then)


class Opening:
    """A server's part in the opening of groups. Its journal writes from `serve` on."""

    def __init__(self, redis: Redis, run_id: str, server_id: str = "s0", version: int = 0) -> None:
        self.journal, self.registry = WatchedJournal(redis, run_id, server_id), GroupRegistry()
        self.ledger = Ledger(redis, run_id)
        self.takeover = Takeover(self.registry, self.journal, self.ledger, ServiceRegistry(redis, run_id), server_id)
        self.gate = AdmissionGate(
            self.ledger,
            WaitBoard(redis, run_id, server_id),
            server_id=server_id,
            rules=AdmissionRules(base_version=0, k=1, batch=4),
            engine_version=lambda: version,
        )
        self.opener = SessionOpener(self.registry, self.gate, self.ledger, self.journal, self.takeover, 60.0)
        self.tasks = [asyncio.create_task(self.gate.run())]

    def serve(self) -> None:
        self.tasks.append(asyncio.create_task(self.journal.run()))

    async def aclose(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await self.takeover.aclose()


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


@pytest.fixture
async def server(redis: Redis, run_id: str) -> AsyncIterator[Opening]:
    opening = Opening(redis, run_id)
    yield opening
    await opening.aclose()


@asynccontextmanager
async def another(redis: Redis, run_id: str, server_id: str, version: int = 0) -> AsyncIterator[Opening]:
    """A further server of the run, whose engine serves `version`."""
    opening = Opening(redis, run_id, server_id, version)
    opening.serve()
    try:
        yield opening
    finally:
        await opening.aclose()


async def test_a_group_that_its_opener_left_is_there_for_the_same_call(server: Opening) -> None:
    opening = asyncio.ensure_future(server.opener.open_group(CALL, NAME))
    await server.journal.asked.wait()
    opening.cancel()
    server.serve()
    with pytest.raises(asyncio.CancelledError):
        await opening
    (group,) = server.registry.all_open()
    assert group.client_gone, "nobody heard of it: it must not stay open for its whole idle time"
    assert len(await server.journal.read(group.group_id)) == 3, "the group and both sessions are written"
    again = await server.opener.open_group(CALL, NAME)
    assert again is group and not again.client_gone


@pytest.mark.parametrize("purpose", ["train", "evaluate"])
async def test_a_session_is_found_by_the_call_that_opened_it_at_any_server(
    server: Opening, redis: Redis, run_id: str, purpose: Purpose
) -> None:
    """Open here, open at a server that is gone, and ended."""
    call = OpenSession(purpose=purpose)
    server.serve()
    first, new = await server.opener.open(call, NAME)
    assert new and await server.opener.open(call, NAME) == (first, False)
    async with another(redis, run_id, "s1") as heir, another(redis, run_id, "s2") as late:
        taken, new = await heir.opener.open(call, NAME)
        assert (taken.session_id, taken.group_id, new) == (first.session_id, first.group_id, False)
        with pytest.raises(ConflictError, match="opened with another body"):
            await heir.opener.open(call.model_copy(update={"max_tokens": 7}), NAME)
        assert len(await heir.ledger.open_groups()) == (purpose == "train"), "it has its one place, or none"
        await heir.journal.conclude(taken.group_id, GroupEnded(stream_ids=None, cause="idle"), [taken.session_id])
        with pytest.raises(SessionConcludedError, match="has ended"):
            await late.opener.open(call, NAME)


@pytest.mark.parametrize("purpose", ["train", "evaluate"])
async def test_a_session_that_was_published_is_not_opened_again_when_its_journal_is_gone(
    server: Opening, redis: Redis, run_id: str, purpose: Purpose
) -> None:
    """The journal of what has ended goes after minutes; the ids of the stream stay."""
    server.serve()
    await redis.hset(RunKeys(run_id).stream_ids, f"s-{NAME}", "1-0")
    with pytest.raises(SessionConcludedError, match="has ended"):
        await server.opener.open(OpenSession(purpose=purpose), NAME)
    assert server.registry.all_open() == [] and await server.ledger.open_groups() == {}


async def test_a_session_is_found_at_a_server_that_admits_nothing_yet(
    server: Opening, redis: Redis, run_id: str
) -> None:
    """It joined late: its engine is behind the version that the run began from."""
    server.serve()
    first, _ = await server.opener.open(OpenSession(), NAME)
    async with another(redis, run_id, "s1", version=-1) as late:
        taken, new = await late.opener.open(OpenSession(), NAME)
        assert (taken.session_id, new) == (first.session_id, False)
        with pytest.raises(CapacityError):
            await late.opener.open(OpenSession(), "1" * 32)


@pytest.mark.parametrize("left", [False, True])
async def test_a_group_that_could_not_be_written_gives_its_place_back(
    server: Opening, redis: Redis, run_id: str, left: bool
) -> None:
    """Also where its opener has left meanwhile."""
    opening = asyncio.ensure_future(server.opener.open_group(CALL.model_copy(update={"purpose": "train"}), NAME))
    await server.journal.asked.wait()
    assert len(await server.ledger.open_groups()) == 1
    if left:
        opening.cancel()
    await redis.rpush(RunKeys(run_id).journal(f"g-{NAME}"), b"another server's")
    server.serve()
    with pytest.raises(asyncio.CancelledError if left else DrainingError):
        await opening
    assert await server.ledger.open_groups() == {}
    assert server.registry.all_open() == []

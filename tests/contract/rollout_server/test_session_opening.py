"""A group whose opener goes away: written whole, swept soon, and taken up by the same call when it comes again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from redis.asyncio import Redis

from rollout_server.journal.journal import Journal
from rollout_server.journal.records import GroupBegan, SessionBegan
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
from services.wire.errors import DrainingError
from services.wire.rollout_api import OpenGroup, SamplingBody

NAME = "0" * 32
CALL = OpenGroup(task="running-sums", group_size=2, sampling=SamplingBody(max_tokens=4), purpose="evaluate")


class WatchedJournal(Journal):
    """Says when it is asked to write a group's first lines."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        super().__init__(redis, run_id, "s0@1", "s0", lambda group, error: None)
        self.asked = asyncio.Event()

    def open(self, began: GroupBegan, sessions: Sequence[SessionBegan], then: Callable[[], Any]) -> asyncio.Future[Any]:
        self.asked.set()
        return super().open(began, sessions, then)


class Opening:
    """A server's part in the opening of groups. Its journal writes from `serve` on."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        self.journal, self.registry, self.ledger = WatchedJournal(redis, run_id), GroupRegistry(), Ledger(redis, run_id)
        self.takeover = Takeover(self.registry, self.journal, self.ledger, ServiceRegistry(redis, run_id), "s0")
        self.gate = AdmissionGate(
            self.ledger,
            WaitBoard(redis, run_id, "s0"),
            server_id="s0",
            rules=AdmissionRules(base_version=0, k=1, batch=4),
            engine_version=lambda: 0,
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

"""A group whose opener goes away: written whole, swept soon, and taken up by the same call when it comes again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

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
from services.run_store.ledger import Ledger
from services.run_store.status import WaitBoard
from services.wire.rollout_api import OpenGroup, SamplingBody

NAME = "0" * 32
CALL = OpenGroup(task="running-sums", group_size=2, sampling=SamplingBody(max_tokens=4), purpose="evaluate")


class SlowJournal(Journal):
    """Writes a group's first lines only when it is told to."""

    def __init__(self, redis: Redis, run_id: str) -> None:
        super().__init__(redis, run_id, "s0@1", "s0", lambda group, error: None)
        self.asked = asyncio.Event()
        self.told = asyncio.Event()

    async def open(self, began: GroupBegan, sessions: Sequence[SessionBegan]) -> None:
        self.asked.set()
        await self.told.wait()
        await super().open(began, sessions)


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    client = connect(redis_url)
    yield client
    await client.aclose()


async def test_a_group_that_its_opener_left_is_there_for_the_same_call(redis: Redis, run_id: str) -> None:
    journal, registry, ledger = SlowJournal(redis, run_id), GroupRegistry(), Ledger(redis, run_id)
    takeover = Takeover(registry, journal, ledger, ServiceRegistry(redis, run_id), "s0")
    gate = AdmissionGate(
        ledger,
        WaitBoard(redis, run_id, "s0"),
        server_id="s0",
        rules=AdmissionRules(base_version=0, k=1, batch=4),
        engine_version=lambda: 0,
    )
    opener = SessionOpener(registry, gate, ledger, journal, takeover, 60.0)
    try:
        opening = asyncio.ensure_future(opener.open_group(CALL, NAME))
        await journal.asked.wait()
        opening.cancel()
        journal.told.set()
        with pytest.raises(asyncio.CancelledError):
            await opening
        (group,) = registry.all_open()
        assert group.client_gone, "nobody heard of it: it must not stay open for its whole idle time"
        assert len(await journal.read(group.group_id)) == 3, "the group and both sessions are written"
        again = await opener.open_group(CALL, NAME)
        assert again is group and not again.client_gone
    finally:
        await takeover.aclose()

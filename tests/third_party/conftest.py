"""A rollout server in front of an engine that says what it is told, as other people's clients find it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.rollout_host import Host, hosting, small_batch
from tests.support.telling_engine import TellingEngine


@pytest.fixture
def engine() -> TellingEngine:
    return TellingEngine()


@pytest.fixture
async def host(engine: TellingEngine, redis_url: str, run_id: str, chat_policy: Path) -> AsyncIterator[Host]:
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=chat_policy, settings=small_batch()) as host:
        yield host

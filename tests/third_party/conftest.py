"""A rollout server in front of an engine that says what it is told, as other people's clients find it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.chat_policy import save_chat_policy
from tests.support.rollout_host import Host, hosting, small_batch
from tests.support.telling_engine import TellingEngine


@pytest.fixture(scope="session")
def chat_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with a chat template."""
    folder = tmp_path_factory.mktemp("chat") / "chat-policy"
    save_chat_policy(folder)
    return folder


@pytest.fixture
def engine() -> TellingEngine:
    return TellingEngine()


@pytest.fixture
async def host(engine: TellingEngine, redis_url: str, run_id: str, chat_policy: Path) -> AsyncIterator[Host]:
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=chat_policy, settings=small_batch()) as host:
        yield host

"""The order of a weight update's calls, also when two clients race."""

from __future__ import annotations

import asyncio

import pytest

from rollout_server.api.vllm_weight_updates import WeightUpdate
from services.wire.errors import ConflictError
from services.wire.weights_api import CommitAnswer, StageAnswer
from tests.support.scripted_engine import ScriptedEngine
from weight_bus.errors import StageError


class SlowEngine(ScriptedEngine):
    """Stages and commits when told to; `broken` makes both fail."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.broken = False

    async def stage(self, manifest: bytes) -> StageAnswer:
        await self.go.wait()
        if self.broken:
            raise StageError("bad hash", "publish again")
        return StageAnswer(int(manifest), "digest", 1, 0.0)

    async def commit(self, version: int) -> CommitAnswer:
        await self.go.wait()
        if self.broken:
            raise ConflictError(f"version {version} is not staged")
        return CommitAnswer(version, 0.1, 0)


async def test_nothing_comes_between_while_a_step_is_under_way() -> None:
    engine, update = SlowEngine(), WeightUpdate()
    update.init()
    update.start()
    staging = asyncio.create_task(update.update(engine, b"5"))
    await asyncio.sleep(0)
    with pytest.raises(ConflictError, match="staging"):
        await update.update(engine, b"6")
    with pytest.raises(ConflictError, match="staging"):
        await update.finish(engine, None)
    with pytest.raises(ConflictError, match="staging"):
        update.init()
    engine.go.set()
    assert await staging == 5
    engine.go.clear()
    committing = asyncio.create_task(update.finish(engine, "5"))
    await asyncio.sleep(0)
    with pytest.raises(ConflictError, match="committing"):
        await update.finish(engine, "5")
    engine.go.set()
    assert (await committing).version == 5


async def test_after_a_failed_stage_or_commit_the_manifest_can_be_sent_again() -> None:
    engine, update = SlowEngine(), WeightUpdate()
    engine.go.set()
    update.init()
    update.start()
    engine.broken = True
    with pytest.raises(StageError):
        await update.update(engine, b"5")
    engine.broken = False
    await update.update(engine, b"5")
    engine.broken = True
    with pytest.raises(ConflictError, match="not staged"):
        await update.finish(engine, None)
    engine.broken = False
    await update.update(engine, b"6")
    assert (await update.finish(engine, "6")).version == 6


async def test_a_stage_that_was_cancelled_can_be_sent_again() -> None:
    engine, update = SlowEngine(), WeightUpdate()
    update.init()
    update.start()
    staging = asyncio.create_task(update.update(engine, b"5"))
    await asyncio.sleep(0)
    staging.cancel()
    await asyncio.wait({staging})
    engine.go.set()
    assert await update.update(engine, b"5") == 5

"""Admission in a live run: two servers, a real intake, and one group in ten that takes twenty times as long."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from services.policies.admission import AdmissionRules
from services.run_store.client import connect
from services.run_store.keys import RunKeys
from services.run_store.stream import TrajectoryReader
from tests.support.committing import commit
from tests.support.rollout_host import Host, hosting, small_batch
from tests.support.scripted_engine import ScriptedEngine
from trainer.data.stream_reader import Intake
from trainer.data.validation import Validator

RULES = AdmissionRules(base_version=0, k=1, batch=4, lookahead=2)
STEPS = 24
PLAYERS = 16
GROUP_S, STRAGGLER_S = 0.03, 0.6
WAIT_S = 20.0


@dataclass
class _Seen:
    """What the samples of the ledger and the players saw."""

    samples: int = 0
    most_open: int = 0
    farthest: int = 0
    """Groups between the oldest open one and the newest."""
    longest_wait_s: float = 0.0


async def watch(redis_url: str, run_id: str, seen: _Seen) -> None:
    """Sample the ledger, whole at each time, until cancelled."""
    redis, keys = connect(redis_url), RunKeys(run_id)
    try:
        while True:
            async with redis.pipeline(transaction=True) as pipe:
                pipe.hmget(keys.accounts, ["opened_groups", "closed_groups"])
                pipe.hvals(keys.open_groups)
                (opened, closed), records = await pipe.execute()
            ordinals = [json.loads(record)[0] for record in records]
            assert int(opened or 0) == int(closed or 0) + len(ordinals)
            seen.samples += 1
            seen.most_open = max(seen.most_open, len(ordinals))
            seen.farthest = max(seen.farthest, int(opened or 0) - min(ordinals, default=int(opened or 0)))
            await asyncio.sleep(0.002)
    finally:
        await redis.aclose()


async def play(host: Host, seen: _Seen) -> int:
    """Open a group, think, speak, finish, until the run has concluded; how many were played."""
    played = 0
    while True:
        asked = time.monotonic()
        opened = await host.try_open(wait_s=WAIT_S)
        seen.longest_wait_s = max(seen.longest_wait_s, time.monotonic() - asked)
        if opened.status_code == 410:
            return played
        assert opened.status_code == 201, opened.text
        group = opened.json()
        await asyncio.sleep(STRAGGLER_S if group["ordinal"] % 10 == 3 else GROUP_S)
        if (await host.turns(group, "1=", "1=")).status_code == 200:
            await host.finish(group, 1.0, 0.0)
        played += 1


async def train(hosts: list[Host], intake: Intake, versions: list[int]) -> None:
    for version in range(1, STEPS + 1):
        batch = await asyncio.to_thread(intake.take, RULES.batch, WAIT_S, post=lambda _: None, stopped=lambda: False)
        assert batch is not None
        await intake.settle_trained([member.entry for group in batch for member in group.members])
        versions[0] = version
        await asyncio.gather(*(commit(host, version) for host in hosts))
    await hosts[0].ledger.conclude(STEPS)


@asynccontextmanager
async def cancelled_at_the_end(task: asyncio.Task[None]) -> AsyncIterator[None]:
    try:
        yield
    finally:
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(ended, asyncio.CancelledError), ended


async def test_stragglers_neither_stop_the_run_nor_are_left_behind(
    redis_url: str, run_id: str, tiny_policy: Path
) -> None:
    settings = small_batch(k=RULES.k, batch=RULES.batch)
    settings.rollout.lookahead = RULES.lookahead
    seen, versions = _Seen(), [0]
    async with AsyncExitStack() as stack, asyncio.timeout(60):
        hosts = [
            await stack.enter_async_context(
                hosting(
                    ScriptedEngine(),
                    redis_url=redis_url,
                    run_id=run_id,
                    model=tiny_policy,
                    settings=settings,
                    server_id=f"s{i}",
                )
            )
            for i in range(2)
        ]
        screen = Validator(run_id, vocabulary=64, longest=256)
        intake = Intake(
            lambda: TrajectoryReader(hosts[0].redis, run_id), hosts[0].ledger, screen, lambda: versions[0], WAIT_S
        )
        reading = asyncio.create_task(intake.run())
        watching = asyncio.create_task(watch(redis_url, run_id, seen))
        async with cancelled_at_the_end(watching):
            async with cancelled_at_the_end(reading), asyncio.TaskGroup() as tasks:
                tasks.create_task(train(hosts, intake, versions))
                players = [tasks.create_task(play(hosts[i % 2], seen)) for i in range(PLAYERS)]
            await intake.drain()
        accounts = await hosts[0].ledger.accounts()
        assert await hosts[0].ledger.open_groups() == {}
    assert seen.samples > 100
    assert seen.most_open == RULES.most_open
    assert RULES.most_open < seen.farthest <= RULES.window
    assert seen.longest_wait_s < WAIT_S
    assert all(player.result() > 0 for player in players)
    assert accounts.opened_groups == accounts.closed_groups
    assert accounts.trained == STEPS * RULES.batch * 2
    assert accounts.published == accounts.trained + accounts.dropped_total()

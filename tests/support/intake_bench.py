"""An intake on a real Valkey, as a trainer has it, and what is published to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from itertools import count

import msgspec
from redis.asyncio import Redis

from services.policies.batching import Drop, Group, GroupFilter
from services.run_store.client import connect
from services.run_store.ledger import Accounts, Ledger
from services.run_store.publishing import TrajectoryWriter
from services.run_store.stream import TrajectoryReader
from services.wire.trajectory import Trajectory
from tests.support.trajectories import a_rollout, a_segment
from trainer.data.stream_reader import AUDIT_EVERY_S, Intake
from trainer.data.validation import Validator


async def until(holds: Callable[[Accounts], bool], ledger: Ledger) -> None:
    """Return as soon as the accounts are as wanted; fail, showing them, when they are not within five seconds."""
    ends = time.monotonic() + 5.0
    for _ in count():
        accounts = await ledger.accounts()
        if holds(accounts):
            return
        assert time.monotonic() < ends, accounts
        await asyncio.sleep(0.005)


class Bench:
    """An intake that reads, and a training thread that takes."""

    def __init__(
        self,
        redis: Redis,
        run_id: str,
        expire_after_s: float,
        smallest: int,
        ledger: Ledger,
        group_filter: GroupFilter | None = None,
        audit_every_s: float = AUDIT_EVERY_S,
    ) -> None:
        self.audit_every_s = audit_every_s
        self.redis, self.run_id = redis, run_id
        self.group_filter = group_filter
        self.version, self.smallest = 3, smallest
        self.ledger = ledger
        self.writer = TrajectoryWriter(redis, run_id)
        self.posted: list[str] = []
        self.expire_after_s = expire_after_s
        self.intake = self.make_intake()
        self.reading: asyncio.Task[None]

    def make_intake(self) -> Intake:
        screen = Validator(self.run_id, vocabulary=64, longest=32, tokenizer="ours")
        return Intake(
            lambda: TrajectoryReader(self.redis, self.run_id),
            self.ledger,
            screen,
            lambda: self.version,
            self.expire_after_s,
            self.smallest,
            self.group_filter,
            self.audit_every_s,
        )

    async def take(
        self, groups: int, deadline_s: float = 5.0, now: Callable[[], float] = time.monotonic
    ) -> list[Group[Trajectory]] | None:
        return await asyncio.to_thread(
            self.intake.take, groups, deadline_s, post=self.posted.append, stopped=lambda: False, now=now
        )

    async def stop(self) -> None:
        """As a trainer that ends."""
        self.reading.cancel()
        await asyncio.gather(self.reading, return_exceptions=True)

    async def dropped(self, wanted: dict[str, int]) -> None:
        """Wait until the ledger's drops are exactly these."""
        await until(lambda accounts: accounts.dropped == wanted, self.ledger)


@asynccontextmanager
async def intake_benches(redis_url: str, run_id: str) -> AsyncIterator[Callable[..., Bench]]:
    """What makes a bench; all of them are stopped at the end of the block."""
    redis = connect(redis_url)
    benches: list[Bench] = []

    def make(
        expire_after_s: float = 60.0,
        trained_before: frozenset[str] = frozenset(),
        smallest: int = 2,
        ledger: type[Ledger] = Ledger,
        group_filter: GroupFilter | None = None,
        dropped_before: Mapping[str, Drop] | None = None,
        audit_every_s: float = AUDIT_EVERY_S,
    ) -> Bench:
        accounts = ledger(redis, run_id)
        bench = Bench(redis, run_id, expire_after_s, smallest, accounts, group_filter, audit_every_s)
        bench.reading = asyncio.create_task(bench.intake.run(trained_before, dropped_before or {}))
        benches.append(bench)
        return bench

    try:
        yield make
    finally:
        for bench in benches:
            await bench.stop()
        await redis.aclose()


def answers(bench: Bench, group: str, ordinal: int, size: int = 2, **changes: object) -> list[Trajectory]:
    segment = a_segment([5, 6], [7, 8], [-1.0, -2.0], [3, 3])
    return [
        msgspec.structs.replace(
            a_rollout(
                [segment], float(member), run_id=bench.run_id, group=group, ordinal=ordinal, size=size, member=member
            ),
            **changes,
        )
        for member in range(size)
    ]

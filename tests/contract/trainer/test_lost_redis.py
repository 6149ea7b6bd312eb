"""Redis that comes back with less than it had, beside a trainer and a server that go on: the account is made right."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.run_store.account import RunAccount
from services.run_store.ledger import Accounts
from tests.support.cut_valkey import CutValkey
from tests.support.intake_bench import Bench, answers, intake_benches, until
from tests.weight_parts import eventually

RULES = {"engine_version": 0, "base_version": 0, "k": 9, "batch": 9}


@pytest.fixture
def valkey_to_cut(tmp_path: Path) -> Iterator[CutValkey]:
    cut = CutValkey(tmp_path)
    yield cut
    cut.close()


async def play(bench: Bench, name: str, ordinal: int) -> list[str]:
    """A group from admission to its end; the entries of its trajectories."""
    assert await bench.ledger.open_group(name, "s0", **RULES) >= 0
    ids = await bench.writer.publish(answers(bench, name, ordinal))
    await bench.ledger.close_group(name)
    return ids


async def train(bench: Bench, name: str) -> None:
    batch = await bench.take(1)
    assert batch is not None and batch[0].group == name
    await bench.intake.settle_trained([member.entry for member in batch[0].members])


async def balanced(bench: Bench, *, trained: int, dropped: int) -> Accounts:
    """The accounts, once they say that so many were trained, and nothing else is in the stream."""
    ends = time.monotonic() + 20.0
    while True:
        accounts = await bench.ledger.accounts()
        held = (await RunAccount(bench.redis, bench.run_id).count()).counted
        right = (accounts.trained, accounts.dropped_total(), held.unsettled) == (trained, dropped, 0)
        if right and accounts.published == trained + dropped:
            return accounts
        assert time.monotonic() < ends, accounts
        await asyncio.sleep(0.05)


async def test_what_was_trained_counts_once_also_where_redis_forgot_it(valkey_to_cut: CutValkey, run_id: str) -> None:
    async with intake_benches(valkey_to_cut.plan.url, run_id) as make:
        bench = make(audit_every_s=0.1)
        for ordinal, name in enumerate(["a", "b", "c"]):
            await play(bench, name, ordinal)
        await train(bench, "a")
        # From here on Redis will know nothing: b is trained, and so is d, of which it will never have heard; c waits for
        # a batch and e was read, the one still in the stream then, the other not.
        kept = valkey_to_cut.written
        await train(bench, "b")
        await play(bench, "d", 3)
        await play(bench, "e", 4)
        await train(bench, "c")
        await train(bench, "d")
        await eventually(lambda: bench.intake._assembler.complete == 1)
        valkey_to_cut.come_back(kept)
        accounts = await balanced(bench, trained=8, dropped=0)
        assert accounts.corrected > 0
        # e is not trained: after a crash its batch could not be made again.
        assert bench.intake._assembler.complete == 0
        assert (
            bench.intake.wants_checkpoint() and bench.intake.wants_checkpoint() and not bench.intake.wants_checkpoint()
        )
        # Nothing is open and nothing is held, so admission owes the run what was consumed.
        assert accounts.opened_groups - accounts.dropped_groups == 4
        assert accounts.opened_groups == accounts.closed_groups
        await play(bench, "f", 5)
        await train(bench, "f")
        await balanced(bench, trained=10, dropped=0)
        await until(lambda accounts: accounts.unaccounted == 0, bench.ledger)


async def test_at_the_end_of_a_run_what_was_trained_is_not_dropped(valkey_to_cut: CutValkey, run_id: str) -> None:
    async with intake_benches(valkey_to_cut.plan.url, run_id) as make:
        bench = make()
        for ordinal, name in enumerate(["a", "b", "c"]):
            await play(bench, name, ordinal)
        kept = valkey_to_cut.written
        await play(bench, "d", 3)
        for name in ("a", "b", "c", "d"):
            await train(bench, name)
        await bench.stop()
        valkey_to_cut.come_back(kept)
        assert await bench.intake.drain() == 0
        await balanced(bench, trained=8, dropped=0)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 0.9])
async def test_a_run_goes_on_wherever_the_file_was_cut(valkey_to_cut: CutValkey, run_id: str, share: float) -> None:
    async with intake_benches(valkey_to_cut.plan.url, run_id) as make:
        bench = make(audit_every_s=0.1)
        for ordinal in range(8):
            await play(bench, f"g{ordinal}", ordinal)
        for ordinal in range(5):
            await train(bench, f"g{ordinal}")
        valkey_to_cut.come_back(int(valkey_to_cut.written * share))
        await play(bench, "after", 8)
        left = []
        while (batch := await bench.take(1)) is not None:
            left.append(batch[0].group)
            await bench.intake.settle_trained([member.entry for member in batch[0].members])
            if left[-1] == "after":
                break
        assert not {f"g{ordinal}" for ordinal in range(5)} & set(left)
        await balanced(bench, trained=2 * (5 + len(left)), dropped=0)
        consumed = {*left, *(f"g{ordinal}" for ordinal in range(5))}
        account = RunAccount(bench.redis, bench.run_id)
        async with asyncio.timeout(20.0):
            while True:
                # What fell behind the cut half-way is still open in Redis: a server would end it again.
                counted = (await account.count()).counted
                if counted.opened_groups - counted.dropped_groups == len(consumed) + len(counted.standing - consumed):
                    break
                await asyncio.sleep(0.05)

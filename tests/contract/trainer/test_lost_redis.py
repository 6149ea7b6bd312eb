"""Redis that comes back with less than it had, beside a trainer and a server that go on: the account is made right."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.policies.balance import BALANCED, Counted, Durable, corrections
from services.run_store.account import RunAccount
from services.run_store.ledger import Accounts
from services.supervisor.launch_plan import ValkeyPlan
from tests.conftest import free_port, wait_for_port
from tests.support.intake_bench import Bench, answers, intake_benches, until
from tests.weight_parts import eventually

RULES = {"engine_version": 0, "base_version": 0, "k": 9, "batch": 9}


class CutValkey:
    """A Valkey whose append-only file can lose its end while it is down."""

    def __init__(self, folder: Path) -> None:
        self.plan = ValkeyPlan(data_dir=folder, port=free_port())
        self._process = self._start()

    @property
    def written(self) -> int:
        """Bytes of its file."""
        return self._file.stat().st_size

    @property
    def _file(self) -> Path:
        return next((self.plan.data_dir / "appendonlydir").glob("*.incr.aof"))

    def come_back(self, length: int) -> None:
        """kill -9, all of the file after `length` bytes lost, started again."""
        self._process.kill()
        self._process.wait()
        with self._file.open("r+b") as file:
            file.truncate(length)
        self._process = self._start()

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=10)

    def _start(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(self.plan.command(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_for_port(self.plan.port, process)
        return process


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
        accounts = await balanced(bench, trained=2 * (5 + len(left)), dropped=0)
        assert accounts.opened_groups - accounts.dropped_groups == 5 + len(left)


def counted(**changes: int) -> Counted:
    figures = {"published": 20, "trained": 12, "dropped": 2, "unsettled": 6, "opened_groups": 9, "closed_groups": 7}
    figures |= {"dropped_groups": 1, "open_groups": 2} | changes
    return Counted(**figures, standing=frozenset({"open", "half"}))


DURABLE = Durable(trained=12, consumed=5, consumed_lately=frozenset({"g4"}), held=frozenset({"half", "whole"}))


def test_an_account_that_agrees_with_what_is_durable_is_left_alone() -> None:
    assert corrections(counted(), DURABLE) == BALANCED
    assert not BALANCED


def test_what_redis_forgot_is_added_and_what_is_lost_counts_as_dropped() -> None:
    forgot = corrections(counted(trained=8, published=16, opened_groups=6, closed_groups=4), DURABLE)
    assert (forgot.trained, forgot.published, forgot.opened_groups, forgot.closed_groups) == (4, 4, 3, 3)
    assert forgot.unaccounted == 7
    lost = corrections(counted(opened_groups=11, closed_groups=9), DURABLE)
    assert (lost.dropped_groups, lost.opened_groups, lost.closed_groups) == (2, 0, 0)

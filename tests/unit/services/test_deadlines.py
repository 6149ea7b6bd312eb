"""Deadlines of what grows with the model: derived from bytes and measured pace, and told while they run."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.host.run_folder import RunFolder
from services.policies.training.deadlines import (
    SLOWEST_PACE,
    Pace,
    answered_within,
    batch_within,
    settled_within,
    stopped_within,
    within,
)
from services.supervisor.evaluate import exported
from services.supervisor.processes import Child, ManagedProcess, ProcessSpec, Reaper
from services.supervisor.stopping import stop_trainer, trainer_within
from services.wire.errors import DeadlineError
from tests.support.quick_clock import quickly
from tests.support.step_lines import step_line

GB = 10**9
SIZES = st.integers(0, 10**13)
SECONDS = st.floats(0.001, 1e5)


@given(SECONDS, SIZES, SIZES, st.none() | st.floats(1.0, 1e12))
def test_more_bytes_have_more_time_and_never_less_than_the_setting(
    least_s: float, some: int, more: int, pace: float | None
) -> None:
    few, many = sorted((some, more))
    assert least_s <= within(least_s, few, pace) <= within(least_s, many, pace)


@given(st.integers(1, 10**13), st.floats(0.001, 1e5))
def test_work_as_slow_as_the_slowest_so_far_is_in_time_whatever_its_size(nbytes: int, seconds: float) -> None:
    pace = Pace()
    assert pace.slowest is None
    pace.note(nbytes, seconds / 2)
    pace.note(nbytes, seconds)
    pace.note(0, seconds)
    assert within(0.001, nbytes, pace.slowest) >= seconds
    assert within(0.001, 2 * nbytes, pace.slowest) >= 2 * seconds


def test_an_old_pace_is_forgotten() -> None:
    pace = Pace()
    pace.note(GB, 1000.0)
    for _ in range(16):
        pace.note(GB, 1.0)
    assert pace.slowest == GB


def test_the_table_of_sizes() -> None:
    """A version in bfloat16, a checkpoint of weights and two moments in float32."""
    found = [
        (
            billions,
            within(30.0, 2 * billions * GB),
            settled_within(within(30.0, 2 * billions * GB)),
            stopped_within(60.0, 30.0, 12 * billions * GB),
        )
        for billions in (1, 8, 70)
    ]
    assert found == [(1, 30.0, 125.0, 300.0), (8, 160.0, 645.0, 1140.0), (70, 1400.0, 5605.0, 8580.0)]
    assert (batch_within(120.0, 10.0), batch_within(120.0, 300.0)) == (120.0, 1200.0)
    assert [answered_within(120.0, tokens) for tokens in (16, 4096)] == [128.0, 2168.0]


class SlowChild:
    """A process that ends so long after it was told to, or at once where it is killed."""

    def __init__(self, takes_s: float) -> None:
        self.takes_s = takes_s
        self.returncode: int | None = None
        self.pid = -1
        self.told = False

    def send_signal(self, _: int) -> None:
        self.told = True

    async def wait(self) -> int:
        if self.returncode is None:
            await asyncio.sleep(self.takes_s)
            self.returncode = 0
        return self.returncode

    def kill(self) -> None:
        self.returncode = -9


def export(takes_s: float, nbytes: int, told: list[str]) -> tuple[int, float]:
    """The exit code of an export that takes so long, and when it was there."""
    return quickly(lambda: exported(SlowChild(takes_s), nbytes, told.append))  # type: ignore[arg-type]


def test_an_export_of_a_large_checkpoint_has_its_time_and_is_told_of() -> None:
    told: list[str] = []
    assert export(7000.0, 800 * GB, told) == (0, 7000.0)
    assert told[0] == "exporting 800.0 GB: 30 s so far, it has 8000 s"
    with pytest.raises(DeadlineError, match=r"the export of 0\.1 GB did not end within 3600 s"):
        export(7000.0, GB // 10, told)


class Trainer(Child):
    """Its process is no real one; `killed`: whether its time was over."""

    killed = False

    def kill(self) -> None:
        if self.running:
            self.killed = True
            self.process.returncode = -9  # type: ignore[misc]


def stopped(folder: RunFolder, takes_s: float, least_s: float) -> tuple[bool, list[str]]:
    """Whether a trainer that ends after `takes_s` was killed, and what was said meanwhile."""
    told: list[str] = []
    trainer = Trainer("trainer", SlowChild(takes_s), folder.logs / "trainer.log")  # type: ignore[arg-type]
    managed = ManagedProcess(ProcessSpec("trainer", ()), folder.logs, Reaper(Path("/x")), told.append)
    managed.child = trainer
    quickly(lambda: stop_trainer(managed, least_s, folder, None, told.append))
    return trainer.killed, told


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run of steps of a minute, with a checkpoint of 40 GB (of which the disk holds nothing)."""
    folder = RunFolder(tmp_path)
    steps = [step_line(step, train_ms=60_000.0 / step, wait_ms=500_000.0) + b"\n" for step in (1, 2)]
    folder.metrics.write_bytes(b"".join(steps))
    sparse(folder.checkpoints / "step-00000002" / "policy.safetensors", 40 * GB)
    return folder


def sparse(file: Path, nbytes: int) -> None:
    file.parent.mkdir(parents=True)
    file.touch()
    os.truncate(file, nbytes)


def test_a_checkpoint_of_ten_minutes_at_ctrl_c_is_written_and_told_of(folder: RunFolder) -> None:
    assert trainer_within(60.0, folder, None) == 60.0 + 4 * 60.0 + 400.0
    sparse(folder.checkpoints / ".making-host-1-ab" / "policy.safetensors", 10 * GB)
    killed, told = stopped(folder, 600.0, 60.0)
    assert not killed
    assert len(told) in (19, 20)
    assert told[0].startswith(
        "the trainer ends its step and writes a checkpoint (10.0 of about 40.0 GB are written): 30 s so far, it has 700 s"
    )


def test_a_trainer_that_is_stuck_is_killed_when_its_time_is_over(folder: RunFolder) -> None:
    killed, told = stopped(folder, 3600.0, 60.0)
    assert killed
    assert told[-1].startswith("the trainer") and "690 s so far" in told[-1]


def test_before_the_first_checkpoint_the_models_size_counts(tmp_path: Path) -> None:
    model, folder = tmp_path / "model", RunFolder(tmp_path / "run")
    sparse(model / "model.safetensors", 2 * GB)
    assert trainer_within(60.0, folder, model) == 60.0 + 12 * GB / SLOWEST_PACE
    assert trainer_within(60.0, folder, None) == 60.0

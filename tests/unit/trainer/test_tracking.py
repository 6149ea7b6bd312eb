"""Logging backends: each holds every step once, also where what feeds it was killed; a dead one hinders no other."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from services.config.load import dump_settings
from services.config.settings import RunSettings
from services.host.run_folder import RunFolder
from services.wire.rollout_api import Evaluations
from tests.support.evaluations import evaluation
from tests.support.kept_rollouts import keep_text
from trainer.tracking.base import Figures, flattened, settings_of
from trainer.tracking.follow import FolderReader, follow

RUN_ID = "tracked-run"
STEPS = 40
COMMAND = [sys.executable, "-P", "-m", "services", "track"]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path / "run")
    folder.root.mkdir()
    folder.config.write_text(dump_settings(RunSettings(seed=7)))
    folder.run_id.write_text(RUN_ID)
    return folder


def write(run: RunFolder, steps: range) -> None:
    """Lines as a trainer writes them; of each step the reward is a quarter of its number."""
    with run.metrics.open("a") as metrics:
        for step in steps:
            keep_text(run.rollouts, step, f"said {step}")
            figures = {
                "reward": step / 4,
                "components": {"success": 0.5},
                "kl": None,
                "warnings": {"truncated": "30 %"},
            }
            metrics.write(json.dumps({"step": step, "time": 1000.0 + step, **figures}) + "\n")
            metrics.flush()


def in_tensorboard(folder: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_file_loader import LegacyEventFileLoader

    events = [event for file in folder.glob("events.*") for event in LegacyEventFileLoader(str(file)).Load()]
    return [(event.step, v.simple_value) for event in events for v in event.summary.value if v.tag == "reward"]


def in_wandb(folder: Path) -> list[tuple[int, float]]:
    from wandb.proto.wandb_internal_pb2 import Record

    from trainer.tracking.wandb import _records

    found = []
    for file in folder.glob("wandb/offline-run-*/*.wandb"):
        for content in _records(file.read_bytes()):
            record = Record()
            record.ParseFromString(content)
            for item in record.history.item:
                if (item.key or "/".join(item.nested_key)) == "reward":
                    found.append((record.history.step.num, float(item.value_json)))
            if record.HasField("run"):
                assert record.run.run_id == RUN_ID, "a process that goes on goes on in the same run"
    return found


def in_mlflow(folder: Path) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("rollmesh")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params["seed"] == "7"
    return [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "reward")]


def in_trackio(folder: Path) -> list[tuple[int, float]]:
    import sqlite3

    (database,) = folder.glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT step, metrics FROM metrics ORDER BY id").fetchall()
    return [
        (step, found["reward"])
        for step, found in ((step, json.loads(text)) for step, text in rows)
        if "reward" in found
    ]


READERS: Mapping[str, Callable[[Path], list[tuple[int, float]]]] = {
    "tensorboard": in_tensorboard,
    "wandb": in_wandb,
    "mlflow": in_mlflow,
    "trackio": in_trackio,
}


@pytest.mark.parametrize(
    "backend",
    # MLflow takes ten seconds to make its tables, wandb seven to start.
    [
        "tensorboard",
        pytest.param("wandb", marks=pytest.mark.slow),
        pytest.param("trackio", marks=pytest.mark.slow),
        pytest.param("mlflow", marks=pytest.mark.slow),
    ],
)
def test_every_step_is_there_once_after_a_kill_in_the_middle(run: RunFolder, backend: str) -> None:
    if find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    folder, said = run.tracking / backend, run.root / "track.log"
    # A process that is killed leaves what its library had in the temporary folder.
    environ = {**os.environ, "TMPDIR": str(run.root)}
    command = [*COMMAND, str(run.root), "--to", backend]
    write(run, range(1, 11))
    with said.open("w") as log:
        following = subprocess.Popen([*command, "--follow"], stdout=log, stderr=log, env=environ)
    try:
        # It dies while it writes: some steps are there, more come all the time.
        written, ends = 10, time.monotonic() + 60
        while following.poll() is None and written < STEPS // 2 and time.monotonic() < ends:
            if _size(folder) > 0:
                write(run, range(written + 1, written + 2))
                written += 1
            time.sleep(0.1)
        assert following.poll() is None, said.read_text()
    finally:
        following.send_signal(signal.SIGKILL)
        following.wait()
    write(run, range(written + 1, STEPS + 1))
    run.summary.write_text(json.dumps({"success_after": 0.75, "run_id": RUN_ID}))
    for _ in range(2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environ)
        assert done.returncode == 0, done.stderr
    assert sorted(READERS[backend](folder)) == [(step, step / 4) for step in range(1, STEPS + 1)]


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


class Memory:
    """A tracker that keeps everything, or fails as often as it is told."""

    def __init__(self, failures: int = 0) -> None:
        self.steps: list[int] = []
        self.values: dict[int, Figures] = {}
        self.summary: Mapping[str, float] = {}
        self.opened, self._failures = 0, failures

    def __call__(self) -> Memory:
        self.opened += 1
        return self

    def held(self) -> set[int]:
        return set(self.steps)

    def log(self, figures: Sequence[Figures]) -> None:
        if self._failures:
            self._failures -= 1
            raise ConnectionError("nobody answers")
        self.steps += [each.step for each in figures]
        self.values |= {each.step: each for each in figures}

    def finish(self, summary: Mapping[str, float]) -> None:
        self.summary = summary

    def close(self) -> None: ...


class Hanging(Memory):
    def __init__(self, until: threading.Event) -> None:
        super().__init__()
        self._until = until

    def log(self, figures: Sequence[Figures]) -> None:
        self._until.wait()


def test_a_backend_that_fails_or_hangs_holds_up_no_other(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.tracking.follow.CLOSE_WITHIN_S", 3.0)
    good, failing, never, stop = Memory(), Memory(failures=1), threading.Event(), threading.Event()
    write(run, range(1, 4))
    backends: Mapping[str, Callable[[], Memory]] = {"hangs": Hanging(never), "fails": failing, "good": good}
    failed: list[str] = []
    following = threading.Thread(target=lambda: failed.extend(follow(run, backends, stop, once=False)))
    following.start()
    try:
        _wait(lambda: good.steps == [1, 2, 3])
        write(run, range(4, 6))
        run.summary.write_text(json.dumps({"success_after": 0.75}))
        _wait(lambda: good.steps == failing.steps == [1, 2, 3, 4, 5])
    finally:
        stop.set()
        following.join(30)
        never.set()
    assert failed == ["hangs"] and failing.opened == 2
    assert good.summary == {"success_after": 0.75}
    assert "said 4" in good.values[4].samples and good.values[4].values["components/success"] == 0.5


def _wait(until: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not until():
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_each_evaluation_stands_at_the_first_step_after_it(run: RunFolder) -> None:
    def tell(*at: float) -> None:
        told = [evaluation(due=10 * number, at=moment) for number, moment in enumerate(at, start=1)]
        run.evaluations.write_text(Evaluations(evaluations=told).model_dump_json())

    reader = FolderReader(run)
    tell(1002.5, 1004.5, 1099.0)
    write(run, range(1, 7))
    assert _dues(reader.read()) == {3: 10, 5: 20}
    # One that was told late stands at the next step that is read; none stands twice.
    write(run, range(7, 8))
    tell(1002.5, 1004.5, 1005.5)
    assert _dues(reader.read()) == {7: 30}
    write(run, range(8, 9))
    assert _dues(reader.read()) == {}
    assert _dues(FolderReader(run).read()) == {3: 10, 5: 20, 6: 30}, "afterwards all are told"


def _dues(figures: Sequence[Figures]) -> dict[int, float]:
    return {each.step: each.values["held_out/due"] for each in figures if "held_out/due" in each.values}


def test_figures_and_settings_have_flat_names() -> None:
    tree = {
        "loss": 1,
        "kl": None,
        "run_id": "r",
        "warnings": {"truncated": "30 %"},
        "a": {"b": {"c": 2.5}},
        "list": [1],
    }
    assert flattened(tree) == {"loss": 1.0, "warnings/truncated": 1.0, "a/b/c": 2.5}
    assert settings_of({"seed": 1, "model": {"path": "p"}, "betas": [0.9, 0.99]}) == {
        "seed": "1",
        "model.path": "p",
        "betas": "[0.9, 0.99]",
    }


def test_what_is_misspelt_or_no_run_is_refused(run: RunFolder, tmp_path: Path) -> None:
    for arguments, why in (
        ([str(run.root), "--to", "tensorbord"], "did you mean 'tensorboard'?"),
        ([str(run.root)], "no logging backend is named"),
        ([str(tmp_path), "--to", "mlflow"], "is no run folder"),
    ):
        done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and why in done.stderr, done.stderr

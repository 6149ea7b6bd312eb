"""Coming back: a restart that repeats its steps with other bytes goes on above every version that was announced."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from services.config.settings import RunSettings, TrainerSettings
from services.config.training.algorithm import AdvantageSettings
from services.host.run_folder import FORMAT, RunFolder, take_format
from services.policies.batching import Group
from services.policies.versions import Announced
from services.run_store.stream import StreamEntry
from services.wire.errors import UsageError
from services.wire.trajectory import Trajectory, encode_trajectory
from tests.support.trajectories import grouped, random_trajectories
from trainer.algorithms.advantages.compute import AdvantageComputer
from trainer.checkpoint import checkpoint
from trainer.checkpoint.attempts import Attempts
from trainer.checkpoint.environment import Environment, model_digest, repeat_exactly
from trainer.checkpoint.log_lines import Outcome, Skip, StepRecord
from trainer.checkpoint.recovery import DivergedError, terms_of
from trainer.checkpoint.step_log import StepLog, StepLogError
from trainer.io_loop import Background
from trainer.loop import TrainingLoop
from trainer.model.learner import Learner
from trainer.model.roles import Roles, make_roles
from trainer.model.train_batch import train_batch
from trainer.run import come_back
from trainer.sft.tiny_model import build_model
from weight_bus.manifest.layout import hash_bytes

SETTINGS = RunSettings(k=99, trainer=TrainerSettings(warmup_steps=9))
Batch = list[Group[Trajectory]]


def a_batch(seed: int) -> Batch:
    return grouped(random_trajectories(seed, groups=2, size=3, first_ordinal=2 * seed))


class Bus:
    """What engines have seen, in all lives; the stream, too."""

    def __init__(self) -> None:
        self.announced: dict[int, str] = {}
        self.forgets = False
        self.entries: dict[str, bytes] = {}

    def announce(self, version: int, digest: str) -> None:
        assert self.announced.setdefault(version, digest) == digest, f"version {version} has two sets of bytes"
        assert version == max(self.announced), f"version {version} is older than one that is published"

    def newest(self) -> Announced:
        if self.forgets or not self.announced:
            return Announced(0)
        newest = max(self.announced)
        return Announced(newest, self.announced[newest])


class Updates:
    def __init__(self, bus: Bus) -> None:
        self._bus = bus

    def digest(self, version: int, weights: dict[str, torch.Tensor]) -> str:
        return hash_bytes(b"".join(weight.numpy().tobytes() for weight in weights.values()))

    async def known_to_bus(self) -> Announced:
        return self._bus.newest()


class Life:
    """One life of a trainer. `noise`: added to a weight before anything is repeated."""

    def __init__(self, folder: Path, bus: Bus, settings: RunSettings, noise: float, stack: ExitStack) -> None:
        self.bus = bus
        self.log = stack.enter_context(closing(StepLog(folder / "steps.jsonl", "r", terms_of(settings))))
        journal = stack.enter_context(ThreadPoolExecutor(1))
        background = stack.enter_context(closing(Background()))
        model = build_model(seed=5, hidden_size=32, layers=1)
        self.learner = Learner(model, settings.trainer)
        self.roles = Roles(self.learner, AdvantageComputer(AdvantageSettings()))
        self.attempts = Attempts("r", settings, self.roles, self.log, journal, background, folder / "anomalies")
        self.updates = Updates(bus)
        with torch.no_grad():
            next(iter(self.learner.weights().values())).add_(noise)

        async def fetch(entries: Sequence[str]) -> list[StreamEntry]:
            return [StreamEntry(entry, bus.entries[entry]) for entry in entries]

        self.loop: Any = SimpleNamespace(
            log=self.log,
            learner=self.learner,
            roles=self.roles,
            attempts=self.attempts,
            updates=self.updates,
            background=background,
            settings=settings,
            checkpoints=folder,
            identity=SimpleNamespace(run_id="r"),
            reader=SimpleNamespace(fetch=fetch),
            repeat=self.attempts.repeat,
        )
        come_back(cast("TrainingLoop", self.loop), [])
        self.publish()

    def publish(self) -> None:
        version, digest = self.learner.version, self.updates.digest(0, self.learner.weights())
        self.attempts.announce(version, digest).result(30)
        self.bus.announce(version, digest)

    def train(self, *seeds: int, announced: bool = True) -> None:
        for seed in seeds:
            batch = a_batch(seed)
            entries = [member.entry for group in batch for member in group.members]
            payloads = [encode_trajectory(member.payload) for group in batch for member in group.members]
            self.bus.entries |= dict(zip(entries, payloads, strict=True))
            self.attempts.train(StepRecord(self.learner.version, entries), batch).logged.result(30)
            if announced:
                self.publish()

    def save(self, folder: Path) -> None:
        checkpoint.save(folder, checkpoint.snapshot(self.roles, "r", ""))

    @property
    def weights(self) -> list[torch.Tensor]:
        return [weight.clone() for weight in self.learner.weights().values()]


@pytest.fixture
def bus() -> Bus:
    return Bus()


@pytest.fixture
def live(tmp_path: Path, bus: Bus) -> Iterator[Callable[..., Life]]:
    """Begins a life; the one before it is over."""
    with ExitStack() as last:

        def begin(noise: float = 0.0, **trainer: object) -> Life:
            last.close()
            settings = SETTINGS.model_copy(update={"trainer": SETTINGS.trainer.model_copy(update=trainer)})
            return Life(tmp_path, bus, settings, noise, last)

        yield begin


def undisturbed(*seeds: int) -> list[torch.Tensor]:
    """The weights of a fresh process that trains on these batches in one go."""
    model = build_model(seed=5, hidden_size=32, layers=1)
    roles = Roles(Learner(model, SETTINGS.trainer), AdvantageComputer(AdvantageSettings()))
    for seed in seeds:
        train_batch(roles, SETTINGS, a_batch(seed), 1)
    return list(roles.learner.weights().values())


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def skips(folder: Path) -> list[tuple[int, int]]:
    lines = map(json.loads, (folder / "steps.jsonl").read_text(encoding="utf-8").splitlines())
    return [(line["version"], line["to"]) for line in lines if line.get("kind") == "skip"]


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_same_bytes_keep_their_version(live: Callable[..., Life], tmp_path: Path, *, deterministic: bool) -> None:
    live(deterministic=deterministic).train(1, 2, 3)
    life = live(deterministic=deterministic)
    assert (life.learner.version, life.learner.steps_made, skips(tmp_path)) == (3, 3, [])
    assert same(life.weights, undisturbed(1, 2, 3))


@pytest.mark.parametrize("bus_forgets", [False, True])
def test_with_noise_each_life_goes_on_above_the_last_and_no_version_has_two_sets_of_bytes(
    live: Callable[..., Life], bus: Bus, tmp_path: Path, *, bus_forgets: bool
) -> None:
    bus.forgets = bus_forgets
    live().train(1, 2)
    for number in range(1, 5):
        life = live(noise=1e-3 * number)
        assert (life.learner.version, life.learner.steps_made) == (2 * number + 1, number + 1)
        life.train(2 + number)
    assert skips(tmp_path) == [(2, 3), (4, 5), (6, 7), (8, 9)]
    assert sorted(bus.announced) == list(range(11))
    assert [record.version for record in life.log.records] == [0, 1, 3, 5, 7, 9]


def test_a_version_that_nobody_heard_of_is_made_with_the_bytes_there_are(
    live: Callable[..., Life], tmp_path: Path
) -> None:
    life = live()
    life.train(1)
    life.train(2, announced=False)
    life = live(noise=1e-3)
    assert (life.learner.version, skips(tmp_path)) == (2, [])


def test_a_skip_changes_neither_bytes_nor_learning_rates_and_is_repeated(
    live: Callable[..., Life], bus: Bus, tmp_path: Path
) -> None:
    """The bus knows version 2 by other bytes; all else is exact, so that all lives can be held against one in one go."""
    live().train(1, 2)
    bus.announced[2] = "another machine's"
    life = live()
    assert life.learner.version == 3
    life.train(3)
    life.save(tmp_path)
    life.train(4)
    assert same(life.weights, undisturbed(1, 2, 3, 4))
    for _ in range(2):
        again = live()
        assert (again.learner.version, again.learner.steps_made) == (5, 4)
        assert same(again.weights, life.weights)
    for kept in tmp_path.glob("step-*/meta.json"):
        kept.unlink()
    again = live()
    assert (again.learner.version, again.learner.steps_made) == (5, 4)
    assert same(again.weights, life.weights)
    assert skips(tmp_path) == [(2, 3)]


def test_a_log_that_lost_its_end_goes_on_above_what_the_bus_knows(
    live: Callable[..., Life], bus: Bus, tmp_path: Path
) -> None:
    live().train(1, 2)
    bus.announced |= {3: "x", 4: "y"}
    assert (live().learner.version, skips(tmp_path)) == (5, [(2, 5)])


def test_a_run_without_a_past_asks_nobody(live: Callable[..., Life], bus: Bus, tmp_path: Path) -> None:
    """Engines of another run under this name are a conflict, as ever: nothing is skipped in silence."""
    bus.announced[7] = "another run's"
    with pytest.raises(AssertionError, match="older than one that is published"):
        live()
    assert skips(tmp_path) == []


def test_a_deterministic_run_says_where_its_bytes_are_others_and_may_go_on_without(
    live: Callable[..., Life], tmp_path: Path
) -> None:
    life = live(deterministic=True)
    life.train(1, 2)
    life.train(3, announced=False)
    for _ in range(2):
        with pytest.raises(DivergedError, match=r"other bytes than were announced as version 2\b") as caught:
            live(noise=1e-3, deterministic=True)
        assert caught.value.exit_code == 2 and "trainer.deterministic=false" in caught.value.remedy
    assert skips(tmp_path) == []
    assert live(noise=1e-3).learner.steps_made == 3


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    repeat_exactly()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("exact")
def test_every_operator_of_a_step_has_a_deterministic_kernel() -> None:
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8", "what the user sets is kept"
    advantage = AdvantageSettings(estimator="gae", kl=0.05)
    trainer = SETTINGS.trainer.model_copy(update={"advantage": advantage, "deterministic": True})
    settings = SETTINGS.model_copy(update={"trainer": trainer})
    made = []
    for _ in range(2):
        roles = make_roles(lambda: build_model(seed=5, hidden_size=32, layers=1), settings, 0)
        for seed in (1, 2):
            train_batch(roles, settings, a_batch(seed), 1)
        made.append(list(roles.learner.weights().values()))
    assert same(*made)


def test_another_model_is_refused_and_other_libraries_are_named(tmp_path: Path) -> None:
    def opened() -> StepLog:
        return StepLog(tmp_path / "steps.jsonl", "r", terms_of(SETTINGS))

    first = Environment("a" * 64, {"torch": "2.13.0", "device": "cpu AVX2"})
    with closing(opened()) as log:
        assert log.environment is None and first.changes(log.environment) == []
        log.check_model(first)
        log.take_environment(first)
    with closing(opened()) as log:
        assert log.environment == first
        with pytest.raises(UsageError, match="began with another model"):
            log.check_model(Environment("b" * 64, first.parts))
        later = Environment(first.model, {"torch": "2.14.0", "device": "cpu AVX2"})
        log.check_model(later)
        assert later.changes(log.environment) == ["torch: 2.13.0 → 2.14.0"]
        log.take_environment(later)
    with closing(opened()) as log:
        assert log.environment == later


def test_the_digest_of_a_model_is_of_its_weights_and_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    first = model_digest(tmp_path)
    (tmp_path / "README.md").write_text("words")
    assert model_digest(tmp_path) == first
    (tmp_path / "model.safetensors").write_bytes(b"abd")
    assert model_digest(tmp_path) != first


@pytest.mark.parametrize("skip", [(1, 1), (1, 0), (0, 2), (2, 3)])
def test_a_skip_that_leads_nowhere_breaks_the_log(tmp_path: Path, skip: tuple[int, int]) -> None:
    path = tmp_path / "steps.jsonl"
    with closing(StepLog(path, "r", terms_of(SETTINGS))) as log:
        log.append(StepRecord(0, ["0-0"]))
        log.write(Outcome(version=0, made=1, micro_batch_tokens=4096))
        log.write(Skip(*skip))
    with pytest.raises(StepLogError, match="leads nowhere"):
        StepLog(path, "r", terms_of(SETTINGS))


def test_a_log_and_a_folder_of_a_later_format_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"schema":3,"run_id":"r","fingerprint":""}\n')
    with pytest.raises(UsageError, match="of format 3, this rollmesh reads 1 and 2"):
        StepLog(path, "r", terms_of(SETTINGS))
    folder = RunFolder(tmp_path)
    for before in (None, "1\n", f"{FORMAT}\n"):
        if before is not None:
            folder.format.write_text(before)
        take_format(folder)
        assert folder.format.read_text() == f"{FORMAT}\n"
    folder.format.write_text("3\n")
    with pytest.raises(UsageError, match="a run folder of format 3, this rollmesh reads up to 2"):
        take_format(folder)

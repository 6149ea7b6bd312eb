"""What the step log knows of each batch, whatever became of it and of the trainer; and what a restart makes of it."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

import msgspec
import pytest
import torch

from services.config.settings import RunSettings, TrainerSettings
from services.config.training.algorithm import AdvantageSettings, LossSettings
from services.config.training.optimizer import OptimizerSettings, ScheduleSettings
from services.policies.batching import Group
from services.wire.errors import UsageError
from services.wire.trajectory import Trajectory
from tests.support.fragile_loss import BROKEN, NAME, NOT_FINITE, marked
from tests.support.trajectories import grouped, random_trajectories
from trainer.algorithms.advantages.compute import AdvantageComputer
from trainer.checkpoint.anomalies import MOST, read_dump
from trainer.checkpoint.attempts import MOST_SKIPPED, Attempts, drops_of
from trainer.checkpoint.checkpoint import restore_newest
from trainer.checkpoint.log_lines import Attempt, Ended, Header, StepRecord
from trainer.checkpoint.recovery import LIVES, Replay, terms_of
from trainer.checkpoint.step_log import StepLog
from trainer.io_loop import Background
from trainer.model.anomaly import AnomalyError
from trainer.model.learner import Learner
from trainer.model.roles import Roles
from trainer.model.train_batch import train_batch
from trainer.sft.tiny_model import build_model

SETTINGS = RunSettings(k=99, trainer=TrainerSettings(loss=LossSettings(policy=NAME), warmup_steps=0))
TERMS = terms_of(SETTINGS)
Batch = list[Group[Trajectory]]


def changed(**trainer: object) -> RunSettings:
    return SETTINGS.model_copy(update={"trainer": SETTINGS.trainer.model_copy(update=trainer)})


def a_batch(seed: int, mark: float | None = None) -> Batch:
    trajectories = random_trajectories(seed, groups=2, size=3, first_ordinal=2 * seed)
    return grouped(trajectories if mark is None else marked(trajectories, mark))


def entries_of(batch: Batch) -> list[str]:
    return [member.entry for group in batch for member in group.members]


class Life:
    """One life of a trainer, as far as its batches go; `repeat` first what the log holds of the given ones."""

    def __init__(self, folder: Path, settings: RunSettings, stack: ExitStack) -> None:
        self.log = stack.enter_context(closing(StepLog(folder / "steps.jsonl", "r", terms_of(settings))))
        journal = stack.enter_context(ThreadPoolExecutor(1))
        background = stack.enter_context(closing(Background()))
        model = build_model(seed=5, hidden_size=32, layers=1)
        learner = Learner(model, settings.trainer, run_steps=settings.steps)
        self.roles = Roles(learner, AdvantageComputer(AdvantageSettings()))
        self.attempts = Attempts("r", settings, self.roles, self.log, journal, background, folder / "anomalies")

    def repeat(self, *batches: Batch) -> None:
        by_entry = {entries_of(batch)[0]: batch for batch in batches}
        for record in Replay.since(0, self.log.records).records:
            self.attempts.repeat(record, by_entry[record.entries[0]])

    def train(self, batch: Batch, updates: int = 1) -> None:
        made = self.attempts.train(StepRecord(self.roles.learner.version, entries_of(batch), updates), batch)
        made.logged.result(30)

    @property
    def weights(self) -> list[torch.Tensor]:
        return [weight.clone() for weight in self.roles.learner.weights().values()]


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Callable[..., Life]]:
    """Begins a life; the one before it is over."""
    with ExitStack() as last:

        def begin(settings: RunSettings = SETTINGS) -> Life:
            last.close()
            return Life(tmp_path, settings, last)

        yield begin


def undisturbed(*steps: tuple[RunSettings, Batch]) -> list[torch.Tensor]:
    model = build_model(seed=5, hidden_size=32, layers=1)
    roles = Roles(Learner(model, SETTINGS.trainer), AdvantageComputer(AdvantageSettings()))
    for settings, batch in steps:
        train_batch(roles, settings, batch, 1)
    return list(roles.learner.weights().values())


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_batch_that_is_not_finite_stops_the_run_each_time_until_it_may_be_skipped(
    live: Callable[..., Life], tmp_path: Path
) -> None:
    sound, bad, next_one = a_batch(1), a_batch(2, NOT_FINITE), a_batch(3)
    life = live()
    life.train(sound)
    with pytest.raises(AnomalyError, match=r"step 2 is not made.*anomalies/version-00000001-anomaly"):
        life.train(bad)
    for _ in range(LIVES + 1):
        life = live()
        with pytest.raises(AnomalyError):
            life.repeat(sound, bad)
        assert life.roles.learner.version == 1
    life = live(changed(on_anomaly="skip"))
    life.repeat(sound, bad)
    life.train(next_one)
    assert same(life.weights, undisturbed((SETTINGS, sound), (SETTINGS, next_one)))
    life = live()
    life.repeat(sound, next_one)
    assert life.roles.learner.version == 2
    (outcome,) = life.log.drops
    assert (outcome.cause, outcome.dropped) == ("anomaly", entries_of(bad))
    assert life.log.trained_entries() == entries_of(sound) + entries_of(next_one)
    assert {drop.cause for drop in drops_of(outcome).values()} == {"anomaly"}


def test_a_dump_holds_what_is_needed_to_repeat_it_and_the_newest_are_kept(
    live: Callable[..., Life], tmp_path: Path
) -> None:
    life = live(changed(on_anomaly="skip"))
    for seed in range(MOST + 2):
        life.train(a_batch(2 * seed + 1))
        life.train(a_batch(2 * seed + 2, NOT_FINITE))
    dumps = sorted((tmp_path / "anomalies").iterdir())
    assert [path.name for path in dumps] == [f"version-{version:08d}-anomaly" for version in range(3, MOST + 3)]
    assert [(path / "state").exists() for path in dumps] == [False] * (MOST - 1) + [True]
    dump = read_dump(dumps[-1])
    assert (dump.report.version, dump.report.made, len(dump.report.trajectories)) == (MOST + 2, 0, 6)
    assert "the loss of the policy is nan" in dump.report.why
    assert dump.report.trajectories[0].logprobs == (NOT_FINITE, NOT_FINITE)
    assert dump.groups == a_batch(2 * MOST + 4, NOT_FINITE)
    assert dump.state is not None and dump.settings.trainer == changed(on_anomaly="skip").trainer
    model = build_model(seed=9, hidden_size=32, layers=1)
    roles = Roles(Learner(model, dump.settings.trainer), AdvantageComputer(AdvantageSettings()))
    assert restore_newest(dump.state, roles, dump.report.run_id) == MOST + 2
    with pytest.raises(AnomalyError, match=f"step {MOST + 3} is not made"):
        train_batch(roles, dump.settings, dump.groups, dump.report.updates)
    with pytest.raises(UsageError, match="holds no dumped batch"):
        read_dump(tmp_path)


def test_not_every_batch_of_a_run_is_skipped(live: Callable[..., Life]) -> None:
    life = live(changed(on_anomaly="skip"))
    for seed in range(MOST_SKIPPED):
        life.train(a_batch(seed, NOT_FINITE))
    with pytest.raises(AnomalyError, match=f"the {MOST_SKIPPED + 1}th batch in a row"):
        life.train(a_batch(99, NOT_FINITE))
    assert len(life.log.drops) == MOST_SKIPPED


def test_the_steps_of_a_batch_before_one_that_is_not_finite_stay_made(live: Callable[..., Life]) -> None:
    groups = [*a_batch(1), *a_batch(2, NOT_FINITE), *a_batch(3)]
    life = live(changed(on_anomaly="skip"))
    life.train(groups, updates=3)
    life.train(a_batch(4))
    assert life.roles.learner.version == 2
    again = live()
    again.repeat(groups, a_batch(4))
    assert (again.roles.learner.version, same(again.weights, life.weights)) == (2, True)
    assert again.log.trained_entries() == entries_of(a_batch(1)) + entries_of(a_batch(4))


def test_a_batch_that_ends_so_many_lives_is_dropped(live: Callable[..., Life], tmp_path: Path) -> None:
    sound, broken, next_one = a_batch(1), a_batch(2, BROKEN), a_batch(3)
    life = live()
    life.train(sound)
    with pytest.raises(RuntimeError, match="no kernel"):
        life.train(broken)
    for _ in range(LIVES - 1):
        life = live()
        with pytest.raises(RuntimeError, match="no kernel"):
            life.repeat(sound, broken)
    life = live()
    life.repeat(sound, broken)
    (outcome,) = life.log.drops
    assert (outcome.cause, outcome.dropped) == ("untrainable", entries_of(broken))
    assert outcome.why == f"its batch ended the trainer {LIVES} times (RuntimeError: no kernel for this batch)"
    assert (tmp_path / "anomalies" / "version-00000001-untrainable" / "report.json").exists()
    life.train(next_one)
    assert same(life.weights, undisturbed((SETTINGS, sound), (SETTINGS, next_one)))


def test_lives_that_were_killed_count_and_the_last_takes_the_smallest_passes(
    live: Callable[..., Life], tmp_path: Path
) -> None:
    """As after the kernel's kill: the log holds no more than that the batch was begun."""
    sound, heavy = a_batch(1), a_batch(2)
    life = live()
    life.train(sound)
    record = StepRecord(1, entries_of(heavy))
    life.log.append(record)
    for life_number in range(2, LIVES + 1):
        life = live()
        assert (life.log.lives, life.log.unproven) == (life_number - 1, record)
        life.log.write(Attempt(1, 4096 if life_number < LIVES else 1))
    assert live().log.lives == LIVES
    cut = (tmp_path / "steps.jsonl").read_bytes().splitlines(keepends=True)[:-1]
    (tmp_path / "steps.jsonl").write_bytes(b"".join(cut))
    life = live()
    life.repeat(sound, heavy)
    assert same(life.weights, undisturbed((SETTINGS, sound), (changed(micro_batch_tokens=1), heavy)))
    again = live()
    again.repeat(sound, heavy)
    assert again.log.unproven is None and same(again.weights, life.weights)


def test_a_batch_that_was_made_is_never_given_up(live: Callable[..., Life]) -> None:
    """Whoever may have heard of its version hears of the same bytes: only the log's last word can be untold."""
    sound = a_batch(1)
    life = live()
    life.train(sound)
    for _ in range(LIVES + 2):
        life = live()
        assert life.log.unproven is None
        life.repeat(sound)
    assert same(life.weights, undisturbed((SETTINGS, sound)))


def test_settings_that_may_change_hold_from_the_next_batch_on(live: Callable[..., Life]) -> None:
    first, second, third = (a_batch(seed) for seed in (1, 2, 3))
    later = changed(micro_batch_tokens=17, learning_rate=1e-2, clip_grad_norm=0.1, warmup_steps=3)
    live().train(first)
    life = live(later)
    life.repeat(first)
    life.train(second)
    last = changed(learning_rate=1e-3)
    life = live(last)
    life.repeat(first, second)
    life.train(third)
    expected = undisturbed((SETTINGS, first), (later, second), (last, third))
    assert same(life.weights, expected)
    for settings in (SETTINGS, later):
        again = live(settings)
        again.repeat(first, second, third)
        assert same(again.weights, expected)


def test_the_schedule_and_the_runs_length_may_change_and_a_replay_has_those_of_then(live: Callable[..., Life]) -> None:
    first, second, third = (a_batch(seed) for seed in (1, 2, 3))
    shorter = changed(schedule=ScheduleSettings(kind="cosine")).model_copy(update={"steps": 4})
    longer = shorter.model_copy(update={"steps": 400})
    expected = undisturbed((SETTINGS, first), (shorter, second), (longer, third))
    assert not same(expected, undisturbed((SETTINGS, first), (longer, second), (longer, third)))
    live().train(first)
    life = live(shorter)
    life.repeat(first)
    life.train(second)
    life = live(longer)
    life.repeat(first, second)
    life.train(third)
    assert same(life.weights, expected)
    again = live()
    again.repeat(first, second, third)
    assert same(again.weights, expected)


def test_a_batch_that_nobody_heard_of_is_made_under_the_new_settings(live: Callable[..., Life]) -> None:
    sound, heavy = a_batch(1), a_batch(2)
    life = live()
    life.train(sound)
    life.log.append(StepRecord(1, entries_of(heavy)))
    remedy = changed(micro_batch_tokens=12)
    life = live(remedy)
    life.repeat(sound, heavy)
    assert same(life.weights, undisturbed((SETTINGS, sound), (remedy, heavy)))


@pytest.mark.parametrize(
    "other",
    [
        SETTINGS.model_copy(update={"k": 1}),
        SETTINGS.model_copy(update={"seed": 7}),
        changed(betas=(0.5, 0.5)),
        changed(optimizer=OptimizerSettings(kind="muon")),
    ],
)
def test_settings_that_may_not_change_are_refused(live: Callable[..., Life], other: RunSettings) -> None:
    live().train(a_batch(1))
    with pytest.raises(UsageError, match="other trainer settings"):
        live(other)
    assert live(changed(on_anomaly="skip", checkpoint_every=3)).log.records


def test_a_log_of_before_is_continued_and_its_settings_may_change_from_then_on(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    lines = [msgspec.json.encode(Header(1, "r", TERMS.whole)), msgspec.json.encode(StepRecord(0, ["0-0"]))]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    other = terms_of(changed(micro_batch_tokens=9))
    with pytest.raises(UsageError, match="other trainer settings"):
        StepLog(path, "r", other)
    with closing(StepLog(path, "r", TERMS)) as log:
        assert log.unproven is None, "it may have been announced"
    with closing(StepLog(path, "r", other)) as log:
        assert [log.tunables_at(version).micro_batch_tokens for version in (0, 1, 5)] == [4096, 9, 9]


def test_a_short_write_is_noticed_and_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with closing(StepLog(path, "r", TERMS)) as log:
        log.append(StepRecord(0, ["0-0"]))
        before = path.read_bytes()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        # The system takes ten more bytes of the next write, and says so by its count alone.
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 10, hard))
        try:
            with pytest.raises(UsageError, match="cannot write"):
                log.append(StepRecord(1, ["1-0"]))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_bytes() == before
        log.append(StepRecord(1, ["1-1"]))
    with closing(StepLog(path, "r", TERMS)) as again:
        assert [record.entries for record in again.records] == [["0-0"], ["1-1"]]


def test_what_a_log_tells_of_a_batch_must_be_of_its_last(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with closing(StepLog(path, "r", TERMS)) as log:
        log.append(StepRecord(0, ["0-0"]))
        log.write(Ended(3, "?", counts=True))
    with pytest.raises(Exception, match="is of no batch that it holds"):
        StepLog(path, "r", TERMS)

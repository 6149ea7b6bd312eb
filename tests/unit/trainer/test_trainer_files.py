"""What the trainer writes: whole or not at all, readable after any crash."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Event

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.config.settings import EvaluationSettings, RunSettings, TrainerSettings
from services.config.training.algorithm import AdvantageSettings
from services.host.files import appearing
from services.wire.errors import UsageError
from tests.support.trajectories import grouped, random_trajectories
from trainer.algorithms.advantages.compute import AdvantageComputer
from trainer.checkpoint import checkpoint
from trainer.checkpoint.log_lines import StepRecord
from trainer.checkpoint.model_folder import save_final
from trainer.checkpoint.recovery import Replay, ReplayError, fingerprint, restore, terms_of
from trainer.checkpoint.saving import Save, Saving
from trainer.checkpoint.step_log import StepLog, StepLogError
from trainer.data.packing import pack
from trainer.data.rows import rows_of
from trainer.io_loop import Background
from trainer.loop import trim
from trainer.model.learner import Learner
from trainer.model.roles import Roles
from trainer.sft.tiny_model import build_model, save_policy

TERMS = terms_of(RunSettings())


def alone(learner: Learner) -> Roles:
    return Roles(learner, AdvantageComputer(AdvantageSettings()))


def one_step(learner: Learner, seed: int) -> None:
    rows, tally = rows_of(grouped(random_trajectories(seed, groups=2, size=3)), learner.version, 100)
    learner.step(pack(rows, tally, 4096))


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), appearing(tmp_path / "a") as folder:
        (folder / "half").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with appearing(tmp_path / "a") as folder:
        (folder / "file").write_text("x")
        assert not (tmp_path / "a").exists()
    assert (tmp_path / "a" / "file").read_text() == "x"
    with pytest.raises(OSError), appearing(tmp_path / "a"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_a_killed_process_left_half_made_is_swept_away(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with appearing(tmp_path / "a") as folder:
            (folder / "half").write_text("x")
            os._exit(9)
    os.waitpid(child, 0)
    assert len(list(tmp_path.iterdir())) == 1
    with appearing(tmp_path / "a") as folder:
        (folder / "file").write_text("x")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_the_step_log_survives_a_torn_tail(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    log = StepLog(path, "r", TERMS)
    for version in range(3):
        log.append(StepRecord(version, [f"{version}-0", f"{version}-1"]))
    log.close()
    torn = path.read_bytes()[:-4]
    for cut in (torn, torn + b"\xff\xfe"):
        path.write_bytes(cut)
        again = StepLog(path, "r", TERMS)
        assert [record.version for record in again.records] == [0, 1]
        again.append(StepRecord(2, ["2-9"]))
        again.close()
    whole = StepLog(path, "r", TERMS)
    assert whole.records[-1] == StepRecord(2, ["2-9"])
    whole.close()


def test_a_log_of_other_steps_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    log = StepLog(path, "r", TERMS)
    log.append(StepRecord(0, ["0-0"]))
    log.close()
    with pytest.raises(UsageError, match="holds run r"):
        StepLog(path, "another", TERMS)
    with pytest.raises(UsageError, match="other trainer settings"):
        StepLog(path, "r", terms_of(RunSettings(k=9)))
    with path.open("ab") as file:
        file.write(b"rubbish\n" + json.dumps({"version": 1, "entries": []}).encode() + b"\n")
    with pytest.raises(StepLogError, match="broken"):
        StepLog(path, "r", TERMS)


def test_a_log_counts_the_steps_of_each_batch(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    log = StepLog(path, "r", TERMS)
    for version, updates in ((0, 4), (4, 2)):
        log.append(StepRecord(version, [f"{version}-0"], updates))
    log.close()
    with path.open("ab") as file:
        # As it was written before batches had several steps.
        file.write(json.dumps({"version": 6, "entries": ["6-0"]}).encode() + b"\n")
    again = StepLog(path, "r", TERMS)
    assert [(record.version, record.updates) for record in again.records] == [(0, 4), (4, 2), (6, 1)]
    again.append(StepRecord(8, []))
    again.close()
    with pytest.raises(StepLogError, match="version 8 follows 6"):
        StepLog(path, "r", TERMS)


def test_only_settings_that_change_the_bytes_are_in_the_fingerprint() -> None:
    base = RunSettings()
    assert fingerprint(base) == fingerprint(RunSettings(servers=3, trainer=TrainerSettings(checkpoint_every=1)))
    assert fingerprint(base) != fingerprint(RunSettings(k=1))
    assert fingerprint(base) != fingerprint(RunSettings(trainer=TrainerSettings(minibatches_per_batch=2)))
    assert fingerprint(base) != fingerprint(RunSettings(trainer=TrainerSettings(learning_rate=1e-3)))


def test_settings_that_a_run_of_before_did_not_know_leave_its_fingerprint_as_it_was() -> None:
    base, other = (
        RunSettings(trainer=TrainerSettings(dtype=dtype)).with_threads(2, tiny=True) for dtype in ("auto", "bfloat16")
    )
    assert fingerprint(base) == "36cedba4742fa070c2f2203ac632ef38", "as before bfloat16, schedules and epochs"
    assert fingerprint(base) != fingerprint(other)
    assert terms_of(base).fixed != terms_of(other).fixed


def test_a_log_that_does_not_reach_back_to_the_checkpoint_is_an_error() -> None:
    records = [StepRecord(version, []) for version in (5, 6)]
    assert [record.version for record in Replay.since(6, records).records] == [6]
    assert Replay.since(7, records).records == []
    with pytest.raises(ReplayError, match="begins at version 5"):
        Replay.since(3, records)


def test_a_restored_learner_goes_on_with_the_same_bytes(tmp_path: Path) -> None:
    model = build_model(seed=5, hidden_size=32, layers=1)
    settings = TrainerSettings()
    learner = Learner(copy.deepcopy(model), settings)
    one_step(learner, 1)
    one_step(learner, 2)
    checkpoint.save(tmp_path, checkpoint.snapshot(alone(learner), "r", "f"))
    restored = Learner(copy.deepcopy(model), settings)
    assert checkpoint.restore_newest(tmp_path, alone(restored), "r") == restored.version == 2
    for each in (learner, restored):
        one_step(each, 3)
    assert all(torch.equal(weight, restored.weights()[name]) for name, weight in learner.weights().items())


def test_two_checkpoints_are_kept_and_a_broken_newest_gives_way(tmp_path: Path) -> None:
    learner = Learner(build_model(seed=5, hidden_size=32, layers=1), TrainerSettings())
    for seed in range(3):
        one_step(learner, seed)
        newest = checkpoint.save(tmp_path, checkpoint.snapshot(alone(learner), "r", "f"))
    assert checkpoint.versions(tmp_path) == [2, 3]
    (newest / "optimizer.safetensors").write_bytes(b"\0" * 40)
    assert checkpoint.restore_newest(tmp_path, alone(learner), "r") == 2
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.restore_newest(tmp_path, alone(learner), "another run")


def test_a_broken_checkpoint_is_written_anew_and_counts_for_none(tmp_path: Path) -> None:
    learner = Learner(build_model(seed=5, hidden_size=32, layers=1), TrainerSettings())
    for seed in range(3):
        one_step(learner, seed)
        newest = checkpoint.save(tmp_path, checkpoint.snapshot(alone(learner), "r", "f"))
    whole = (newest / "optimizer.safetensors").read_bytes()
    (newest / "optimizer.safetensors").write_bytes(whole[:-40])
    assert (checkpoint.versions(tmp_path), checkpoint.good_versions(tmp_path)) == ([2, 3], [2])
    assert checkpoint.restore_newest(tmp_path, alone(learner), "r") == 2
    one_step(learner, 2)
    assert checkpoint.save(tmp_path, checkpoint.snapshot(alone(learner), "r", "f")) == newest
    assert (newest / "optimizer.safetensors").read_bytes() == whole
    assert checkpoint.good_versions(tmp_path) == [2, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]

    (newest / "meta.json").write_bytes(b"{")
    one_step(learner, 4)
    checkpoint.save(tmp_path, checkpoint.snapshot(alone(learner), "r", "f"))
    assert checkpoint.versions(tmp_path) == [2, 4], "a broken one takes no good one's place"


def test_without_a_checkpoint_that_can_be_read_a_run_begins_where_it_did(tmp_path: Path) -> None:
    learner = Learner(build_model(seed=5, hidden_size=32, layers=1), TrainerSettings())
    one_step(learner, 1)
    only = checkpoint.save(tmp_path, checkpoint.snapshot(alone(learner), "r", "f"))
    (only / "model.safetensors").write_bytes(b"\0" * 40)
    fresh = Learner(build_model(seed=5, hidden_size=32, layers=1), TrainerSettings())
    before = {name: weight.clone() for name, weight in fresh.weights().items()}
    with pytest.raises(checkpoint.UnreadableError):
        checkpoint.restore_newest(tmp_path, alone(fresh), "r")
    assert restore(tmp_path, alone(fresh), "r") is None
    assert fresh.version == 0 and all(torch.equal(weight, before[name]) for name, weight in fresh.weights().items())


def test_a_checkpoint_is_written_once_its_log_is_durable(tmp_path: Path) -> None:
    learner = Learner(build_model(seed=5, hidden_size=32, layers=1), TrainerSettings())
    lost: Future[None] = Future()
    lost.set_exception(UsageError("no space left", ""))
    logged: Future[None] = Future()
    with saving_to(tmp_path, learner, logged=lambda: lost) as saving:
        with pytest.raises(UsageError, match="no space left"):
            saving.begin().result(timeout=30)
        assert checkpoint.versions(tmp_path) == []
    with saving_to(tmp_path, learner, logged=lambda: logged) as saving:
        saved = saving.begin()
        with pytest.raises(TimeoutError):
            saved.result(timeout=0.2)
        assert checkpoint.versions(tmp_path) == []
        logged.set_result(None)
        assert saved.result(timeout=30).exists()


def test_a_slow_disk_delays_only_the_next_checkpoint(tmp_path: Path) -> None:
    """One is written at a time, from one copy of the state; training asks again after each step, and never waits."""
    learner = Learner(build_model(seed=5, hidden_size=32, layers=1), TrainerSettings())
    disk, places = Event(), []

    def slowly(folder: Path, taken: checkpoint.Snapshot) -> Path:
        places.append({t.data_ptr() for tensors in taken.tensors.values() for t in tensors.values()})
        assert disk.wait(30)
        return checkpoint.save(folder, taken)

    with saving_to(tmp_path, learner, every=2, save=slowly) as saving:
        asked = []
        for step in range(1, 7):
            one_step(learner, step)
            asked.append(saving.after_steps(step - 1, step - 1))
            if asked[-1]:
                first = saving.begin()
        # The first is copied at version 2, and is still being written when two more are due.
        assert asked == [False, True, False, False, False, False] and saving.busy
        disk.set()
        first.result(timeout=30)
        one_step(learner, 7)
        assert saving.after_steps(6, 6), "the one that was put off is made up for, without waiting for version 8"
        saving.begin().result(timeout=30)
    assert checkpoint.versions(tmp_path) == [2, 7]
    assert places[0] == places[1], "the second copy is written over the first"
    fresh = Learner(build_model(seed=9, hidden_size=32, layers=1), TrainerSettings())
    assert checkpoint.restore_newest(tmp_path, alone(fresh), "r") == 7
    assert all(torch.equal(weight, learner.weights()[name]) for name, weight in fresh.weights().items())


def test_a_run_that_ends_writes_the_checkpoint_that_was_put_off(tmp_path: Path) -> None:
    learner = Learner(build_model(seed=5, hidden_size=32, layers=1), TrainerSettings())
    disk = Event()

    def slowly(folder: Path, taken: checkpoint.Snapshot) -> Path:
        assert disk.wait(30)
        return checkpoint.save(folder, taken)

    with saving_to(tmp_path, learner, save=slowly) as saving:
        one_step(learner, 1)
        assert saving.after_steps(0, 0)
        saving.begin()
        one_step(learner, 2)
        assert not saving.after_steps(1, 1)
        disk.set()
        saving.make_up()
        assert checkpoint.versions(tmp_path) == [1, 2]


def test_a_version_to_be_evaluated_is_kept(tmp_path: Path) -> None:
    learner = Learner(build_model(seed=5, hidden_size=32, layers=1), TrainerSettings())
    chosen = EvaluationSettings(every=3)
    with saving_to(tmp_path, learner, every=100, evaluation=chosen) as saving:
        for step in range(1, 8):
            one_step(learner, step)
            if saving.after_steps(step - 1, step - 1):
                saving.begin().result(timeout=30)
    assert checkpoint.versions(tmp_path) == [3, 6]
    assert sorted(path.name for path in tmp_path.glob("evaluated-*")) == ["evaluated-00000003", "evaluated-00000006"]


@contextmanager
def saving_to(
    folder: Path,
    learner: Learner,
    *,
    every: int = 1,
    evaluation: EvaluationSettings | None = None,
    logged: Callable[[], Future[None]] | None = None,
    save: Save = checkpoint.save,
) -> Iterator[Saving]:
    done: Future[None] = Future()
    done.set_result(None)
    with ThreadPoolExecutor(1) as thread, closing(Background()) as background:
        yield Saving(
            folder=folder,
            evaluations_file=folder / "evaluations.json",
            roles=alone(learner),
            run_id="r",
            fingerprint="f",
            every=every,
            evaluation=evaluation or EvaluationSettings(),
            logged=logged or (lambda: done),
            thread=thread,
            background=background,
            save=save,
        )


class Taking:
    """A stream of which an old entry is taken into a batch, and settled, while it is asked for the pending ones."""

    def __init__(self, log: StepLog, pending: str | None) -> None:
        self.log, self.pending, self.kept = log, pending, ""

    async def oldest_pending(self) -> str | None:
        before = self.pending
        self.log.records.append(StepRecord(3, ["5-0"]))
        return before

    async def trim_before(self, stream_id: str) -> int:
        self.kept = stream_id
        return 0


async def test_the_stream_is_trimmed_below_two_good_checkpoints_and_no_entry_that_a_batch_takes_meanwhile(
    tmp_path: Path,
) -> None:
    log = StepLog(tmp_path / "steps.jsonl", "r", TERMS)
    learner = Learner(build_model(seed=5, hidden_size=32, layers=1), TrainerSettings())
    for version in range(3):
        log.records.append(StepRecord(version, [f"{10 + version}-0"]))
        one_step(learner, version)
        newest = checkpoint.save(tmp_path, checkpoint.snapshot(alone(learner), "r", "f"))
        if version == 0:
            stream = Taking(log, None)
            await trim(stream, log, tmp_path)  # type: ignore[arg-type]
            assert stream.kept == "", "the first checkpoint may turn out broken"
    (newest / "meta.json").unlink()
    stream = Taking(log, None)
    await trim(stream, log, tmp_path)  # type: ignore[arg-type]
    assert stream.kept == "", "nor is a broken one counted"
    checkpoint.save(tmp_path, checkpoint.snapshot(alone(learner), "r", "f"))
    stream = Taking(log, None)
    await trim(stream, log, tmp_path)  # type: ignore[arg-type]
    log.close()
    assert stream.kept == "5-0"


def test_the_final_checkpoint_is_a_hugging_face_folder(tmp_path: Path) -> None:
    base = tmp_path / "base"
    model = build_model(seed=5)
    save_policy(model, base)
    of_the_model = {
        "chat_template.jinja",
        "LICENSE",
        "modeling_own.py",
        "sentencepiece.bpe.model",
        "preprocessor_config.json",
    }
    # As `rollmesh sft` and `rollmesh models fetch` leave them, and weights in another form.
    for name in of_the_model | {"sft.jsonl", "sft.toml", "summary.json", "README.md", "pytorch_model.bin"}:
        (base / name).write_text("{{ messages }}")
    with torch.no_grad():
        model.lm_head.weight += 1.0
    save_final(tmp_path / "checkpoints", model, base)
    final = save_final(tmp_path / "checkpoints", model, base)
    loaded = AutoModelForCausalLM.from_pretrained(final)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert (
        AutoTokenizer.from_pretrained(final)("12=")["input_ids"]
        == AutoTokenizer.from_pretrained(base)("12=")["input_ids"]
    )
    written = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in final.iterdir()} == written | of_the_model

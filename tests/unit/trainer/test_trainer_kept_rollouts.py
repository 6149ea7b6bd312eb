"""What the trainer keeps of its steps: which rollouts, and the logprobs and advantages that it trained with."""

from __future__ import annotations

import copy
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import Qwen3ForCausalLM

from services.config.samples import SampleSettings
from services.config.settings import RunSettings, TrainerSettings
from services.config.training.algorithm import AdvantageSettings
from services.policies.batching import Group
from services.run_store.rollouts.record import KeptRollout
from services.run_store.rollouts.samples import samples_of_step
from services.run_store.rollouts.search import RolloutReader, Search
from services.run_store.rollouts.tokens import segment_tokens, texts_of
from services.wire.packed import unpack_tokens
from services.wire.trajectory import Trajectory
from tests.support.chat_policy import build_chat_tokenizer
from tests.support.kept_rollouts import VOCABULARY, random_groups
from trainer.algorithms.advantages.compute import AdvantageComputer
from trainer.data.packing import micro_batch
from trainer.data.rows import to_measure
from trainer.metrics.pieces import Pieces
from trainer.metrics.rollouts import RolloutRecorder, open_recorder
from trainer.model.learner import Learner
from trainer.model.roles import Roles
from trainer.model.train_batch import Trained, train_batch
from trainer.sft.tiny_model import build_model, build_tokenizer

ALL = SampleSettings(cpu_share=1.0)


@pytest.fixture(scope="module")
def model() -> Qwen3ForCausalLM:
    return build_model(seed=5, hidden_size=32, layers=1)


def roles_of(model: Qwen3ForCausalLM, settings: RunSettings, *, keeps: bool = True) -> Roles:
    roles = Roles(Learner(copy.deepcopy(model), settings.trainer, 9), AdvantageComputer(AdvantageSettings()))
    roles.learner.keeps_logprobs = keeps
    return roles


def recorder(folder: Path, settings: SampleSettings = ALL, k: int = 2, **given: object) -> RolloutRecorder:
    return RolloutRecorder(folder, settings, k, build_tokenizer().backend_tokenizer, **given)  # type: ignore[arg-type]


def kept(folder: Path) -> list[KeptRollout]:
    reader = RolloutReader(folder)
    return [reader.kept(each.id) for each in reader.search(Search(limit=500, descending=False)).rollouts]


def keep(folder: Path, steps: Sequence[Trained], settings: SampleSettings = ALL) -> None:
    with closing(recorder(folder, settings)) as keeping:
        for step in steps:
            keeping.keep(step, 1.0)


def members_of(groups: Sequence[Group[Trajectory]]) -> list[Trajectory]:
    return [member.payload for group in groups for member in group.members]


def test_tokens_have_the_logprobs_and_advantages_that_the_step_began_with(
    model: Qwen3ForCausalLM, tmp_path: Path
) -> None:
    settings = RunSettings(k=2, trainer=TrainerSettings(minibatches_per_batch=2, micro_batch_tokens=150))
    roles, groups = roles_of(model, settings), random_groups(3, groups=4, size=4, version=9)
    expected = roles.learner.logprobs(micro_batch(to_measure(members_of(groups[:2])))).numpy()
    trained = train_batch(roles, settings, groups, 2)
    keep(tmp_path, trained)
    read = kept(tmp_path)
    assert [one.trajectory for one in read] == members_of(groups)
    assert [(one.step, one.version) for one in read] == [(10, 9)] * 8 + [(11, 10)] * 8
    computed, left_out, at = 0, 0, 0
    for step in trained:
        by_entry = [step.credits.get(entry) for entry in step.batch.entries]
        for one, credit in zip(read[at : at + 8], by_entry, strict=True):
            for number, segment in enumerate(one.trajectory.segments):
                tokens = segment_tokens(one, number)
                assert credit is not None
                assert (tokens.advantage[tokens.sampled == 1] == credit.advantages[number][tokens.sampled == 1]).all()
                told = tokens.current[tokens.sampled == 1]
                if step is trained[0]:
                    own, expected = expected[: len(told)], expected[len(told) :]
                    if np.isnan(told).all():
                        assert not tokens.trained.any() or not np.nan_to_num(tokens.advantage).any()
                    else:
                        np.testing.assert_allclose(told, own, atol=2e-5)
                computed += not np.isnan(told).any()
                left_out += np.isnan(told).all()
                assert np.isnan(told).all() == np.isnan(told).any()
                assert len(segment.version_spans) > 0
        at += 8
    assert computed > 20 and left_out > 0, "segments without a gradient have none"


def test_a_step_is_kept_once_and_an_epoch_keeps_nothing_again(model: Qwen3ForCausalLM, tmp_path: Path) -> None:
    settings = RunSettings(k=9, trainer=TrainerSettings(epochs_per_batch=2))
    steps = train_batch(roles_of(model, settings), settings, random_groups(4, groups=2, size=4, version=9), 2)
    keep(tmp_path, steps)
    keep(tmp_path, steps)
    assert [one.step for one in kept(tmp_path)] == [10] * 8


def test_whole_groups_are_kept_as_far_as_the_share_of_a_core_goes(model: Qwen3ForCausalLM, tmp_path: Path) -> None:
    settings = RunSettings(k=9)
    roles, groups = roles_of(model, settings), random_groups(5, groups=4, size=4, version=9)
    steps = [step for _ in range(30) for step in train_batch(roles, settings, groups, 1)]
    clock, reader = count(), RolloutReader(tmp_path)

    def spent() -> float:
        """10 ms for each group that is there."""
        extent = reader.extent()
        return 0.0 if extent is None else extent.rollouts / 4 * 0.01

    with closing(recorder(tmp_path, SampleSettings(), clock=lambda: float(next(clock)), spent=spent)) as keeping:
        for step in steps:
            keeping.keep(step, 1.0)
    found = kept(tmp_path)
    by_step = {number: [one for one in found if one.step == number] for number in {one.step for one in found}}
    assert all(len(members) % 4 == 0 for members in by_step.values()), "whole groups"
    # Of 5 ms a second, which a step takes.
    assert 12 <= len(found) / 4 <= 18
    share = tmp_path / "share"
    keep(share, steps[:4], SampleSettings(share=0.25, cpu_share=1.0))
    assert [one.step for one in kept(share)] == [10 + step for step in range(4) for _ in range(4)]


def test_training_goes_on_where_the_disk_is_full(model: Qwen3ForCausalLM, tmp_path: Path) -> None:
    settings = RunSettings(k=9)
    roles, groups = roles_of(model, settings), random_groups(6, groups=2, size=4, version=9)
    first, second = (step for _ in range(2) for step in train_batch(roles, settings, groups, 1))
    with closing(recorder(tmp_path)) as keeping:
        connection: sqlite3.Connection = keeping._writer._connection
        connection.execute("PRAGMA max_page_count = 1")
        keeping.keep(first, 1.0)
        connection.execute("PRAGMA max_page_count = 1000000")
        keeping.keep(second, 1.0)
    assert {one.step for one in kept(tmp_path)} == {11}


def test_a_run_does_without_where_rollouts_cannot_be_kept(tmp_path: Path) -> None:
    tokenizer = build_tokenizer().backend_tokenizer
    assert open_recorder(tmp_path / "none", SampleSettings(share=0.0), 2, tokenizer) is None
    assert not (tmp_path / "none").exists()
    (tmp_path / "file").write_text("no folder")
    assert open_recorder(tmp_path / "file", ALL, 2, tokenizer) is None
    made = open_recorder(tmp_path / "made", ALL, 2, tokenizer)
    assert made is not None
    made.close()


def test_samples_read_as_the_tokenizer_decodes_them(model: Qwen3ForCausalLM, tmp_path: Path) -> None:
    settings, tokenizer = RunSettings(k=9), build_tokenizer().backend_tokenizer
    groups = random_groups(7, groups=1, size=4, version=9)
    keep(tmp_path, train_batch(roles_of(model, settings), settings, groups, 1))
    for sample, one in zip(samples_of_step(RolloutReader(tmp_path), 10, 4), members_of(groups), strict=True):
        texts = [unpack_tokens(segment.token_ids).tolist() for segment in one.segments]
        assert [each.text for each in sample.segments] == [
            tokenizer.decode(ids, skip_special_tokens=False) for ids in texts
        ]
    (found,) = RolloutReader(tmp_path).search(Search(limit=1, descending=False)).rollouts
    first = members_of(groups)[0].segments[0]
    begins = first.version_spans[0].start
    prompt = tokenizer.decode(unpack_tokens(first.token_ids).tolist()[:begins], skip_special_tokens=False)
    assert found.prompt == prompt


def test_nothing_is_kept_of_a_learner_that_nobody_asked(model: Qwen3ForCausalLM) -> None:
    settings = RunSettings(k=9)
    roles = roles_of(model, settings, keeps=False)
    (step,) = train_batch(roles, settings, random_groups(8, groups=2, size=4, version=9), 1)
    assert step.logprobs == step.sources == [] and VOCABULARY == 60


def tokenizers() -> Iterator[tuple[Tokenizer, str]]:
    text = "a<b é 漢🙂\n  the weather\t\x00end"
    yield build_chat_tokenizer().backend_tokenizer, text + "<|im_end|><tool_call>"
    fallback = Tokenizer(
        models.BPE(
            {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "t": 257, "h": 258, "th": 259, "▁th": 260},
            [("t", "h"), ("▁", "th")],
            byte_fallback=True,
            unk_token=None,
        )
    )
    fallback.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    fallback.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    yield fallback, text


@pytest.mark.parametrize(("tokenizer", "text"), [*tokenizers()], ids=["byte level", "byte fallback"])
def test_pieces_of_tokens_make_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)
    pieces = Pieces(tokenizer).of(ids.tolist())
    assert "".join(texts_of(ids, pieces)) == text == tokenizer.decode(ids.tolist(), skip_special_tokens=False)
    assert Pieces(tokenizer).of([10**6]) == {10**6: b""}

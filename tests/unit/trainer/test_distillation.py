"""On-policy distillation: the teacher's term by its formula, alone and beside a reward, told and carried to the loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.config.settings import RunSettings, TrainerSettings
from services.config.training.algorithm import AdvantageSettings, DistillationSettings
from services.config.training.teacher import TeacherSettings
from services.policies.training.health import signs
from services.wire.errors import UsageError
from services.wire.packed import unpack_logprobs
from tests.support.examples import examples
from tests.support.one_token_task import play
from tests.support.step_lines import step_metrics
from tests.support.teacher_stand_in import taught
from tests.support.trajectories import grouped, random_trajectories
from trainer.algorithms.advantages.batch import Float64Array
from trainer.algorithms.advantages.compute import AdvantageComputer
from trainer.algorithms.advantages.opd import teacher_term
from trainer.algorithms.advantages.rewards import Batch
from trainer.algorithms.describe import describe
from trainer.checkpoint.recovery import fingerprint
from trainer.model.roles import make_roles
from trainer.model.train_batch import prepare, train_batch
from trainer.sft.tiny_model import build_model

logprob = st.floats(-30.0, 0.0)
HERE = TeacherSettings(url="http://127.0.0.1:1")


@examples(100)
@given(
    st.lists(st.lists(st.tuples(logprob, logprob), min_size=0, max_size=5), min_size=1, max_size=4),
    st.floats(0.01, 3.0),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_the_term_is_its_formula(
    trajectories: list[list[tuple[float, float]]], coefficient: float, discount: float
) -> None:
    settings = DistillationSettings(distil=coefficient, distil_discount=discount)
    expected = []
    for one in trajectories:
        gaps = [min(20.0, max(-20.0, sampled - told)) for sampled, told in one]
        for place in range(len(gaps)):
            later = sum(discount ** (at - place) * gap for at, gap in enumerate(gaps) if at >= place)
            expected.append(-coefficient * later)
    flat = np.array([pair for one in trajectories for pair in one]).reshape(-1, 2)
    lengths = np.array([len(one) for one in trajectories])
    assert teacher_term(flat[:, 0], flat[:, 1], lengths, settings).tolist() == pytest.approx(expected, abs=1e-9)


def of_some_teacher(batch: Batch) -> Float64Array:
    return -0.25 * np.arange(1, 1 + int(batch.lengths.sum()), dtype=np.float64)


def gaps_of(batch: Batch) -> Float64Array:
    sampled: Float64Array = batch.segments.logprobs[batch.segments.places].astype(np.float64)
    return sampled - of_some_teacher(batch)


def test_opd_reads_the_teacher_and_no_reward() -> None:
    groups = grouped(random_trajectories(2, groups=2, size=3))
    credits, _ = AdvantageComputer(AdvantageSettings(estimator="opd"), teacher=of_some_teacher).of(groups)
    assert credits.by_token.advantages.tolist() == pytest.approx((-gaps_of(credits.batch)).tolist(), rel=1e-6)
    assert credits.by_token.teacher is not None
    assert credits.by_token.teacher.tolist() == of_some_teacher(credits.batch).tolist()
    with pytest.raises(UsageError, match="estimator=opd needs a teacher"):
        AdvantageComputer(AdvantageSettings(estimator="opd"))


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_pp"])
def test_beside_a_reward_it_is_added_after_all_normalisation(estimator: str) -> None:
    groups = grouped(random_trajectories(2, groups=2, size=3))
    alone, _ = AdvantageComputer(AdvantageSettings(estimator=estimator)).of(groups)
    choice = AdvantageSettings(estimator=estimator, distil=0.125)
    both, _ = AdvantageComputer(choice, teacher=of_some_teacher).of(groups)
    expected = alone.by_token.advantages - 0.125 * gaps_of(both.batch)
    assert both.by_token.advantages.tolist() == pytest.approx(expected.tolist(), rel=1e-5, abs=1e-5)
    assert AdvantageComputer(choice, teacher=of_some_teacher).independent, "a batch may be packed ahead"


@pytest.mark.parametrize(
    ("choices", "parts"),
    [
        ({"estimator": "opd"}, ["A = −1·(log π_beh − log π_T), ", "π_T = the teacher, at temperature 1"]),
        ({"estimator": "opd", "distil": 0.5, "distil_discount": 0.9}, ["A = −0.5·Σ_u≥t 0.9^(u−t)·(log π_beh"]),
        ({"distil": 0.25}, ["A = [(R − mean)/(std + 1e-4) over the group] − 0.25·(log π_beh − log π_T), "]),
    ],
)
def test_the_formula_tells_it(choices: dict[str, Any], parts: list[str]) -> None:
    formula = describe(TrainerSettings(advantage=AdvantageSettings.model_validate(choices), teacher=HERE))
    assert all(part in formula for part in parts), formula


@pytest.mark.parametrize(
    ("choices", "complaint"),
    [
        ({"advantage": {"estimator": "opd"}}, "estimator=opd reads a teacher's logprobs, and there is no teacher"),
        ({"advantage": {"distil": 0.5}}, r"distil=0\.5 reads a teacher's logprobs, and there is no teacher"),
        (
            {"teacher": {"url": "http://t"}},
            r"teacher\.url=http://t would have no effect under advantage\.estimator=grpo",
        ),
        ({"teacher": {"model": "big"}}, r"teacher\.model=big would have no effect"),
        (
            {"advantage": {"estimator": "opd"}, "teacher": {"model": "big", "key_file": "k"}},
            r"key_file=k would have no effect under no teacher\.url",
        ),
        ({"advantage": {"distil_discount": 0.5}}, r"distil_discount=0\.5 would have no effect"),
        *(
            ({"advantage": {"estimator": "opd", **read}, "teacher": {"url": "http://t"}}, complaint)
            for read, complaint in (
                ({"kl": 0.1}, r"advantage\.kl=0\.1 would have no effect under .*opd, which reads no rewards"),
                ({"overlong_length": 9}, "overlong_length=9 would have no effect"),
                ({"cost": {"component": "harm"}}, r"cost\.component=harm would have no effect"),
                ({"keep": "best"}, "keep=best would have no effect"),
                ({"dynamic_sampling": True}, "dynamic_sampling=True would have no effect"),
            )
        ),
    ],
)
def test_what_would_have_no_effect_or_cannot_be_is_refused(choices: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        describe(TrainerSettings.model_validate(choices))


def test_where_it_is_asked_changes_no_bytes_and_which_one_it_is_does() -> None:
    def named(**teacher: Any) -> str:
        return fingerprint(RunSettings(trainer=TrainerSettings(teacher=TeacherSettings(**teacher))))

    assert named() == named(url="http://a") == named(url="http://b", timeout_s=3.0, at_once=1)
    assert named() != named(model="big") != named(model="bigger")


def test_equal_rewards_are_no_sign_where_a_teacher_gives_the_signal() -> None:
    lines = [step_metrics(step, equal_groups=1.0, success=0.1) for step in (1, 2)]
    assert "no_signal" in signs(lines[0], lines[1], 1.0)
    taught_lines = [step_metrics(step, equal_groups=1.0, success=0.1, teacher_kl=0.5) for step in (1, 2)]
    assert "no_signal" not in signs(taught_lines[0], taught_lines[1], 1.0)


def test_the_teachers_divergence_is_of_the_fresh_tokens() -> None:
    settings = RunSettings(k=1, trainer=TrainerSettings(advantage=AdvantageSettings(estimator="opd"), teacher=HERE))
    roles = make_roles(lambda: build_model(seed=1, hidden_size=32, layers=1), settings, 4, of_some_teacher)
    fresh, old = (random_trajectories(seed, groups=1, size=3, version=version) for seed, version in ((2, 3), (3, 2)))
    groups = grouped([*fresh, *old])
    (trained,) = train_batch(roles, settings, groups, 1)
    batch = Batch.of(groups)
    of_fresh = int(batch.lengths[:3].sum())
    assert trained.statistics.teacher_kl == pytest.approx(float(gaps_of(batch)[:of_fresh].mean()), rel=1e-5)
    assert trained.tally.fresh == of_fresh


def test_a_loss_reads_the_teachers_logprobs_beside_those_of_its_tokens() -> None:
    settings = RunSettings(k=9, trainer=TrainerSettings(advantage=AdvantageSettings(distil=0.5), teacher=HERE))
    roles = make_roles(lambda: build_model(seed=1, hidden_size=32, layers=1), settings, 0, of_some_teacher)
    groups = grouped(random_trajectories(2, groups=2, size=3))
    (step,) = prepare(roles, settings, groups, 1, 0).steps
    told = of_some_teacher(step.part)
    sampled = unpack_logprobs(
        b"".join(segment.logprobs for member in step.part.trajectories for segment in member.segments)
    )
    by_logprob = dict(zip(sampled[step.part.segments.places].tolist(), told.tolist(), strict=True))
    for micro in step.packed.micro_batches:
        assert micro.teacher is not None
        assert micro.teacher.tolist() == [by_logprob[value] for value in micro.behaviour[micro.chosen].tolist()]


def test_a_policy_learns_a_teachers_answers_without_any_reward() -> None:
    teacher = build_model(seed=9, hidden_size=64, layers=1).eval()
    with torch.no_grad():
        teacher.lm_head.weight[2:12] += 0.8 * teacher.lm_head.weight.std()
    settings = RunSettings(
        trainer=TrainerSettings(learning_rate=5e-3, advantage=AdvantageSettings(estimator="opd"), teacher=HERE)
    )
    roles = make_roles(
        lambda: build_model(seed=1, hidden_size=32, layers=1), settings, 0, lambda batch: taught(teacher, batch)
    )
    generator = torch.Generator().manual_seed(1)
    found = []
    for step in range(40):
        rollouts = play(roles.learner.model, step, roles.learner.version, generator)
        (trained,) = train_batch(roles, settings, grouped(rollouts), 1)
        found.append(trained.statistics.teacher_kl or 0.0)
    assert np.mean(found[-5:]) < 0.5 * np.mean(found[:5])

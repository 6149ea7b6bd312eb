"""What VAPO adds (arXiv:2504.05118), each by its formula: decoupled and length-adaptive λ, a critic that learns first, and
the language-model loss on right answers."""

from __future__ import annotations

import copy
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.config.load import load_settings
from services.config.settings import RunSettings, TrainerSettings
from services.config.training.algorithm import AdvantageSettings, CriticSettings
from services.config.training.optimizer import ScheduleSettings
from services.wire.errors import UsageError
from tests.support.examples import examples
from tests.support.trajectories import grouped, random_trajectories
from trainer.algorithms.advantages.batch import RewardBatch
from trainer.algorithms.advantages.gae import gae
from trainer.algorithms.describe import describe
from trainer.model.roles import Roles, make_roles
from trainer.model.train_batch import prepare, train_batch
from trainer.sft.tiny_model import build_model

number = st.floats(-3.0, 3.0)
tokens = st.lists(st.tuples(number, number), min_size=1, max_size=6)


def batch_of(trajectories: list[list[tuple[float, float]]]) -> RewardBatch:
    lengths = [len(one) for one in trajectories]
    flat = np.array([pair for one in trajectories for pair in one])
    owner = np.repeat(np.arange(len(lengths)), lengths)
    outcomes = np.array([sum(reward for reward, _ in one) for one in trajectories])
    everyone = np.ones(len(lengths), dtype=np.bool_)
    return RewardBatch(
        outcomes, flat[:, 0], owner, np.zeros(len(lengths), dtype=np.int64), everyone, ~everyone, flat[:, 1]
    )


def summed(one: list[tuple[float, float]], discount: float, trace: float) -> list[float]:
    """Σ_l (γλ)^l δ_{t+l} at each token, written out."""
    values = [value for _, value in one] + [0.0]
    errors = [reward + discount * values[place + 1] - values[place] for place, (reward, _) in enumerate(one)]
    return [
        sum((discount * trace) ** (at - place) * error for at, error in enumerate(errors) if at >= place)
        for place in range(len(one))
    ]


@examples(100)
@given(st.lists(tokens, min_size=1, max_size=4), st.floats(0.05, 2.0), st.sampled_from([0.0, 0.5, 1.0]))
def test_each_trajectory_has_the_trace_of_its_length_and_the_critic_its_own(
    trajectories: list[list[tuple[float, float]]], alpha: float, of_critic: float
) -> None:
    settings = AdvantageSettings(
        estimator="gae", whiten=False, discount=0.9, trace_alpha=alpha, critic=CriticSettings(trace=of_critic)
    )
    found = gae(batch_of(trajectories), settings)
    advantages, returns = [], []
    for one in trajectories:
        advantages += summed(one, 0.9, max(0.0, 1.0 - 1.0 / (alpha * len(one))))
        goals = summed(one, 0.9, of_critic)
        returns += [goal + value for goal, (_, value) in zip(goals, one, strict=True)]
    assert found.advantages.tolist() == pytest.approx(advantages, abs=1e-9)
    assert found.returns is not None
    assert found.returns.tolist() == pytest.approx(returns, abs=1e-9)


def test_a_critics_trace_of_one_learns_what_was_earned() -> None:
    settings = AdvantageSettings(estimator="gae", whiten=False, critic=CriticSettings(trace=1.0))
    found = gae(batch_of([[(0.0, 0.3), (0.0, -0.2), (1.0, 0.7)]]), settings)
    assert found.returns is not None
    assert found.returns.tolist() == pytest.approx([1.0, 1.0, 1.0])


def roles_of(**choices: Any) -> tuple[Roles, RunSettings]:
    settings = RunSettings(k=99, steps=20, trainer=TrainerSettings.model_validate(choices))
    return make_roles(lambda: build_model(seed=4, hidden_size=32, layers=1), settings, 0), settings


def weights_of(roles: Roles) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in roles.learner.weights().items()}


def equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(left[name], right[name]) for name in left)


def test_the_critic_learns_alone_and_then_the_policy_as_if_it_began_there() -> None:
    advantage = {"estimator": "gae", "critic": {"pretrain_steps": 2}}
    schedule = {"schedule": ScheduleSettings(kind="linear").model_dump(), "warmup_steps": 2}
    roles, settings = roles_of(advantage=advantage, **schedule)
    assert roles.critic is not None
    first, critic = weights_of(roles), copy.deepcopy(roles.critic.model.state_dict())
    for step in range(2):
        (trained,) = train_batch(roles, settings, grouped(random_trajectories(step, groups=2, size=3, version=step)), 1)
        assert (trained.version, trained.learning_rate, trained.statistics.grad_norm) == (step + 1, 0.0, 0.0)
        assert trained.statistics.logprob_gap_mean is not None, "the policy is measured all the same"
        assert equal(weights_of(roles), first)
    assert not equal(roles.critic.model.state_dict(), critic)
    assert not roles.learner.optimizer.state, "moments begin with the policy's own first step"
    (third,) = train_batch(roles, settings, grouped(random_trajectories(2, groups=2, size=3)), 1)
    assert not equal(weights_of(roles), first)
    # Warm-up and decay are of the steps behind.
    rates = settings.trainer.schedule.of_run(2, settings.steps - 2)
    assert third.learning_rate == settings.trainer.learning_rate * rates.factor(0)


def test_the_loss_on_right_answers_is_their_mean_negative_logprob() -> None:
    groups = grouped(random_trajectories(5, groups=2, size=4))
    right = [one.payload.reward > 0 for group in groups for one in group.members]
    assert 0 < sum(right) < len(right)
    found = {}
    for mu in (0.0, 0.5):
        # Passes of few tokens: each has its share.
        roles, settings = roles_of(loss={"positive": mu}, micro_batch_tokens=24)
        (step,) = prepare(roles, settings, groups, 1, 0).steps
        assert len(step.packed.micro_batches) > 1
        found[mu] = roles.learner.gradient(step.packed, roles.learner.proximals([step.packed])[0]).loss or 0.0
    model = build_model(seed=4, hidden_size=32, layers=1)
    said = []
    for member in (one for group in groups for one in group.members):
        (segment,) = member.payload.segments
        ids = torch.tensor(np.frombuffer(segment.token_ids, dtype="<i4").tolist())
        with torch.inference_mode():
            logprobs = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        if member.payload.reward > 0:
            said += [float(logprobs[place - 1, ids[place]]) for place in range(len(ids)) if segment.loss_mask[place]]
    assert found[0.5] - found[0.0] == pytest.approx(-0.5 * float(np.mean(said)), rel=1e-4)


def test_answers_with_a_signal_in_neither_are_still_learnt_from() -> None:
    """Siblings that are all right have no advantage, and are examples."""
    equal_ones = [
        msgspec.structs.replace(one, reward=1.0, reward_components={})
        for one in random_trajectories(5, groups=1, size=2)
    ]
    groups = grouped(equal_ones)
    with_examples, settings = roles_of(loss={"positive": 0.5})
    without, plain = roles_of()
    assert train_batch(with_examples, settings, groups, 1)[0].rows == 2
    assert train_batch(without, plain, groups, 1)[0].rows == 0


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["loss.positive=0.1"], ["− (0.1/N⁺) Σ⁺ log π;", "N⁺ fresh tokens of answers whose success is at least ½"]),
        (
            ["advantage.estimator=gae", "advantage.trace_alpha=0.05", "advantage.whiten=false"],
            ["A = Σ_l (1·λ)^l·(r + 1·V_next − V) with λ = max(0, 1 − 1/(0.05·|y|))"],
        ),
        (
            ["advantage.estimator=gae", "advantage.critic.trace=1", "advantage.critic.pretrain_steps=7"],
            ["A_V = V_old + Σ_l (1·1)^l·(r + 1·V_next − V)", "in the first 7 steps the critic learns alone"],
        ),
    ],
)
def test_the_formula_tells_it(overrides: list[str], parts: list[str]) -> None:
    formula = describe(load_settings(None, [f"trainer.{each}" for each in overrides]).trainer)
    assert all(part in formula for part in parts), formula


@pytest.mark.parametrize(
    ("choices", "complaint"),
    [
        ({"trace_alpha": 0.05}, r"trace_alpha=0\.05 would have no effect under advantage\.estimator=grpo"),
        ({"critic": {"trace": 1.0}}, r"critic\.trace=1\.0 would have no effect"),
        ({"critic": {"pretrain_steps": 5}}, r"critic\.pretrain_steps=5 would have no effect"),
        (
            {"estimator": "gae", "trace": 0.5, "trace_alpha": 0.05},
            r"trace=0\.5 would have no effect under .*trace_alpha",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(choices: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        describe(TrainerSettings(advantage=AdvantageSettings.model_validate(choices)))


def test_a_policy_that_would_never_learn_is_refused() -> None:
    chosen = ["steps=9", "trainer.advantage.estimator=gae", "trainer.advantage.critic.pretrain_steps=9"]
    with pytest.raises(UsageError, match="pretrain_steps=9 leaves the policy no step of steps=9"):
        load_settings(None, chosen)

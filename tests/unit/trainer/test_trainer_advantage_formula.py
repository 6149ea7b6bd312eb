"""The advantage in force is told in words; what would have no effect is refused; one's own is a function and its entry."""

from __future__ import annotations

from typing import Any

import pytest

from services.config.settings import TrainerSettings
from services.config.training.algorithm import AdvantageSettings
from services.wire.errors import UsageError
from trainer.algorithms.advantages.registry import ADVANTAGES, find_estimator, load_estimator
from trainer.algorithms.describe import describe, describe_advantage


def choose(**choices: Any) -> AdvantageSettings:
    return AdvantageSettings.model_validate(choices)


@pytest.mark.parametrize(
    ("choices", "complaint"),
    [
        ({"estimator": "rloo", "std": False}, "std=False would have no effect"),
        ({"discount": 0.9}, "discount=0.9 would have no effect"),
        ({"estimator": "reinforce_pp", "trace": 0.5}, "trace=0.5 would have no effect"),
        ({"estimator": "reinforce_pp_baseline", "discount": 0.9}, "discount=0.9 would have no effect"),
        ({"whiten": False}, "whiten=False would have no effect"),
        ({"critic": {"learning_rate": 0.1}}, "critic.learning_rate=0.1 would have no effect"),
        ({"estimator": "remax", "critic": {"clip": 0.1}}, "critic.clip=0.1 would have no effect"),
        ({"kl_estimator": "k3"}, "kl_estimator=k3 would have no effect"),
        ({"overlong_buffer": 4}, "overlong_buffer=4 would have no effect"),
        ({"overlong_length": 4, "overlong_buffer": 5}, "is more than overlong_length=4"),
        ({"estimator": "reinforce_pp", "dynamic_sampling": True}, "dynamic_sampling=True would have no effect"),
        ({"estimator": "gae", "dynamic_sampling": True}, "dynamic_sampling=True would have no effect"),
        ({"dynamic_sampling_most": 3}, "dynamic_sampling_most=3 would have no effect"),
        ({"cost": {"limit": 1.0}}, "cost.limit=1.0 would have no effect"),
        ({"cost": {"component": "harm", "price": 9.0}}, "lies above largest"),
        ({"estimator": "rlo"}, "did you mean 'rloo'"),
        ({"estimator": "no_such_module:own"}, "cannot be imported"),
        ({"estimator": "math:sqrt"}, "has no `entry`"),
    ],
)
def test_choices_without_effect_are_refused(choices: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint):
        describe_advantage(choose(**choices))


@pytest.mark.parametrize(
    ("choices", "parts"),
    [
        ({}, ["A = (R − mean)/(std + 1e-4) over the group"]),
        ({"std": False}, ["A = R − mean over the group"]),
        ({"estimator": "rloo"}, ["A = R − mean over the other siblings"]),
        ({"estimator": "remax", "keep": "best_worst"}, ["R of the greedy sibling", "the best and the worst"]),
        ({"estimator": "reinforce_pp", "discount": 0.9}, ["over the batch's tokens with x = Σ_u≥t 0.9^(u−t)·r_u"]),
        (
            {"estimator": "gae", "trace": 0.5, "critic": {"clip": 0.3}},
            ["with x = Σ_l (1·0.5)^l·(r + 1·V_next − V)", "clip(V, V_old ± 0.3)"],
        ),
        ({"estimator": "gae", "whiten": False}, ["A = Σ_l (1·0.95)^l"]),
        ({"kl": 0.1, "kl_estimator": "k2"}, ["R = reward − 0.1·Σ k2(π_beh, π_ref)"]),
        ({"overlong_length": 20, "overlong_buffer": 5}, ["R = reward + clip((15 − |y|)/5, −1, 0)"]),
        (
            {"cost": {"component": "harm", "limit": 0.5}, "overlong_length": 9},
            ["R = (reward + clip((8 − |y|)/1, −1, 0) − λ·harm)/(1 + λ)", "ln λ += 0.1·λ·(mean harm − 0.5)"],
        ),
        ({"dynamic_sampling": True, "dynamic_sampling_most": 5}, ["dropped and made up for, at most 5 a batch"]),
    ],
)
def test_the_formula_in_force_names_each_choice(choices: dict[str, Any], parts: list[str]) -> None:
    formula = describe_advantage(choose(**choices))
    for part in parts:
        assert part in formula
    assert formula in describe(TrainerSettings(advantage=choose(**choices), minibatches_per_batch=2))


def test_a_bound_on_values_needs_a_second_step_to_bind() -> None:
    bounded = choose(estimator="gae", critic={"clip": 0.1})
    with pytest.raises(UsageError, match="would have no effect with one optimizer step a batch"):
        describe(TrainerSettings(advantage=bounded))
    assert "V_old ± 0.1" in describe(TrainerSettings(advantage=bounded, minibatches_per_batch=2))


@pytest.mark.parametrize("name", ADVANTAGES)
def test_every_listed_estimator_is_there_and_described(name: str) -> None:
    assert callable(load_estimator(name))
    assert "{" not in describe_advantage(choose(estimator=name))
    assert find_estimator(name).critic == (name == "gae")

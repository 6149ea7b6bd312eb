"""A step that cannot be made changes nothing: numbers that are not finite, memory that runs out."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from services.config.settings import RunSettings, TrainerSettings
from services.config.training.algorithm import AdvantageSettings, CriticSettings, LossSettings
from services.policies.batching import Group
from services.wire.trajectory import Trajectory
from tests.support.fragile_loss import NAME, NOT_FINITE, marked
from tests.support.trajectories import grouped, random_trajectories
from trainer.algorithms.advantages.compute import AdvantageComputer
from trainer.model.anomaly import AnomalyError, is_out_of_memory
from trainer.model.learner import Learner
from trainer.model.roles import Roles, make_roles
from trainer.model.train_batch import train_batch, try_batch
from trainer.sft.tiny_model import build_model

FRAGILE = RunSettings(k=9, trainer=TrainerSettings(loss=LossSettings(policy=NAME), warmup_steps=0))


class Cramped(Qwen3ForCausalLM):
    """Has memory for so many tokens a pass."""

    room = 10**9

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model.register_forward_pre_hook(self._check, with_kwargs=True)

    def _check(self, _: Any, __: Any, named: dict[str, Any]) -> None:
        if named["input_ids"].numel() > self.room:
            raise torch.OutOfMemoryError(f"{named['input_ids'].numel()} tokens")


@pytest.fixture(scope="module")
def fresh_model() -> Qwen3ForCausalLM:
    return build_model(seed=5, hidden_size=32, layers=1)


def roles_of(model: Qwen3ForCausalLM, settings: RunSettings) -> Roles:
    return Roles(Learner(copy.deepcopy(model), settings.trainer), AdvantageComputer(AdvantageSettings()))


def a_batch(seed: int, groups: int = 2) -> list[Group[Trajectory]]:
    return grouped(random_trajectories(seed, groups=groups, size=3, first_ordinal=seed * groups))


def bad(batch: list[Group[Trajectory]]) -> list[Group[Trajectory]]:
    return grouped(marked([member.payload for group in batch for member in group.members], NOT_FINITE))


def state(roles: Roles) -> list[torch.Tensor]:
    """All that a step may change."""
    return [
        each.clone()
        for model, optimizer in roles.models().values()
        for each in (
            *model.state_dict().values(),
            *(value for values in optimizer.state.values() for value in values.values()),
        )
    ]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_step_that_is_not_finite_is_not_made(fresh_model: Qwen3ForCausalLM) -> None:
    roles, other = roles_of(fresh_model, FRAGILE), roles_of(fresh_model, FRAGILE)
    for each in (roles, other):
        train_batch(each, FRAGILE, a_batch(1), 1)
    before = state(roles)
    with pytest.raises(AnomalyError, match=r"step 2 is not made: the loss of the policy is nan.*on_anomaly=skip"):
        train_batch(roles, FRAGILE, bad(a_batch(2)), 1)
    assert (roles.learner.version, same(before, state(roles))) == (1, True)
    assert try_batch(roles, FRAGILE, bad(a_batch(2)), 1).anomaly is not None
    for each in (roles, other):
        train_batch(each, FRAGILE, a_batch(3), 1)
    assert same(state(roles), state(other)), "nothing of it is left in a gradient"


def test_weights_that_are_not_finite_make_no_step_either(fresh_model: Qwen3ForCausalLM) -> None:
    roles = roles_of(fresh_model, RunSettings())
    with torch.no_grad():
        roles.learner.model.lm_head.weight[3, 3] = torch.inf
    tried = try_batch(roles, RunSettings(), a_batch(1), 1)
    assert (tried.steps, roles.learner.version) == ([], 0) and tried.anomaly is not None
    assert all(
        torch.isfinite(weight).all() for name, weight in roles.learner.weights().items() if "lm_head" not in name
    )


def test_the_steps_before_one_that_is_not_finite_are_made_and_can_be_made_again(fresh_model: Qwen3ForCausalLM) -> None:
    groups = [*a_batch(1), *bad(a_batch(2)), *a_batch(3)]
    roles, again = roles_of(fresh_model, FRAGILE), roles_of(fresh_model, FRAGILE)
    tried = try_batch(roles, FRAGILE, groups, 3)
    assert ([step.version for step in tried.steps], roles.learner.version) == ([1], 1)
    assert tried.anomaly is not None
    assert [step.version for step in train_batch(again, FRAGILE, groups, 3, made=1)] == [1]
    assert same(state(roles), state(again))


def test_a_critic_that_is_not_finite_keeps_the_policy_from_its_step_too() -> None:
    advantage = AdvantageSettings(estimator="gae", critic=CriticSettings(clip=float("inf")))
    settings = RunSettings(k=9, trainer=TrainerSettings(advantage=advantage, warmup_steps=0))
    roles = make_roles(lambda: build_model(seed=5, hidden_size=32, layers=1), settings, 0)
    assert roles.critic is not None
    with torch.no_grad():
        roles.critic.model.head.bias.fill_(1e30)
    before = state(roles)
    tried = try_batch(roles, settings, a_batch(1), 1)
    assert tried.anomaly is not None and "the loss of the critic is inf" in str(tried.anomaly)
    assert (roles.learner.version, same(before, state(roles))) == (0, True)


def test_an_allocator_that_gives_up_is_known_from_a_mistake() -> None:
    for mistake in (lambda: torch.empty(1 << 60, dtype=torch.uint8), lambda: np.empty(1 << 60, dtype=np.uint8)):
        with pytest.raises((RuntimeError, MemoryError)) as raised:
            mistake()
        assert is_out_of_memory(raised.value)
    with pytest.raises(RuntimeError) as raised_too:
        torch.zeros(2) + torch.zeros(3)
    assert not is_out_of_memory(raised_too.value)


def test_where_memory_runs_out_smaller_passes_make_the_step() -> None:
    settings = RunSettings(k=9, trainer=TrainerSettings(warmup_steps=0))
    base = build_model(seed=5, hidden_size=32, layers=1)
    roles, other = roles_of(Cramped(base.config), settings), roles_of(Cramped(base.config), settings)
    for each in (roles, other):
        each.learner.model.load_state_dict(base.state_dict())
    assert isinstance(roles.learner.model, Cramped)
    roles.learner.model.room = 20
    tried = try_batch(roles, settings, a_batch(4), 1)
    assert len(tried.steps) == 1 and tried.micro_batch_tokens <= 20
    fitting = settings.trainer.model_copy(update={"micro_batch_tokens": tried.micro_batch_tokens})
    train_batch(other, settings.model_copy(update={"trainer": fitting}), a_batch(4), 1)
    assert same(state(roles), state(other)), "the log tells the passes, so that a repetition has the same bytes"

    roles.learner.model.room = 3
    with pytest.raises(torch.OutOfMemoryError):
        try_batch(roles, settings, a_batch(5), 1)
    assert roles.learner.version == 1

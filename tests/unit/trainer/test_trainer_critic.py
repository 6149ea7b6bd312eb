"""The critic: its loss as published, gradients by differences, values where they belong, the same bytes after a restart."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.config.settings import RunSettings, TrainerSettings
from services.config.training.algorithm import AdvantageSettings, CostSettings, CriticSettings
from services.wire.trajectory import Trajectory
from tests.support.examples import examples
from tests.support.trajectories import a_rollout, a_segment, grouped, random_trajectories
from trainer.checkpoint import checkpoint
from trainer.data.packing import PackedBatch, pack
from trainer.data.rows import rows_of
from trainer.model.critic import Critic, ValueModel, value_loss
from trainer.model.roles import Roles, make_roles
from trainer.sft.tiny_model import build_model

number = st.floats(-3.0, 3.0)


@examples(200)
@given(st.lists(st.tuples(number, number, number), min_size=1, max_size=8), st.floats(0.05, 1.0))
def test_the_loss_of_values_is_its_formula_and_so_is_its_slope(
    tokens: list[tuple[float, float, float]], clip: float
) -> None:
    values, before, returns = (torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True))

    def one(value: float, old: float, goal: float) -> float:
        bounded = min(max(value, old - clip), old + clip)
        return 0.5 * max((value - goal) ** 2, (bounded - goal) ** 2)

    expected = [one(*token) for token in tokens]
    assert value_loss(values, before, returns, clip).tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    moving = values.clone().requires_grad_()
    value_loss(moving, before, returns, clip).sum().backward()  # type: ignore[no-untyped-call]
    assert moving.grad is not None
    for slope, (value, old, goal) in zip(moving.grad.tolist(), tokens, strict=True):
        bounded = min(max(value, old - clip), old + clip)
        corners = (abs(abs(value - old) - clip), abs((value - goal) ** 2 - (bounded - goal) ** 2) or 1.0)
        if min(corners) > 1e-3:
            step = 1e-6
            numeric = (one(value + step, old, goal) - one(value - step, old, goal)) / (2 * step)
            assert slope == pytest.approx(numeric, rel=1e-4, abs=1e-5)


def with_critic(seed: int = 5, **choices: object) -> Roles:
    advantage = AdvantageSettings(estimator="gae", **choices)  # type: ignore[arg-type]
    chosen = RunSettings(trainer=TrainerSettings(advantage=advantage, warmup_steps=0))
    return make_roles(lambda: build_model(seed=seed, hidden_size=32, layers=1), chosen, 0)


def the_critic(roles: Roles) -> Critic:
    assert roles.critic is not None
    return roles.critic


def credited(roles: Roles, trajectories: list[Trajectory], *, k: int = 100) -> PackedBatch:
    groups = grouped(trajectories)
    credits, _ = roles.advantage_computer.of(groups)
    rows, tally = rows_of(groups, roles.learner.version, k, credits, skip_idle=roles.skips_idle)
    return pack(rows, tally, 4096)


def one_step(roles: Roles, seed: int) -> None:
    trajectories = random_trajectories(seed, groups=2, size=3)
    batch = credited(roles, trajectories)
    roles.learner.step(batch)
    the_critic(roles).step(batch)
    roles.advantage_computer.learn(grouped(trajectories))


def test_a_value_is_of_the_state_before_its_token_whatever_stands_beside_it() -> None:
    critic = the_critic(with_critic())
    torch.nn.init.normal_(critic.model.head.weight, generator=torch.Generator().manual_seed(1))
    turns = a_segment([9, 8], [5, 6], [-0.5, -0.6], [7, 7])
    long = a_segment([4, 4, 4], [1, 2, 3, 5], [-0.1, -0.2, -0.3, -0.4], [3, 6, 6, 7])
    silent = a_segment([4, 4], [], [], [])
    played = [
        a_rollout([long, turns], 1.0, member=0),
        a_rollout([silent], 0.0, member=1),
        a_rollout([turns], 0.0, member=2),
    ]
    found = critic.values(played)
    layers, head = critic.model.policy.base_model, critic.model.head

    def states(tokens: list[int]) -> torch.Tensor:
        return head(layers(input_ids=torch.tensor([tokens])).last_hidden_state[0]).squeeze(-1)

    with torch.no_grad():
        of_long, of_turns = states([4, 4, 4, 1, 2, 3, 5]), states([9, 8, 5, 6])
    expected = [*of_long[2:6].tolist(), *of_turns[1:3].tolist(), *of_turns[1:3].tolist()]
    assert found.tolist() == pytest.approx(expected, abs=1e-5)


def test_the_gradient_of_the_critic_is_that_of_its_loss() -> None:
    roles = with_critic(whiten=False)
    critic = the_critic(roles)
    torch.nn.init.normal_(critic.model.head.weight, generator=torch.Generator().manual_seed(2))
    batch = credited(roles, random_trajectories(3, groups=2, size=3))

    def loss() -> float:
        total = 0.0
        with torch.no_grad():
            for micro in batch.micro_batches:
                assert micro.values is not None and micro.returns is not None
                total += float(value_loss(critic.model(micro), micro.values, micro.returns, 0.2).double().sum())
        return total / batch.size.tokens

    weight, before = critic.model.head.weight, loss()
    with torch.no_grad():
        slopes = []
        for place in range(4):
            weight[0, place] += 1e-2
            above = loss()
            weight[0, place] -= 2e-2
            slopes.append((above - loss()) / 2e-2)
            weight[0, place] += 1e-2
    statistics = critic.step(batch)
    assert statistics.value_loss == pytest.approx(before, rel=1e-4)
    gradient = critic.optimizer.state[weight]["exp_avg"][0, :4] / (1 - 0.9)
    norm = torch.nn.utils.get_total_norm(
        [state["exp_avg"] / (1 - 0.9) for state in critic.optimizer.state.values() if "exp_avg" in state]
    )
    if float(norm) < 0.999:  # Else it was clipped to length 1: only directions can be compared.
        assert gradient.tolist() == pytest.approx(slopes, rel=2e-2, abs=1e-3)
    else:
        assert float(torch.nn.functional.cosine_similarity(gradient, torch.tensor(slopes), dim=0)) > 0.999


def test_no_token_over_k_reaches_the_critics_loss() -> None:
    roles = with_critic(whiten=False)
    torch.nn.init.normal_(the_critic(roles).model.head.weight, generator=torch.Generator().manual_seed(4))
    old = a_segment([2, 3], [4, 5, 6], [-4.0, -3.9, -4.3], [0, 0, 0])
    both = a_segment([2, 3], [7, 8, 9], [-4.0, -4.0, -4.0], [0, 9, 8])
    roles.learner.version = 9
    played = [a_rollout([old], 1.0, size=2, member=0), a_rollout([both], 0.0, size=2, member=1)]
    batch = credited(roles, played, k=2)
    assert [len(micro.chosen) for micro in batch.micro_batches] == [2]
    # Before its first step its values are those that it was given advantages with: what is left is the advantage.
    credits, _ = roles.advantage_computer.of(grouped(played))
    left = credits["g0-1"].advantages[0][3:]
    assert len(left) == 2
    assert the_critic(roles).step(batch).value_loss == pytest.approx(0.5 * float((left**2).mean()), rel=1e-4)
    nothing = credited(roles, [a_rollout([old], float(i), size=2, member=i) for i in range(2)], k=2)
    before = copy.deepcopy(the_critic(roles).model.state_dict())
    assert the_critic(roles).step(nothing).value_loss is None
    assert all(torch.equal(tensor, before[name]) for name, tensor in the_critic(roles).model.state_dict().items())


def test_a_restored_critic_and_price_go_on_with_the_same_bytes(tmp_path: Path) -> None:
    cost = CostSettings(component="success", limit=0.1)
    first = with_critic(cost=cost, critic=CriticSettings(learning_rate=3e-3))
    one_step(first, 1)
    one_step(first, 2)
    path = checkpoint.save(tmp_path, checkpoint.snapshot(first, "r", "f"))
    again = with_critic(cost=cost, critic=CriticSettings(learning_rate=3e-3))
    assert checkpoint.restore_newest(tmp_path, again, "r") == 2
    for roles in (first, again):
        one_step(roles, 3)
    assert first.advantage_computer.price is not None and again.advantage_computer.price is not None
    assert first.advantage_computer.price.log_value == again.advantage_computer.price.log_value != 0.0
    mine, theirs = (checkpoint.snapshot(roles, "r", "f").tensors for roles in (first, again))
    assert mine.keys() == theirs.keys() and len(mine) == 4
    for file, tensors in mine.items():
        assert tensors.keys() == theirs[file].keys()
        assert all(torch.equal(tensor, theirs[file][name]) for name, tensor in tensors.items())
    (path / "critic.safetensors").unlink()
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.restore_newest(tmp_path, again, "r")


def test_a_critic_learns_what_is_to_be_earned() -> None:
    """Prompts say what the answer will be worth: after some steps the critic does too."""
    roles = with_critic(whiten=False, critic=CriticSettings(learning_rate=1e-2))
    critic = the_critic(roles)
    played = [
        a_rollout(
            [a_segment([20 + worth, 30], [5], [-4.0], [0])], float(worth), group=f"g{worth}", size=2, member=member
        )
        for worth in range(4)
        for member in range(2)
    ]
    explained = [critic.step(credited(roles, played)).value_explained for _ in range(40)]
    assert (explained[0] or 0.0) == pytest.approx(0.0, abs=1e-6)
    assert (explained[-1] or 0.0) > 0.9
    assert np.abs(critic.values(played) - [one.reward for one in played]).max() < 0.5


def test_the_layers_are_a_copy_of_the_policys() -> None:
    roles = with_critic()
    policy = {id(parameter) for parameter in roles.learner.model.parameters()}
    assert not policy & {id(parameter) for parameter in the_critic(roles).model.parameters()}
    assert isinstance(the_critic(roles).model, ValueModel)

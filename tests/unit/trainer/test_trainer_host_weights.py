"""Idle models in the host's memory: there but while they are used, and the same bytes as beside the policy."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from services.config.settings import RunSettings, TrainerSettings
from services.config.training.algorithm import AdvantageSettings, LossSettings
from services.wire.errors import UsageError
from tests.support.trajectories import grouped, random_trajectories
from trainer.algorithms.advantages.compute import AdvantageComputer
from trainer.checkpoint import checkpoint
from trainer.memory.host_weights import HostWeights
from trainer.model.critic import Critic, ValueModel
from trainer.model.forward import PackedForward
from trainer.model.learner import Learner
from trainer.model.logprobs import Reference
from trainer.model.roles import Roles, make_roles
from trainer.model.train_batch import train_batch
from trainer.sft.tiny_model import build_model


class Apart:
    """A device that is memory of its own."""

    def __init__(self) -> None:
        self.loads = self.writes = 0

    def to_device(self, held: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        self.loads += 1
        return held.clone()

    def to_host(self, tensor: torch.Tensor, held: torch.Tensor | None) -> torch.Tensor:
        if held is None:
            return tensor.clone()
        self.writes += 1
        return held.copy_(tensor)


def of_critic(places: Apart | None) -> Roles:
    """As `make_roles` makes them; it refuses the offload without a GPU."""
    advantage = AdvantageSettings(estimator="gae")
    trainer = TrainerSettings(advantage=advantage, warmup_steps=0, offload_idle=places is not None)
    base = build_model(seed=5, hidden_size=32, layers=1)
    critic = Critic(ValueModel(copy.deepcopy(base)), trainer, places)
    return Roles(Learner(base, trainer), AdvantageComputer(advantage, critic=critic.values), critic)


def weights(roles: Roles) -> dict[str, torch.Tensor]:
    assert roles.critic is not None
    return {name: tensor.clone() for name, tensor in roles.critic.model.state_dict().items()}


def test_a_critic_in_host_memory_learns_the_same_bytes_and_is_saved_and_restored(tmp_path: Path) -> None:
    places = Apart()
    beside, apart, again = of_critic(None), of_critic(places), of_critic(Apart())
    settings = RunSettings(k=9, trainer=beside.learner.settings)
    for roles in (beside, apart):
        for seed in (1, 2, 3):
            train_batch(roles, settings, grouped(random_trajectories(seed, groups=2, size=3)), 1)
    assert weights(beside).keys() == weights(apart).keys()
    assert all(torch.equal(weight, weights(beside)[name]) for name, weight in weights(apart).items())
    held = len([*of_critic(None).critic.model.parameters()])  # type: ignore[union-attr]
    assert places.writes % 3 == 0 < places.writes and places.loads > 2 * 3 * held - 1, "for values, and for each step"
    checkpoint.save(tmp_path, checkpoint.snapshot(apart, "r", "f"))
    assert checkpoint.restore_newest(tmp_path, again, "r") == 3
    for roles in (apart, again):
        train_batch(roles, settings, grouped(random_trajectories(4, groups=2, size=3)), 1)
    assert all(torch.equal(weight, weights(apart)[name]) for name, weight in weights(again).items())


def test_a_reference_is_on_the_device_while_a_batch_is_measured_and_never_written_back() -> None:
    base, places = build_model(seed=5, hidden_size=32, layers=1), Apart()
    settings = TrainerSettings(loss=LossSettings(kl=0.1), warmup_steps=0, micro_batch_tokens=40)
    ends = []
    for offloaded in (False, True):
        first = copy.deepcopy(base).eval().requires_grad_(False)
        packed = PackedForward(first)
        reference = Reference(packed, HostWeights(first, places).used) if offloaded else Reference(packed)
        roles = Roles(Learner(copy.deepcopy(base), settings, 0, reference), AdvantageComputer(AdvantageSettings()))
        for seed in (1, 2):
            groups = grouped(random_trajectories(seed, groups=2, size=3))
            train_batch(roles, RunSettings(k=9, trainer=settings), groups, 1)
        ends.append(roles.learner.weights())
    assert all(torch.equal(weight, ends[0][name]) for name, weight in ends[1].items())
    tensors = len([*base.parameters(), *base.buffers()])
    assert (places.loads, places.writes) == (2 * tensors, 0), "once a batch, whatever its passes"


def test_an_offload_without_effect_is_refused() -> None:
    settings = TrainerSettings(offload_idle=True, loss=LossSettings(kl=0.1))
    with pytest.raises(UsageError, match="offload_idle without a GPU has no effect"):
        make_roles(lambda: build_model(seed=5, hidden_size=32, layers=1), RunSettings(trainer=settings), 0)

"""The whole training step, in process, on rollouts that the policy really sampled: rewards climb because it learns."""

from __future__ import annotations

import pytest
import torch

from services.config.settings import RunSettings, TrainerSettings
from services.config.training.algorithm import AdvantageSettings, CorrectionSettings, CriticSettings, LossSettings
from services.config.training.lora import LoraSettings
from tests.support.one_token_task import play
from tests.support.trajectories import grouped
from trainer.data.packing import pack
from trainer.data.rows import rows_of
from trainer.model.roles import make_roles
from trainer.sft.tiny_model import build_model

DECOUPLED = LossSettings(anchor="proximal", correction=CorrectionSettings(weight="token"))


@pytest.mark.parametrize(
    ("loss", "advantage"),
    [
        (LossSettings(), AdvantageSettings()),
        (DECOUPLED, AdvantageSettings()),
        (LossSettings(), AdvantageSettings(estimator="rloo", kl=0.01)),
        (LossSettings(), AdvantageSettings(estimator="remax")),
        (LossSettings(), AdvantageSettings(estimator="reinforce_pp")),
        (LossSettings(), AdvantageSettings(estimator="gae", critic=CriticSettings(learning_rate=5e-3))),
    ],
    ids=lambda choice: choice.estimator if isinstance(choice, AdvantageSettings) else choice.anchor,
)
def test_success_climbs(loss: LossSettings, advantage: AdvantageSettings) -> None:
    climbs(TrainerSettings(learning_rate=5e-3, loss=loss, advantage=advantage))


def test_success_climbs_with_adapters_alone() -> None:
    advantage = AdvantageSettings(estimator="rloo", kl=0.01)
    # The head is frozen: in a narrower model its logits are too small for a success above 0.5.
    climbs(
        TrainerSettings(learning_rate=5e-3, advantage=advantage, lora=LoraSettings(rank=4)), hidden_size=64, above=0.8
    )


def climbs(trainer: TrainerSettings, *, hidden_size: int = 32, above: float = 0.9) -> None:
    settings, advantage = RunSettings(trainer=trainer), trainer.advantage
    roles = make_roles(lambda: build_model(seed=1, hidden_size=hidden_size, layers=1), settings, 0)
    generator = torch.Generator().manual_seed(1)
    success, values = [], []
    for step in range(60):
        rollouts = play(
            roles.learner.model, step, roles.learner.version, generator, greedy_baseline=advantage.greedy_baseline
        )
        groups = grouped(rollouts)
        credits, _ = roles.advantage_computer.of(groups)
        rows, tally = rows_of(groups, roles.learner.version, 0, credits, skip_idle=roles.skips_idle)
        packed = pack(rows, tally, settings.trainer.micro_batch_tokens)
        statistics = roles.learner.step(packed)
        assert (statistics.logprob_gap_max or 0.0) < 1e-5
        if roles.critic is not None:
            values.append(roles.critic.step(packed).value_loss or 0.0)
        success.append(sum(rollout.reward for rollout in rollouts) / len(rollouts))
    assert sum(success[:5]) / 5 < 0.35
    assert sum(success[-5:]) / 5 > above
    # A critic that has learnt what the policy earns is hardly surprised any more.
    assert not values or sum(values[-5:]) < sum(values[:5]) / 2

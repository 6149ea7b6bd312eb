"""The whole training step, in process, on rollouts that the policy really drew: rewards climb because it learns."""

from __future__ import annotations

import pytest
import torch

from services.loss_settings import CorrectionSettings, LossSettings
from services.settings import TrainerSettings
from services.wire.trajectory import Trajectory
from tests.support.trajectories import a_rollout, a_segment, grouped
from trainer.learner import Learner
from trainer.packing import pack
from trainer.rows import rows_of
from trainer.tiny_policy import build_model

WANTED = range(2, 12)  # Ten of 64 tokens are right answers.


def play(learner: Learner, step: int, generator: torch.Generator) -> list[Trajectory]:
    """Four prompts, eight one-token answers to each; the reward says whether the answer is a wanted one."""
    rollouts = []
    for number in range(4):
        prompt = [20 + number, 30 + step % 4]
        with torch.inference_mode():
            logprobs = learner.model(input_ids=torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
        drawn = torch.multinomial(logprobs.exp(), 8, replacement=True, generator=generator).tolist()
        for member, token in enumerate(drawn):
            segment = a_segment(prompt, [token], [float(logprobs[token])], [learner.version])
            reward = float(token in WANTED)
            rollouts.append(a_rollout([segment], reward, group=f"{step}/{number}", size=8, member=member))
    return rollouts


@pytest.mark.parametrize(
    "loss", [LossSettings(), LossSettings(anchor="proximal", correction=CorrectionSettings(weight="token"))]
)
def test_success_climbs(loss: LossSettings) -> None:
    settings = TrainerSettings(learning_rate=5e-3, loss=loss)
    learner = Learner(build_model(seed=1, hidden_size=32, layers=1), settings)
    generator = torch.Generator().manual_seed(1)
    success = []
    for step in range(60):
        rollouts = play(learner, step, generator)
        rows, tally = rows_of(grouped(rollouts), learner.version, 0)
        statistics = learner.step(pack(rows, tally, settings.micro_batch_tokens))
        assert (statistics.logprob_gap_max or 0.0) < 1e-5
        success.append(sum(rollout.reward for rollout in rollouts) / len(rollouts))
    assert sum(success[:5]) / 5 < 0.35
    assert sum(success[-5:]) / 5 > 0.9

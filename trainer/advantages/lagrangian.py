"""Safe RLHF's price of a cost (Dai et al. 2023, arXiv:2310.12773, section 3.3 and appendix B): reward as much as possible,
mean cost at most d.

    R'_i = (R_i − λ·C_i) / (1 + λ)
    ln λ ← ln λ + α·λ·(mean(C) − d)              after each batch; λ stays at most `largest`
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from services.config.algorithm import CostSettings
from services.wire.errors import UsageError
from services.wire.trajectory import Trajectory


class CostPrice:
    """The multiplier λ: state of a run, changed by each batch. `log_value`: ln λ, what a checkpoint keeps."""

    def __init__(self, settings: CostSettings) -> None:
        self.log_value = math.log(settings.price)
        self._settings = settings

    @property
    def value(self) -> float:
        return math.exp(self.log_value)

    def cost_of(self, trajectory: Trajectory) -> float:
        """Raises UsageError where the environment gave no such component: a cost that is not known is not 0."""
        component = self._settings.component or ""
        if component not in trajectory.reward_components:
            raise UsageError(
                f"trajectory {trajectory.trajectory_id} has no reward component {component!r}",
                "have the environment give it with every reward, or leave trainer.advantage.cost.component out",
            )
        return trajectory.reward_components[component]

    def charged(self, reward: float, cost: float) -> float:
        """The reward less the price of the cost."""
        return (reward - self.value * cost) / (1.0 + self.value)

    def learn(self, costs: Sequence[float]) -> None:
        """One batch of trajectories is over; `costs`: what each of them cost."""
        if costs:
            excess = math.fsum(costs) / len(costs) - self._settings.limit
            raised = self.log_value + self._settings.learning_rate * self.value * excess
            self.log_value = min(math.log(self._settings.largest), raised)

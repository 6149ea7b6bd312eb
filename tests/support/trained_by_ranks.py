"""A few optimizer steps by one or several ranks, for tests: what rank 0 came to.

runs on each rank of a `RankPool`, or in the test's own process with one rank
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import SGD
from transformers import PreTrainedModel

from services.config.settings import RunSettings
from services.policies.training.layout import Layout
from tests.support.model_families import make_family
from tests.support.trajectories import grouped, random_trajectories
from trainer.model.learner import named_weights
from trainer.model.roles import Roles, make_roles
from trainer.model.train_batch import follow, train_batch
from trainer.parallel.orders import Stop, decode, tell
from trainer.parallel.ranks import Ranks
from trainer.parallel.sharding import whole
from trainer.sft.tiny_model import build_model

Arrays = dict[str, np.ndarray]


class RecordingSGD(SGD):
    """Keeps the gradient of its first step."""

    first: list[Tensor] | None = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.first is None:
            every = [weight for group in self.param_groups for weight in group["params"]]
            self.first = [whole(weight.grad).clone() for weight in every if weight.grad is not None]
        super().step()


def train(
    rank: int,
    layout: Mapping[str, int],
    settings: Mapping[str, Any],
    steps: int = 20,
    groups: int = 2,
    size: int = 4,
    family: str | None = None,
    ranks: Ranks | None = None,
) -> tuple[list[dict[str, Any]], Arrays, Arrays] | None:
    """`settings`: of the run; `family`: of the policy (`tests.support.model_families`), for None the built-in one; `ranks`:
    where there are some already, in place of `layout`.

    Returns each step's statistics, first gradients and last weights; None but on rank 0.
    """
    if ranks is None:
        shape = Layout(**layout)
        ranks = Ranks.of_group(shape) if shape.ranks > 1 else Ranks.alone()
    chosen, device = RunSettings.model_validate(settings), ranks.device
    roles = make_roles(lambda: _policy(family).to(device), chosen, 0, ranks=ranks)
    for role, (_, optimizer) in roles.models().items():
        holder = roles.learner if role == "model" else roles.critic
        assert holder is not None
        holder.optimizer = RecordingSGD(
            [weight for group in optimizer.param_groups for weight in group["params"]],
            lr=chosen.trainer.learning_rate,
            foreach=False,
        )
    told: list[dict[str, Any]] = []
    if ranks.leads:
        for step in range(steps):
            batch = grouped(random_trajectories(step, groups=groups, size=size, version=step))
            for made in train_batch(roles, chosen, batch, 1):
                told.append(asdict(made.statistics) | asdict(made.valued))
        tell(ranks, Stop())
    else:
        while not isinstance(order := decode(ranks.receive()), Stop):
            follow(roles, order)
    found = told, _gradients(roles), _weights(roles)
    return found if ranks.leads else None


def _policy(family: str | None) -> PreTrainedModel:
    return build_model(seed=5, hidden_size=64, layers=2) if family is None else make_family(family)


def _gradients(roles: Roles) -> Arrays:
    found: Arrays = {}
    for role, (_, optimizer) in roles.models().items():
        assert isinstance(optimizer, RecordingSGD)
        found |= {f"{role}.{number}": each.cpu().numpy() for number, each in enumerate(optimizer.first or ())}
    return found


@torch.no_grad()
def _weights(roles: Roles) -> Arrays:
    return {
        f"{role}.{name}": whole(weight).cpu().numpy()
        for role, (model, _) in roles.models().items()
        for name, weight in named_weights(model).items()
    }

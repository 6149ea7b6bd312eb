"""A few optimizer steps of the trainer on one or several ranks, by SGD, and how far two of them are from each other.

    roles, as a run makes them ─► SGD in place of AdamW ─► steps ─► Steps: losses, first gradients, last weights

AdamW's first step is a sign: of a gradient that is all rounding it would be noise. SGD's weights differ as gradients do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import SGD
from transformers import PreTrainedModel

from services.config.settings import RunSettings
from services.policies.batching import Group
from services.wire.packed import Float32Array
from services.wire.run_metrics import TokenStatistics, ValueStatistics
from services.wire.trajectory import Trajectory
from trainer.metrics.rollouts import current_logprobs
from trainer.model.learner import named_weights
from trainer.model.roles import Roles, make_roles
from trainer.model.train_batch import Trained, follow, train_batch
from trainer.parallel.orders import Measure, Stop, Train, decode, tell
from trainer.parallel.ranks import Ranks
from trainer.parallel.sharding import whole

Arrays = dict[str, npt.NDArray[Any]]


class Steps(NamedTuple):
    """`told`: what each step says of itself. Of each tensor by its name, whole: `gradients` of the first step, clipped;
    `weights` after the last. `logprobs`: before each step, of all sampled tokens; NaN of those of rows without gradient."""

    told: list[tuple[TokenStatistics, ValueStatistics]]
    gradients: Arrays
    weights: Arrays
    logprobs: list[Float32Array]


class _RecordingSGD(SGD):
    """Keeps the gradient of its first step."""

    first: list[Tensor] | None = None

    def step(self, closure: Any = None) -> Any:
        if self.first is None:
            every = [weight for group in self.param_groups for weight in group["params"]]
            self.first = [whole(weight.grad).clone() for weight in every if weight.grad is not None]
        return super().step(closure)


def make_steps(
    ranks: Ranks,
    load: Callable[[], PreTrainedModel],
    settings: RunSettings,
    batch: Callable[[int], Sequence[Group[Trajectory]]],
    steps: int,
) -> Steps | None:
    """`steps` of a batch each, `batch(0)` …; `load`: a fresh copy of the first policy, the same on all ranks.

    Called by all ranks alike. None but on rank 0.
    """
    roles = make_roles(load, settings, 0, ranks=ranks)
    roles.learner.keeps_logprobs = True
    for role, (_, optimizer) in roles.models().items():
        holder = roles.learner if role == "model" else roles.critic
        assert holder is not None
        holder.optimizer = _RecordingSGD(
            [weight for group in optimizer.param_groups for weight in group["params"]],
            lr=settings.trainer.learning_rate,
            foreach=False,
        )
    told, logprobs = [], []
    if ranks.leads:
        for step in range(steps):
            made = train_batch(roles, settings, batch(step), 1)
            told += [(each.statistics, each.valued) for each in made]
            logprobs += [_logprobs(each) for each in made]
        tell(ranks, Stop())
    else:
        while isinstance(order := decode(ranks.receive()), Train | Measure):
            follow(roles, order)
    # Collectives: all ranks take part.
    found = Steps(told, _gradients(roles), _weights(roles), logprobs)
    return found if ranks.leads else None


def largest_error(found: Mapping[str, npt.NDArray[Any]], wanted: Mapping[str, npt.NDArray[Any]]) -> float:
    """The largest difference, of each tensor's maximum; of 1 where all of one are 0. Raises ValueError for other names."""
    if found.keys() != wanted.keys():
        raise ValueError(f"not the same tensors: {sorted(found.keys() ^ wanted.keys())}")
    return max(float(np.abs(found[name] - each).max() / (np.abs(each).max() or 1.0)) for name, each in wanted.items())


def mean_distance(found: Mapping[str, npt.NDArray[Any]], wanted: Mapping[str, npt.NDArray[Any]]) -> float:
    """Root mean square over tensors of their distances, of each one's size."""
    pairs = ((found[name], array) for name, array in wanted.items() if array.any())
    return float(np.sqrt(np.mean([np.square(np.linalg.norm(one - two) / np.linalg.norm(two)) for one, two in pairs])))


def _logprobs(step: Trained) -> Float32Array:
    counts = step.batch.segments.sampled_tokens()
    found, known = current_logprobs(counts, step.logprobs, step.sources)
    return np.where(np.repeat(known, counts), found, np.float32(np.nan))


def _gradients(roles: Roles) -> Arrays:
    found: Arrays = {}
    for role, (_, optimizer) in roles.models().items():
        assert isinstance(optimizer, _RecordingSGD)
        found |= {f"{role}.{number}": each.cpu().numpy() for number, each in enumerate(optimizer.first or ())}
    return found


@torch.no_grad()
def _weights(roles: Roles) -> Arrays:
    return {
        f"{role}.{name}": whole(weight).cpu().numpy()
        for role, (model, _) in roles.models().items()
        for name, weight in named_weights(model).items()
    }

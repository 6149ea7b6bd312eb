"""A few optimizer steps by one or several ranks, for tests: what rank 0 came to.

runs on each rank of a `RankPool`, or in the test's own process with one rank
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import PreTrainedModel

from benchmarks.trainer.rank_steps import Steps, make_steps
from services.config.settings import RunSettings
from services.policies.training.layout import Layout
from tests.support.model_families import make_family
from tests.support.trajectories import grouped, random_trajectories
from trainer.parallel.ranks import Ranks
from trainer.sft.tiny_model import build_model


def train(
    rank: int,
    layout: Mapping[str, int],
    settings: Mapping[str, Any],
    steps: int = 20,
    groups: int = 2,
    size: int = 4,
    family: str | None = None,
    ranks: Ranks | None = None,
) -> Steps | None:
    """`settings`: of the run; `family`: of the policy (`tests.support.model_families`), for None the built-in one; `ranks`:
    where there are some already, in place of `layout`. None but on rank 0.
    """
    if ranks is None:
        shape = Layout(**layout)
        ranks = Ranks.of_group(shape) if shape.ranks > 1 else Ranks.alone()
    device = ranks.device
    return make_steps(
        ranks,
        lambda: _policy(family).to(device),
        RunSettings.model_validate(settings),
        lambda step: grouped(random_trajectories(step, groups=groups, size=size, version=step)),
        steps,
    )


def _policy(family: str | None) -> PreTrainedModel:
    return build_model(seed=5, hidden_size=64, layers=2) if family is None else make_family(family)

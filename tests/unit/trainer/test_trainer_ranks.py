"""Several ranks train as one process does: the same loss, gradients, statistics and weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np
import pytest

from benchmarks.trainer.rank_steps import largest_error, mean_distance
from services.policies.training.layout import Layout
from tests.support.rank_pool import RankPool
from tests.support.trained_by_ranks import train

LAYOUTS = {
    "2 data": {"data": 2},
    "4 data": {"data": 4},
    "2 replicas of 2": {"replicate": 2, "data": 2},
    "2 context": {"context": 2},
    "2 tensor": {"tensor": 2},
    "2 data, 2 context": {"data": 2, "context": 2},
    "2 data, 2 tensor": {"data": 2, "tensor": 2},
    "experts on 2 data": {"data": 2, "expert": 2},
    "experts on 2 of 4 data": {"data": 4, "expert": 2},
    "experts on 2 data of 2 replicas": {"replicate": 2, "data": 2, "expert": 2},
    "experts on 2 data, 2 context": {"data": 2, "context": 2, "expert": 2},
    "experts on 2 tensor": {"tensor": 2, "expert": 2},
    "experts on 2 tensor, 2 data": {"data": 2, "tensor": 2, "expert": 2},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "full checkpointing": {"activation_checkpointing": "full"},
    "selective checkpointing": {"activation_checkpointing": "selective"},
    "adapters": {"lora": {"rank": 4}, "loss": {"kl": 0.1}},
    "critic": {"advantage": {"estimator": "gae"}},
    "reference": {"loss": {"kl": 0.1, "entropy": 0.01}, "advantage": {"kl": 0.05}},
    # It is of each pass: a row each, however many ranks there are.
    "balanced experts": {"loss": {"router_aux": 0.5}, "micro_batch_tokens": 1},
}


def settings_of(option: str) -> dict[str, Any]:
    # Passes of few tokens: several on each rank, and not equally many.
    trainer = {"learning_rate": 0.05, "warmup_steps": 0, "micro_batch_tokens": 120, "clip_grad_norm": 0.5}
    return {"k": 3, "trainer": trainer | OPTIONS[option]}


@pytest.mark.parametrize(
    ("option", "layout"),
    [
        ("plain", "2 replicas of 2"),
        pytest.param("full checkpointing", "2 data", marks=pytest.mark.slow),
        ("selective checkpointing", "2 data"),
        pytest.param("adapters", "2 data", marks=pytest.mark.slow),
        ("critic", "2 data"),
        pytest.param("reference", "2 data", marks=pytest.mark.slow),
        ("adapters", "2 context"),
        pytest.param("critic", "2 data, 2 context", marks=pytest.mark.slow),
        ("reference", "2 tensor"),
        pytest.param("critic", "2 data, 2 tensor", marks=pytest.mark.slow),
        ("full checkpointing", "experts on 2 data"),
        pytest.param("critic", "experts on 2 of 4 data", marks=pytest.mark.slow),
        pytest.param("plain", "experts on 2 data of 2 replicas", marks=pytest.mark.slow),
        pytest.param("balanced experts", "experts on 2 data, 2 context", marks=pytest.mark.slow),
        pytest.param("adapters", "experts on 2 tensor", marks=pytest.mark.slow),
        pytest.param("reference", "experts on 2 tensor, 2 data", marks=pytest.mark.slow),
        ("balanced experts", "2 tensor"),
    ],
)
def test_ranks_come_to_what_one_process_does(rank_pool: RankPool, option: str, layout: str) -> None:
    shape = LAYOUTS[layout]
    # Passes of a row each are many.
    how = partial(
        train,
        steps=5 if "micro_batch_tokens" in OPTIONS[option] else 20,
        family="Qwen3-MoE" if "experts" in option + layout else None,
    )
    alone = how(0, {}, settings_of(option))
    assert alone is not None
    assert max(float(np.abs(each).max()) for each in alone[1].values()) > 1e-3, "there is something to learn"
    told, gradients, weights, logprobs = rank_pool.run(Layout(**shape).ranks, how, shape, settings_of(option))[0]
    for of_ranks, of_one in zip(logprobs, alone.logprobs, strict=True):
        np.testing.assert_allclose(of_ranks, of_one, atol=1e-4, equal_nan=True)
    assert not np.isnan(np.concatenate(alone.logprobs)).all()
    assert largest_error(gradients, alone[1]) <= 1e-5 and largest_error(weights, alone[2]) <= 1e-5
    for found, wanted in zip(told, alone.told, strict=True):
        for one, other in zip(found, wanted, strict=True):
            same(asdict(one), asdict(other))


@pytest.mark.parametrize("layout", ["2 data", "experts on 2 data", "experts on 2 tensor"])
def test_the_error_of_16_bits_is_not_twice_that_of_one_process(rank_pool: RankPool, layout: str) -> None:
    shape, half = LAYOUTS[layout], settings_of("plain")
    half["trainer"] |= {"dtype": "bfloat16"}
    how = partial(train, steps=1, family="Qwen3-MoE")
    exact, one = how(0, {}, settings_of("plain")), how(0, {}, half)
    found = rank_pool.run(2, how, shape, half)[0]
    assert exact is not None and one is not None
    assert 0.0 < mean_distance(one[1], exact[1]) < 0.5
    assert mean_distance(found[1], exact[1]) <= 2.0 * mean_distance(one[1], exact[1])


def same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        expected = value if value is None or isinstance(value, dict) else pytest.approx(value, rel=1e-4, abs=1e-5)
        assert found[name] == expected, name


def test_ranks_without_a_row_take_part(rank_pool: RankPool) -> None:
    """Two rows on four ranks."""
    few = settings_of("critic")
    alone = train(0, {}, few, 2, 1, 2)
    told = rank_pool.run(4, train, LAYOUTS["4 data"], few, 2, 1, 2)[0]
    assert alone is not None and largest_error(told[1], alone[1]) <= 1e-5 and largest_error(told[2], alone[2]) <= 1e-5

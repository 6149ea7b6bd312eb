"""Phase of a run, what is left of it, and what bounds it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.policies.progress.bottleneck import Load, find_bound
from services.policies.progress.phase import Part, Phase, left_s, phase_of

BEGINS = [Part("warm start", 0, 2), Part("servers", 0, 2), Part("services", 0, 1)]
BEGUN = [Part("warm start", 2, 2), Part("servers", 2, 2), Part("services", 1, 1)]


def test_the_way_to_the_first_step_is_one_percentage() -> None:
    before = Part("evaluation before training", 128, 256)
    seen = [
        phase_of(BEGINS, step=0, steps=9, evaluated_before=False),
        phase_of([Part("warm start", 1.5, 2), *BEGINS[1:]], step=0, steps=9, evaluated_before=False),
        phase_of(BEGUN, step=0, steps=9, evaluated_before=False),
        phase_of(BEGUN, step=0, steps=9, evaluated_before=False, answers=before),
    ]
    assert [phase.name for phase in seen] == ["starting", "starting", *["evaluation before training"] * 2]
    assert [phase.share for phase in seen] == [0.0, 0.1875, 0.75, 0.875]
    assert phase_of(BEGUN, step=0, steps=9, evaluated_before=True) == Phase("training", 0.0)


def test_training_is_its_steps_and_ends_with_an_evaluation() -> None:
    assert phase_of(BEGUN, step=3, steps=9, evaluated_before=True) == Phase("training", 1 / 3)
    assert phase_of(BEGUN, step=9, steps=9, evaluated_before=True, trainer_waits=True).name == "training"
    after = Part("evaluation after training", 64, 256)
    phase = phase_of(BEGUN, step=9, steps=9, evaluated_before=True, answers=after)
    assert (phase.name, phase.share) == ("evaluation after training", 0.25)


def test_what_is_left_follows_the_last_steps_and_not_the_first_ones() -> None:
    assert left_s([], 9) is None
    assert left_s([5.0], 9) is None
    assert left_s([5.0, 2.0], 9) == 14.0
    assert left_s([1000.0] * 10 + [1.0] * 40, 60) == 10.0
    assert left_s([1.0, 2.0, 3.0], 3) == 0.0


LOAD = Load(steps=20, waited=0.6, published=0.1, looks=40, generating=0.9, held_back=0.9, k=2)


@pytest.mark.parametrize(
    ("changes", "kind", "remedy"),
    [
        ({}, "generation", "add servers, or raise k to 4"),
        ({"held_back": 0.1}, "generation", "add servers"),
        ({"generating": 0.1}, "staleness", "raise k to 4"),
        ({"generating": 0.1, "k": 0}, "staleness", "raise k to 1"),
        ({"generating": 0.1, "held_back": 0.1}, "environment", "speed up the environment, its tools and rewards"),
        ({"waited": 0.05}, "training", "add trainer ranks (trainer.parallel.data) or threads"),
        ({"waited": 0.05, "published": 0.6}, "publishing", "trainer.minibatches_per_batch: only the last is published"),
        ({"waited": 0.2}, "nothing", ""),
    ],
)
def test_what_bounds_a_run_and_the_remedy(changes: dict[str, float], kind: str, remedy: str) -> None:
    bound = find_bound(replace(LOAD, **changes))  # type: ignore[arg-type]
    assert bound is not None
    assert (bound.kind, bound.remedy) == (kind, remedy)
    assert str(bound).startswith("nothing (" if kind == "nothing" else f"{kind}: {remedy} (")


@pytest.mark.parametrize("changes", [{"steps": 2}, {"looks": 3}])
def test_nothing_is_said_of_a_run_that_begins(changes: dict[str, float]) -> None:
    assert find_bound(replace(LOAD, **changes)) is None  # type: ignore[arg-type]

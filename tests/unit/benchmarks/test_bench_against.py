"""Two commits side by side: which numbers are compared, how a ratio is judged, what a service took between two looks."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path

import pytest

from benchmarks.guard.calls import CALL, STREAMED, make_calls, standing_fleet
from benchmarks.guard.mesh_run import (
    ENGINE_PROCESS,
    EVENT_LOOP,
    GROUP_SIZE,
    GROUPS,
    WARM,
    Moment,
    _Step,
    cpu_at,
    figures_of,
    name_of,
)
from benchmarks.guard.ratios import ALLOWED, START, STEP, ratios_of, worse_of
from benchmarks.harness.against import compared, in_turns, numbers, ratio_of, read_wish
from benchmarks.harness.revision import Checkout, checkout, compiled, here
from benchmarks.harness.servers import client
from services.wire.errors import RollmeshError, UsageError


def test_a_wish_is_taken_from_the_benchmarks_own_options() -> None:
    wish = read_wish(["--rounds", "1", "--against", "HEAD~3", "--pairs=5", "--json"])
    assert (wish.revision, wish.pairs, wish.as_json, wish.rest) == ("HEAD~3", 5, True, ["--rounds", "1"])
    assert read_wish(["--rounds", "1"]).revision is None


@pytest.mark.parametrize("arguments", [["--against"], ["--against", "HEAD", "--pairs", "0"], ["--pairs", "many"]])
def test_a_wish_that_means_nothing_is_misuse(arguments: list[str]) -> None:
    with pytest.raises(UsageError):
        read_wish(arguments)


def test_a_commit_that_there_is_not_is_misuse() -> None:
    with pytest.raises(UsageError, match="no commit 'nowhere'"):
        checkout("nowhere", lambda _: None)


def test_no_start_of_a_checkout_compiles_its_modules(tmp_path: Path) -> None:
    for module in ("services/__init__.py", "services/http/app.py", "dev.py"):
        (tmp_path / module).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / module).write_text("x = 1\n")
    compiled(Checkout("a commit", tmp_path, Path(sys.executable)))
    names = {path.name.partition(".")[0] for path in tmp_path.rglob("*.pyc")}
    assert names == {"__init__", "app"}
    (tmp_path / "services" / "broken.py").write_text("x =\n")
    with pytest.raises(RollmeshError, match=r"broken\.py"):
        compiled(Checkout("a commit", tmp_path, Path(sys.executable)))


def test_numbers_are_compared_by_their_path_and_rounds_are_not() -> None:
    result = {"speed": {"median": 2, "rounds": [1, 2, 3]}, "ok": True, "name": "x", "none": None, "http": 1.5}
    assert numbers(result) == {"speed.median": 2.0, "http": 1.5}


def test_only_what_every_run_reports_is_compared() -> None:
    figures = compared([{"a": 2.0, "new": 1.0}, {"a": 4.0, "new": 1.0}], [{"a": 1.0}, {"a": 4.0}])
    assert set(figures) == {"a"}
    assert (figures["a"].here, figures["a"].there, figures["a"].ratio) == (3.0, 2.5, 1.5)


async def test_both_commits_run_equally_often_and_side_by_side() -> None:
    order: list[str] = []

    async def run(arm: str) -> dict[str, float]:
        await asyncio.sleep(0)
        order.append(arm)
        return {"a": float(len(order))}

    runs = await in_turns("here", "there", 5, run, lambda _: None)
    assert [len(each) for each in runs.values()] == [5, 5]
    assert all(set(order[at : at + 2]) == {"here", "there"} for at in range(0, 10, 2))
    assert len({tuple(order[at : at + 2]) for at in range(0, 10, 2)}) == 2, "not always the same first"


@pytest.mark.parametrize(("more", "worse"), [(1.0, False), (1.05, False), (1.15, True), (2.0, True)])
def test_fifteen_per_cent_more_is_found_and_chance_is_not(more: float, worse: bool) -> None:
    chance = random.Random(1)
    for _ in range(200):
        here = [more * chance.gauss(100.0, 1.0) for _ in range(7)]
        there = [chance.gauss(100.0, 1.0) for _ in range(7)]
        found = worse_of({"cpu": ratio_of(here, there), "step_ms": ratio_of(here, there)})
        assert found == (["cpu"] if worse else [])


def test_a_figure_that_wanders_is_no_proof() -> None:
    wandering = ratio_of([200.0, 100.0, 140.0, 90.0, 180.0], [100.0] * 5)
    assert wandering.ratio > ALLOWED
    assert worse_of({"cpu": wandering}) == []


SERVICES = ("bus", "gateway", "redis", "rollout server", "runner", "trainer")
CALLED = ("client", "gateway", "redis", "servers")
Runs = list[dict[str, float]]


def runs_of(chance: random.Random, pairs: int, more: dict[str, float], wander: float) -> tuple[Runs, Runs]:
    """Of a commit that takes so many times the CPU, and of the one before, on a machine whose speed wanders so much."""

    def run(more: dict[str, float]) -> dict[str, float]:
        speed, start_speed = chance.gauss(1.0, wander), chance.gauss(1.0, wander)
        figures = {STEP + name: 100.0 * speed * chance.gauss(1.0, 0.02) for name in SERVICES}
        figures |= {START + name: 5.0 * start_speed * chance.gauss(1.0, 0.02) for name in SERVICES}
        for way in (CALL, STREAMED):
            speed_then = chance.gauss(1.0, wander)
            figures |= {way + name: 2.0 * speed_then * chance.gauss(1.0, 0.02) for name in CALLED}
        figures["http_cpu_ms_per_trajectory"] = 0.3 * speed * chance.gauss(1.0, 0.02)
        figures |= {f"idle_mib.{name}": chance.gauss(100.0, 1.0) for name in SERVICES}
        return {name: value * more.get(name, 1.0) for name, value in figures.items()}

    made = [(run(more), run({})) for _ in range(pairs)]
    return [ours for ours, _ in made], [theirs for _, theirs in made]


@pytest.mark.parametrize(
    ("more", "worse"),
    [
        ({}, []),
        ({"http_cpu_ms_per_trajectory": 1.15}, ["http_cpu_ms_per_trajectory"]),
        ({START + "trainer": 1.15, "idle_mib.bus": 1.2}, [START + "trainer", "idle_mib.bus"]),
        ({CALL + "servers": 1.15}, [CALL + "servers"]),
        ({STREAMED + name: 1.2 for name in CALLED[1:]}, [STREAMED + name for name in CALLED[1:]]),
        ({STEP + name: 0.5 for name in SERVICES[:4]}, []),
        ({STEP + name: 1.5 for name in SERVICES}, [STEP + name for name in SERVICES]),
        ({STEP + name: 1.5 for name in SERVICES[:4]}, [STEP + name for name in SERVICES[:4]]),
    ],
    ids=[
        "the same",
        "a trajectory dearer",
        "a start and memory",
        "a call dearer",
        "a streamed call dearer for all",
        "most are cheaper",
        "all are dearer",
        "most are dearer",
    ],
)
def test_a_machine_whose_speed_wanders_hides_nothing_and_accuses_nobody(
    more: dict[str, float], worse: list[str]
) -> None:
    chance, right = random.Random(2), 0
    for _ in range(50):
        here, there = runs_of(chance, 15, more, wander=0.09)
        found = worse_of(ratios_of(here, there))
        assert set(found) <= set(worse)
        right += sorted(found) == sorted(worse)
    assert right >= 48


@pytest.mark.parametrize("by", [0.8, 1.0, 1.3])
def test_what_a_commit_changes_for_all_is_not_taken_for_the_machines_speed(by: float) -> None:
    here, there = runs_of(random.Random(3), 15, {STEP + name: by for name in SERVICES}, wander=0.03)
    figures = ratios_of(here, there)
    assert all(figures[STEP + name].ratio == pytest.approx(by, abs=0.05) for name in SERVICES)
    assert all(figures[START + name].ratio == pytest.approx(1.0, abs=0.05) for name in SERVICES)


def test_what_a_service_took_is_read_between_two_looks() -> None:
    moments = [Moment(at, {"trainer": cpu}, {}) for at, cpu in ((10.0, 1.0), (11.0, 3.0), (12.0, 3.0))]
    assert [cpu_at(moments, "trainer", at) for at in (9.0, 10.0, 10.5, 11.5, 20.0)] == [1.0, 1.0, 2.0, 3.0, 3.0]


def test_figures_are_of_the_steps_after_the_warm_ones() -> None:
    steps = [_Step(step, 100.0 + step, 100.0, tokens=1000, stream_ms=6.4) for step in range(WARM + 11)]
    memory = {"trainer": 1 << 20, "redis": 2 << 20}

    def moment(at: float, trainer: float, redis: float, loop: float) -> Moment:
        return Moment(at, {"trainer": trainer, "redis": redis, EVENT_LOOP: loop}, memory)

    began, ended = 100.0 + WARM - 1, 100.0 + WARM + 10
    figures = figures_of(
        [moment(99.0, 5.0, 0.02, 1.0), moment(began, 6.0, 0.1, 2.0), moment(ended, 7.1, 0.21, 4.2)], steps
    )
    assert figures["cpu_ms_per_step.trainer"] == pytest.approx(100.0)
    assert figures["trainer_cpu_us_per_token"] == pytest.approx(100.0)
    assert figures["http_cpu_ms_per_trajectory"] == pytest.approx(200.0 / (GROUPS * GROUP_SIZE))
    assert figures["stream_ms_per_trajectory"] == pytest.approx(6.4 / (GROUPS * GROUP_SIZE))
    assert figures["step_ms"] == pytest.approx(1000.0)
    assert (figures["start_cpu_s.trainer"], figures["idle_mib.redis"]) == (5.0, 2.0)
    assert "start_cpu_s.redis" not in figures, "two hundredths of a second say nothing"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "-P", "-m", "services", "rollout-server", "--run-id", "r"], "rollout server"),
        (["python", "-P", "-m", ENGINE_PROCESS, "5", "--run-id", "r"], "rollout server"),
        (["python", "-P", "-m", "services", "run-environment", "--name", "gateway"], "runner"),
        (["/opt/valkey-server", "--port", "1"], "redis"),
        (["python", "-P", "-m", "services", "sft"], None),
        (["python", "-P", "-m", "services"], None),
        ([], None),
    ],
)
def test_services_are_known_by_what_started_them(command: list[str], name: str | None) -> None:
    assert name_of(command) == name


@pytest.mark.slow
async def test_agents_calls_are_measured_at_a_fleet_of_a_checkout(tmp_path: Path) -> None:
    calls = await asyncio.to_thread(make_calls, tmp_path / "model")
    async with client() as http, standing_fleet(here(), tmp_path / "model", calls[:4], http) as agents:
        figures = await agents.figures()
    assert set(figures) == {way + name for way in (CALL, STREAMED) for name in CALLED}
    assert all(value > 0.0 for value in figures.values())

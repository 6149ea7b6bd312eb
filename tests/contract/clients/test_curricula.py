"""Curricula of the runner on a real rollout server: what is skipped, what is told of it, and what a restart knows."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from clients.environments.base import Answer, Ended, FiniteEnvironment, Problem, Split, place_in_pass
from clients.environments.registry import make_environment
from clients.runner.curricula import Curricula
from clients.runner.tasks import PlayedTask
from services.policies.training.curriculum import CurriculumRules
from services.wire.errors import UsageError
from tests.contract.clients.test_several_tasks import plan_for, play
from tests.support.rollout_host import hosting, small_batch
from tests.support.scripted_engine import ScriptedEngine

COUNT = 12
RULES = CurriculumRules(longest_rest=2, least_share=0.1)


class Rows:
    """A third of its problems is always solved, a third never, and of a third every other sibling is."""

    def __init__(self, name: str = "rows") -> None:
        self.name = name
        self.played: list[int] = []

    def count(self, split: Split) -> int:
        return COUNT

    def numbered(self, split: Split, number: int) -> Problem:
        return Problem(split, number, prompt=f"{number}=", solution=str(number))

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        return self.numbered(split, place_in_pass(self.name, split, index, seed, COUNT))

    def start(self, problem: Problem) -> Row:
        self.played.append(problem.index)
        return Row(self, problem)


class Row:
    def __init__(self, rows: Rows, problem: Problem) -> None:
        self.problem, self.first_turn = problem, problem.prompt
        self.member = rows.played.count(problem.index)

    def respond(self, answer: Answer) -> Ended:
        right = (True, False, self.member % 2 == 0)[self.problem.index % 3]
        return Ended(float(right), right, {"row": float(self.problem.index)})


async def test_what_teaches_nothing_is_played_less_and_a_restart_goes_on_in_its_pass(
    redis_url: str, run_id: str, tiny_policy: Path, tmp_path: Path
) -> None:
    rows, other = Rows(), make_environment("running-sums")
    assert isinstance(rows, FiniteEnvironment)
    tasks = [PlayedTask(rows, max_tokens=2, parts=3), PlayedTask(other, max_tokens=2, parts=1)]
    plan = plan_for(tmp_path, tasks, curriculum=RULES, concurrency=2)
    file = tmp_path / "curriculum-mine.json"
    settings = small_batch(k=50, batch=4)
    async with hosting(
        ScriptedEngine(answer_length=1), redis_url=redis_url, run_id=run_id, model=tiny_policy, settings=settings
    ) as host:
        await play(host, plan, 60)
        kept = json.loads(file.read_text(encoding="utf-8"))["rows"]["state"]
        rows.played.clear()
        await play(host, plan, 60)
        published = await host.published()

    assert kept["passed"] >= 2
    left = kept["playing"][kept["place"] :]
    again = list(dict.fromkeys(rows.played))
    assert again[: len(left)] == left, "the pass that it was in goes on"
    groups = {one.group_ordinal: one for one in published if one.task == "rows"}
    played = Counter(int(one.reward_components["row"]) % 3 for one in groups.values())
    assert played[2] > 1.5 * played[0] and played[2] > 1.5 * played[1], "what teaches something is played more"
    shares = [groups[ordinal].reward_components["curriculum_skipped"] for ordinal in sorted(groups)]
    assert shares[0] == 0.0 and max(shares) == pytest.approx(8 / 12)
    assert not any("curriculum_skipped" in one.reward_components for one in published if one.task != "rows")


def test_a_curriculum_of_nothing_finite_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"running-sums has a count of problems.*curriculum\.enabled"):
        Curricula.opened([("running-sums", make_environment("running-sums"))], 1, RULES, tmp_path, "mine")
    assert (
        Curricula.opened([("running-sums", make_environment("running-sums"))], 1, None, tmp_path, "mine").of(0) is None
    )


async def test_other_problems_or_a_broken_file_begin_anew_and_another_runner_has_another_order(tmp_path: Path) -> None:
    def drawn(runner: str | None, rows: Rows) -> list[int]:
        curricula = Curricula.opened([("rows", rows)], 1, RULES, tmp_path, runner)
        found = []
        for _ in range(COUNT):
            problem = curricula.draw(0)
            assert problem is not None
            found.append(problem.index)
        return found

    async def half(rows: Rows) -> list[int]:
        async with Curricula.opened([("rows", rows)], 1, RULES, tmp_path, "mine") as curricula:
            for _ in range(COUNT // 2):
                assert curricula.draw(0) is not None
        return drawn("mine", rows)

    first, other = drawn("mine", Rows()), drawn("yours", Rows())
    assert sorted(first) == sorted(other) == list(range(COUNT)) and first != other
    assert (await half(Rows()))[: COUNT // 2] == first[COUNT // 2 :]

    class Others(Rows):
        def numbered(self, split: Split, number: int) -> Problem:
            return replace(super().numbered(split, number), prompt=f"{number}+0=")

    assert drawn("mine", Others()) == first
    file = tmp_path / "curriculum-mine.json"
    kept = json.loads(file.read_text())
    kept["rows"]["state"]["playing"] = [COUNT]
    for text in ("{", json.dumps(kept)):
        file.write_text(text)
        assert drawn("mine", Rows()) == first
    assert drawn(None, Rows()) != first
    assert not (tmp_path / "curriculum-None.json").exists()

"""Evaluations beside training: when they are made, what is left out, what a failed one costs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from clients.rollout.server_pool import ServerPool
from clients.runner.evaluation import PeriodicEvaluation, Terms, due
from clients.runner.measured import Measured
from services.wire.errors import DeadlineError
from services.wire.rollout_api import Evaluation, EvaluationAnswers, ShownAnswer


class Run:
    """A server that keeps what it is told, and is the whole pool."""

    def __init__(self, known: Sequence[int] = ()) -> None:
        self.told: list[EvaluationAnswers] = []
        self._known = known

    async def choose(self) -> Run:
        return self

    async def evaluations(self) -> list[Evaluation]:
        return [Evaluation.model_construct(due=version) for version in self._known]

    async def tell_evaluation(self, told: EvaluationAnswers) -> None:
        self.told.append(told)


class Measuring:
    """Measurements that take as long as the test says."""

    def __init__(self) -> None:
        self.asked: asyncio.Queue[asyncio.Future[Measured]] = asyncio.Queue()

    async def __call__(self) -> Measured:
        answer = asyncio.get_running_loop().create_future()
        self.asked.put_nowait(answer)
        return await answer


FOUND = Measured(
    task="a-task",
    success=0.5,
    mean_length=2.0,
    solved=[1, 0],
    first_version=20,
    last_version=22,
    mean_reward=0.25,
    components={"tool_calls": (3.0, 4)},
    shown=[ShownAnswer(asked="1+1", answer="2", reward=0.5, success=True)],
)


@asynccontextmanager
async def evaluating(run: Run, measure: Measuring) -> AsyncIterator[PeriodicEvaluation]:
    beside = PeriodicEvaluation(cast(ServerPool, run), Terms(problems=2, every=10), measure)
    task = asyncio.create_task(beside.run())
    try:
        yield beside
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_each_version_that_is_due_is_evaluated_once_and_overdue_ones_are_left_out() -> None:
    run, measure = Run(), Measuring()
    async with evaluating(run, measure) as beside:
        for version in (0, 3, 9, 10, 11):
            beside.serves(version)
        first = await measure.asked.get()
        # Training goes on meanwhile, past two that would be due.
        for version in (19, 20, 29, 31, 12):
            beside.serves(version)
        first.set_result(FOUND)
        second = await measure.asked.get()
        assert [told.due for told in run.told] == [10]
        second.set_result(FOUND)
        beside.serves(40)
        (await measure.asked.get()).cancel()
    assert [told.due for told in run.told] == [10, 30]
    assert run.told[0].solved == [1, 0] and run.told[0].task == "a-task"
    assert run.told[0].mean_reward == 0.25 and run.told[0].shown == []
    assert run.told[0].components == {"tool_calls": 0.75}
    assert (run.told[0].first_version, run.told[0].last_version) == (20, 22)


async def test_one_that_fails_is_left_out_and_the_next_is_made() -> None:
    run, measure = Run(), Measuring()
    async with evaluating(run, measure) as beside:
        beside.serves(10)
        (await measure.asked.get()).set_exception(DeadlineError("no server answered"))
        beside.serves(20)
        (await measure.asked.get()).set_result(FOUND)
        beside.serves(30)
        await measure.asked.get()
    assert [told.due for told in run.told] == [20]


async def test_a_runner_that_starts_again_repeats_none() -> None:
    run, measure = Run(known=(10, 20)), Measuring()
    async with evaluating(run, measure) as beside:
        beside.serves(25)
        beside.serves(30)
        (await measure.asked.get()).set_result(FOUND)
        beside.serves(40)
        await measure.asked.get()
    assert [told.due for told in run.told] == [30]


@given(st.integers(0, 50), st.lists(st.integers(0, 300), max_size=60))
def test_what_is_due_grows_and_is_served(every: int, served: list[int]) -> None:
    done: list[int] = []
    for version in sorted(served):
        found = due(every, version, done[-1] if done else None)
        if found is not None:
            assert found <= version < found + every
            done.append(found)
    assert done == sorted(set(done)) and all(version % every == 0 and version > 0 for version in done)
    expected = {version // every * every for version in served} - {0} if every else set()
    assert set(done) == expected


def test_the_log_tells_a_success_with_its_interval() -> None:
    told = FOUND.in_words()
    assert told["success"] == 0.5
    low, high = (float(bound) for bound in str(told["interval"]).split(" to "))
    assert 0.0 < low < 0.1 and 0.9 < high < 1.0, "two problems tell little"

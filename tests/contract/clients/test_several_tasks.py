"""Several tasks in one run, on a real rollout server: which is played when, each within its limits and in its dialect."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from clients.environments.base import AgentEndpoint, Ended, Problem, Split
from clients.environments.registry import make_environment
from clients.rollout.client import RolloutClient
from clients.runner.evaluation import Terms
from clients.runner.runner import RunnerPlan, run_environment
from clients.runner.tasks import PlayedTask, entered
from services.policies.training.mixture import draw
from services.wire.errors import UsageError
from services.wire.packed import unpack_mask, unpack_tokens
from services.wire.trajectory import Trajectory
from tests.support.agent_playing import numbered, say
from tests.support.rollout_host import Host, hosting, small_batch
from tests.support.scripted_engine import ScriptedEngine
from tests.support.until import until
from trainer.sft.tiny_model import build_tokenizer

SEED = 5


def plan_for(run_dir: Path, tasks: Sequence[PlayedTask], **changes: object) -> RunnerPlan:
    plan = RunnerPlan(
        tasks=tasks,
        seed=SEED,
        group_size=2,
        concurrency=6,
        evaluation=Terms(12),
        run_dir=run_dir,
        name="mine",
        start_deadline_s=20.0,
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


async def play(host: Host, plan: RunnerPlan, groups: int) -> None:
    """Until so many groups more are closed; then the runner is stopped in the middle of whatever it plays."""
    wanted = (await host.ledger.accounts()).closed_groups + groups
    running = asyncio.create_task(run_environment([host.url], plan))

    async def enough() -> bool:
        assert not running.done(), "the runner ended before the run had concluded"
        return (await host.ledger.accounts()).closed_groups >= wanted

    try:
        await until(enough, 30.0)
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def said(trajectory: Trajectory) -> tuple[str, int]:
    """What opened the conversation, and how many tokens were sampled."""
    (segment,) = trajectory.segments
    tokens, sampled = unpack_tokens(segment.token_ids), unpack_mask(segment.loss_mask)
    first = int(sampled.argmax())
    return build_tokenizer().decode(tokens[:first].tolist()), int(sampled.sum())


async def test_which_task_and_problem_a_group_plays_follows_from_its_ordinal_through_a_restart(
    redis_url: str, run_id: str, tiny_policy: Path, tmp_path: Path
) -> None:
    sums, game = make_environment("running-sums"), make_environment("guess-number")
    tasks = [PlayedTask(sums, max_tokens=2, parts=3), PlayedTask(game, max_tokens=5, parts=1, name="the-game")]
    settings, engine = small_batch(k=50, batch=4), ScriptedEngine(answer_length=8)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tiny_policy, settings=settings) as host:
        await play(host, plan_for(tmp_path, tasks), 30)
        opened = (await host.ledger.accounts()).opened_groups
        await play(host, plan_for(tmp_path, tasks), 30)
        published = await host.published()

    assert min(one.group_ordinal for one in published if one.group_ordinal >= opened) == opened, "it goes on there"
    for trajectory in published:
        found = draw((3, 1), SEED, trajectory.group_ordinal)
        environment, limit = ((sums, 2), (game, 5))[found.task]
        assert trajectory.task == ("running-sums", "the-game")[found.task]
        prompt, tokens = said(trajectory)
        assert prompt == environment.problem("train", found.place, SEED).prompt or environment is game
        assert tokens % limit == 0 and tokens >= limit, "each answer ends at its own task's limit"
        assert trajectory.samplings[0].max_tokens == limit
    groups = Counter(one.task for one in {one.group_ordinal: one for one in published}.values())
    assert 2.0 < groups["running-sums"] / groups["the-game"] < 4.0
    measured = json.loads((tmp_path / "evaluation_before.json").read_text(encoding="utf-8"))
    assert [(each["task"], len(each["solved"])) for each in measured["tasks"]] == [
        ("running-sums", 12),
        ("the-game", 12),
    ]
    assert measured["solved"] == measured["tasks"][0]["solved"] + measured["tasks"][1]["solved"]


class Chatting:
    """An agent that fails when a problem is played for the first time, and lives as long as its block."""

    name = "chatting"

    def __init__(self) -> None:
        self.entered = self.left = 0
        self.seen: set[int] = set()

    async def __aenter__(self) -> Chatting:
        self.entered += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        self.left += 1

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        return numbered(split, index, seed)

    async def play(self, problem: Problem, endpoint: AgentEndpoint) -> Ended:
        assert self.entered > self.left
        if problem.split == "train" and problem.index not in self.seen:
            self.seen.add(problem.index)
            raise RuntimeError("the first time")
        await say(endpoint, problem.prompt)
        return Ended(float(endpoint.max_tokens), True, {"problem": float(problem.index)})


class Asking:
    """A text environment."""

    name = "asking"
    first_turn = "hello"

    def problem(self, split: Split, index: int, seed: int) -> Problem:
        return numbered(split, index, seed)

    def start(self, problem: Problem) -> Asking:
        return self

    def respond(self, answer: object) -> Ended:
        return Ended(1.0, False)


async def test_each_task_keeps_its_dialect_and_its_life_and_what_was_lost_is_played_in_its_own_task(
    redis_url: str, run_id: str, chat_policy: Path, tmp_path: Path
) -> None:
    agent, asking = Chatting(), Asking()
    tasks = [
        PlayedTask(agent, max_tokens=6),
        PlayedTask(asking, max_tokens=4, dialect="auto", name="in-chat"),  # type: ignore[arg-type]
        PlayedTask(asking, max_tokens=3, dialect="text", name="in-text"),  # type: ignore[arg-type]
    ]
    settings, engine = small_batch(k=50, batch=4), ScriptedEngine(answer_length=2, max_model_len=2048)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=chat_policy, settings=settings) as host:
        await play(host, plan_for(tmp_path, tasks, evaluation=Terms(2)), 40)
        published = await host.published()
    assert (agent.entered, agent.left) == (1, 1)
    by_task = {name: [one for one in published if one.task == name] for name in ("chatting", "in-chat", "in-text")}
    assert all(by_task.values())
    for trajectory in by_task["chatting"]:
        assert trajectory.reward == 6.0
    moved = [one for one in by_task["chatting"] if draw((1, 1, 1), SEED, one.group_ordinal).task != 0]
    assert moved, "a lost problem is played in the next group, whatever task that one's ordinal stands for"
    lengths = {name: {len(unpack_tokens(one.segments[0].token_ids)) for one in of} for name, of in by_task.items()}
    assert max(lengths["in-text"]) < min(lengths["in-chat"]), "only one of them is within the template"


async def test_two_tasks_of_one_name_are_refused_before_anything_is_played() -> None:
    task = PlayedTask(make_environment("running-sums"), max_tokens=4)
    with pytest.raises(UsageError, match="two tasks are named 'running-sums'"):
        async with entered([task, task], RolloutClient("http://127.0.0.1:1"), 1.0):
            raise AssertionError("unreachable")

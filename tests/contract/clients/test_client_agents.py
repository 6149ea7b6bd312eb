"""Agents as environments against real rollout servers: rewarded, lost, kept alive, cancelled, without harm to the rest."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from clients.environments.base import AgentEndpoint, AgentEnvironment, AnyEnvironment, Ended, Problem, agent_environment
from clients.environments.chat import ChatEnvironment
from clients.environments.registry import make_environment
from clients.runner.agent_episodes import EpisodeLimits, Lost, abort
from clients.runner.agent_episodes import open_group as opening_of
from clients.runner.failures import GroupLostError
from clients.runner.groups import evaluate_group, play_to_end
from clients.runner.runner import run_environment
from clients.runner.text_episodes import Played
from rollout_server.lifecycle.expire import LEFT_AFTER_S
from services.wire.rollout_api import OpenGroup
from tests.support.agent_playing import (
    A_PROBLEM,
    SAMPLING,
    closed_groups,
    numbered,
    one_call,
    open_group,
    plan_for,
    playing,
    say,
    states,
)
from tests.support.until import until


async def test_agents_of_a_run_are_captured_each_in_its_own_session(
    redis_url: str, run_id: str, chat_policy: Path, tmp_path: Path
) -> None:
    environment = agent_environment("letters", numbered, one_call)
    async with playing(redis_url, run_id, chat_policy) as (host, _):
        running = asyncio.create_task(run_environment([host.url], plan_for(environment, tmp_path)))
        await closed_groups(host, 6, running)
        await host.ledger.conclude(0)
        await asyncio.wait_for(running, 10.0)
        trajectories = await host.published()
    assert len({one.trajectory_id for one in trajectories}) == len(trajectories) >= 18
    assert set(Counter(one.group_id for one in trajectories).values()) == {3}
    for one in trajectories:
        assert one.task == "letters"
        assert one.sampled_tokens() > 0
        assert one.reward_components == {"success": 1.0, "letters": one.reward}
    report = json.loads((tmp_path / "evaluation.json").read_text(encoding="utf-8"))
    assert report["success_before"] == report["success_after"] == 1.0
    assert report["mean_length_before"] == 4.0


async def test_blocking_agents_play_side_by_side_in_threads(redis_url: str, run_id: str, chat_policy: Path) -> None:
    together = threading.Barrier(8, timeout=15.0)

    def blocking(problem: Problem, endpoint: AgentEndpoint) -> Ended:
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        body = {"model": "any", "messages": [{"role": "user", "content": problem.prompt}]}
        httpx.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers).raise_for_status()
        together.wait()
        return Ended(reward=1.0, success=True)

    environment = agent_environment("blocking", numbered, blocking)
    async with playing(redis_url, run_id, chat_policy) as (host, client):
        group = await open_group(client, 8)
        played = await play_to_end(client, environment, group, A_PROBLEM, SAMPLING, EpisodeLimits(20.0))
        assert len(played) == 8
        assert len(await host.published()) == 8


@pytest.mark.parametrize("blocking", [False, True])
async def test_in_an_evaluation_an_agent_that_raises_loses_its_own_episode_and_says_where(
    redis_url: str, run_id: str, chat_policy: Path, blocking: bool
) -> None:
    async def fragile(problem: Problem, endpoint: AgentEndpoint) -> Ended:
        await say(endpoint, problem.prompt)
        if problem.index == 0:
            raise LookupError("no such tool")
        return Ended(reward=1.0, success=True)

    def exits(problem: Problem, endpoint: AgentEndpoint) -> Ended:
        if problem.index == 0:
            raise SystemExit("the agent's own command line said so")
        return asyncio.run(one_call(problem, endpoint))

    environment = agent_environment("fragile", numbered, exits if blocking else fragile)
    async with playing(redis_url, run_id, chat_policy) as (_, client):
        group = await open_group(client, 3, "evaluate")
        problems = [numbered("held_out", index, 1) for index in range(3)]
        lost, *others = await evaluate_group(client, environment, group, problems, SAMPLING, EpisodeLimits(10.0))
        assert isinstance(lost, Lost)
        assert lost.cause == "environment"
        why = "SystemExit" if blocking else "LookupError: no such tool (test_client_agents.py:"
        assert why in lost.why
        assert all(isinstance(one, Played) and one.tokens == 4 for one in others)
        assert (await states(client, group)) == ["aborted", "finished", "finished"]


async def test_in_training_siblings_stand_and_fall_together(redis_url: str, run_id: str, chat_policy: Path) -> None:
    """Half a group would not be trained, and would keep the trainer waiting for the other half."""
    first = iter([True, False, False])
    cancelled: list[str] = []

    async def fragile(problem: Problem, endpoint: AgentEndpoint) -> Ended:
        fails = next(first)
        await say(endpoint, problem.prompt)
        if fails:
            await asyncio.sleep(0.1)
            raise LookupError("no such tool")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(endpoint.session_id)
            raise
        return Ended(reward=1.0, success=True)

    environment = agent_environment("fragile", numbered, fragile)
    async with playing(redis_url, run_id, chat_policy) as (host, client):
        group = await open_group(client, 3)
        with pytest.raises(GroupLostError, match="LookupError: no such tool") as lost:
            await play_to_end(client, environment, group, A_PROBLEM, SAMPLING, EpisodeLimits(10.0))
        assert lost.value.cause == "environment"
        assert len(cancelled) == 2
        assert (await states(client, group)) == ["aborted"] * 3
        assert await host.published() == []
        assert (await host.ledger.accounts()).closed_groups == 1


async def test_an_agent_that_runs_out_of_time_is_cancelled_and_its_session_aborted(
    redis_url: str, run_id: str, chat_policy: Path
) -> None:
    cancelled = asyncio.Event()

    async def slow(problem: Problem, endpoint: AgentEndpoint) -> Ended:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()
        raise AssertionError

    judged = threading.Event()

    def stuck(problem: Problem, endpoint: AgentEndpoint) -> Ended:
        judged.wait(60)
        return Ended(1.0, True)

    async with playing(redis_url, run_id, chat_policy) as (_, client):
        for play in (slow, stuck):
            group = await open_group(client, 1)
            environment: AgentEnvironment = agent_environment("slow", numbered, play)  # type: ignore[arg-type]
            with pytest.raises(GroupLostError, match=r"no end after 0\.2 s") as lost:
                async with asyncio.timeout(15.0):
                    await play_to_end(client, environment, group, A_PROBLEM, SAMPLING, EpisodeLimits(0.2))
            assert lost.value.cause == "timeout"
            assert await states(client, group) == ["aborted"]
    judged.set()
    assert cancelled.is_set()


async def test_what_is_no_reward_is_the_agents_fault(redis_url: str, run_id: str, chat_policy: Path) -> None:
    async def forgetful(problem: Problem, endpoint: AgentEndpoint) -> Ended:
        await say(endpoint, "x")
        return Ended(float("nan"), True) if problem.index else None  # type: ignore[return-value]

    environment = agent_environment("forgetful", numbered, forgetful)
    async with playing(redis_url, run_id, chat_policy) as (_, client):
        for index, complaint in enumerate(["play returned None", "finite number"]):
            group = await open_group(client, 1)
            with pytest.raises(GroupLostError, match=complaint) as lost:
                problem = numbered("train", index, 1)
                await play_to_end(client, environment, group, problem, SAMPLING, EpisodeLimits(10.0))
            assert lost.value.cause == "environment"
            assert await states(client, group) == ["aborted"]


async def test_a_heartbeat_keeps_the_session_of_a_long_agent_alive(
    redis_url: str, run_id: str, chat_policy: Path
) -> None:
    first = iter([True, False] * 2)

    async def ponders(problem: Problem, endpoint: AgentEndpoint) -> Ended:
        await say(endpoint, "x")
        if next(first):
            await asyncio.sleep(2.0)
            await say(endpoint, "y")
        return Ended(1.0, True)

    environment = agent_environment("ponders", numbered, ponders)
    async with playing(redis_url, run_id, chat_policy, timeout_s=0.6) as (_, client):
        # The sibling that has ended is kept alive too, until the group is whole.
        group = await open_group(client, 2)
        await play_to_end(client, environment, group, A_PROBLEM, SAMPLING, EpisodeLimits(30.0, 0.1))
        assert await states(client, group) == ["finished", "finished"]
        # Without it the session expires; then the next heartbeat says so, and the agent is not waited for.
        group = await open_group(client, 2)
        with pytest.raises(GroupLostError) as lost:
            await play_to_end(client, environment, group, A_PROBLEM, SAMPLING, EpisodeLimits(30.0, 1.4))
        assert lost.value.cause == "session"


async def test_cancelling_the_runner_ends_at_once_and_leaves_no_session_open(
    redis_url: str, run_id: str, chat_policy: Path, tmp_path: Path
) -> None:
    opened: list[str] = []
    all_opened = asyncio.Event()

    async def stubborn(problem: Problem, endpoint: AgentEndpoint) -> Ended:
        await say(endpoint, "x")
        if problem.split == "train":
            opened.append(endpoint.session_id)
            if len(opened) == 6:
                all_opened.set()
            await asyncio.sleep(60)
        return Ended(1.0, True)

    environment = agent_environment("stubborn", numbered, stubborn)
    async with playing(redis_url, run_id, chat_policy) as (host, client):
        running = asyncio.create_task(run_environment([host.url], plan_for(environment, tmp_path)))
        await asyncio.wait_for(all_opened.wait(), 10.0)
        running.cancel()
        done, _ = await asyncio.wait({running}, timeout=15.0)
        assert done and running.cancelled()
        for session_id in opened:
            assert (await client.session_status(session_id)).state == "aborted"
        assert (await host.report())["open_groups"] == 0


@pytest.mark.parametrize("kind", ["agent", "text"])
async def test_a_cancelled_group_is_aborted_whatever_its_kind(
    redis_url: str, run_id: str, chat_policy: Path, kind: str
) -> None:
    environment: AnyEnvironment = make_environment("running-sums")
    problem = environment.problem("train", 0, 1)
    if kind == "agent":
        environment = ChatEnvironment(environment)  # type: ignore[arg-type]
    async with playing(redis_url, run_id, chat_policy, step_s=0.5) as (_, client):
        group = await open_group(client, 2)
        play = play_to_end(client, environment, group, problem, SAMPLING, EpisodeLimits(10.0))
        task = asyncio.create_task(play)
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await states(client, group) == ["aborted", "aborted"]


async def test_whoever_is_cancelled_while_a_group_opens_leaves_none_behind(
    redis_url: str, run_id: str, chat_policy: Path
) -> None:
    opening = OpenGroup(task="agents", group_size=2, sampling=SAMPLING, purpose="train")
    async with playing(redis_url, run_id, chat_policy) as (host, client):
        for moments in range(12):
            asking = asyncio.create_task(opening_of(client, opening))
            for _ in range(moments):
                await asyncio.sleep(0.0005)
            asking.cancel()
            with suppress(asyncio.CancelledError):
                await abort(client, (await asking).session_ids)

        async def all_closed() -> bool:
            return (await host.report())["open_groups"] == 0

        await until(all_closed, LEFT_AFTER_S / 4)
        assert (await host.ledger.accounts()).opened_groups > 0

"""Agents as environments against real rollout servers: rewarded, lost, kept alive, cancelled, without harm to the rest."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import httpx
import pytest
from structlog.testing import capture_logs

from clients.agent import AgentEndpoint, AgentEnvironment, agent_environment
from clients.agent_play import EpisodeLimits, Lost
from clients.chat import ChatEnvironment, chat
from clients.dialect import in_dialect
from clients.environment import Ended, Problem, Split
from clients.environments import make_environment
from clients.evaluation import evaluate
from clients.group_play import AnyEnvironment, evaluate_group, play_to_end
from clients.losses import GroupLostError, TooManyLostError
from clients.play import Played
from clients.rollout import RolloutClient
from clients.runner import RunnerPlan, run_environment
from clients.server_pool import ServerPool
from services.wire.errors import RollmeshError
from services.wire.packed import unpack_mask
from services.wire.rollout_api import GroupOpened, OpenGroup, Purpose, SamplingBody
from tests.support.chat_policy import save_chat_policy
from tests.support.rollout_host import Host, hosting, small_batch
from tests.support.scripted_engine import ScriptedEngine

SAMPLING = SamplingBody(max_tokens=8, temperature=1.0)


@pytest.fixture(scope="module")
def chat_policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat-policy") / "model"
    save_chat_policy(folder)
    return folder


def numbered(split: Split, index: int, seed: int) -> Problem:
    return Problem(split, index, prompt=f"{split} {index} {seed}")


A_PROBLEM = numbered("train", 0, 1)


async def say(endpoint: AgentEndpoint, text: str) -> str:
    async with aiohttp.ClientSession() as http:
        _, answer = await chat(http, endpoint, [{"role": "user", "content": text}])
        return answer.text


async def one_call(problem: Problem, endpoint: AgentEndpoint) -> Ended:
    said = await say(endpoint, problem.prompt)
    return Ended(reward=float(len(said)), success=True, components={"letters": float(len(said))})


def plan_for(environment: AnyEnvironment, run_dir: Path, **changes: object) -> RunnerPlan:
    plan = {
        "environment": environment,
        "seed": 5,
        "group_size": 3,
        "temperature": 1.0,
        "max_tokens": 8,
        "concurrency": 2,
        "evaluation_problems": 4,
        "run_dir": run_dir,
        "start_deadline_s": 20.0,
    }
    return RunnerPlan(**(plan | changes))  # type: ignore[arg-type]


@asynccontextmanager
async def playing(
    redis_url: str, run_id: str, model: Path, *, timeout_s: float = 120.0, step_s: float = 0.0
) -> AsyncIterator[tuple[Host, RolloutClient]]:
    """A server, and a client of it, for groups that are played one by one."""
    engine = ScriptedEngine(answer_length=3, max_model_len=2048, step_s=step_s)
    settings = small_batch(k=50, batch=4, timeout_s=timeout_s)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=model, settings=settings) as host:
        async with RolloutClient(host.url, patience_s=0.2) as client:
            yield host, client


async def open_group(client: RolloutClient, size: int, purpose: Purpose = "train") -> GroupOpened:
    return await client.open_group(OpenGroup(task="agents", group_size=size, sampling=SAMPLING, purpose=purpose))


async def states(client: RolloutClient, group: GroupOpened) -> list[str]:
    found = []
    for session_id in group.session_ids:
        try:
            found.append((await client.session_status(session_id)).state)
        except RollmeshError as error:
            found.append(error.code)
    return found


async def closed_groups(host: Host, at_least: int, running: asyncio.Task[None]) -> None:
    async with asyncio.timeout(20.0):
        while (await host.ledger.accounts()).closed_groups < at_least:
            assert not running.done(), "the runner ended before the run had concluded"
            await asyncio.sleep(0.01)


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
    def blocking(problem: Problem, endpoint: AgentEndpoint) -> Ended:
        headers = {"Authorization": f"Bearer {endpoint.api_key}"}
        body = {"model": "any", "messages": [{"role": "user", "content": problem.prompt}]}
        httpx.post(f"{endpoint.base_url}/chat/completions", json=body, headers=headers).raise_for_status()
        time.sleep(0.3)
        return Ended(reward=1.0, success=True)

    environment = agent_environment("blocking", numbered, blocking)
    async with playing(redis_url, run_id, chat_policy) as (host, client):
        group = await open_group(client, 8)
        began = time.monotonic()
        played = await play_to_end(client, environment, group, A_PROBLEM, SAMPLING, EpisodeLimits(10.0))
        assert len(played) == 8
        assert time.monotonic() - began < 1.5
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

    def stuck(problem: Problem, endpoint: AgentEndpoint) -> Ended:
        time.sleep(2)
        return Ended(1.0, True)

    async with playing(redis_url, run_id, chat_policy) as (_, client):
        for play in (slow, stuck):
            group = await open_group(client, 1)
            environment: AgentEnvironment = agent_environment("slow", numbered, play)  # type: ignore[arg-type]
            began = time.monotonic()
            with pytest.raises(GroupLostError, match=r"no end after 0\.2 s") as lost:
                await play_to_end(client, environment, group, A_PROBLEM, SAMPLING, EpisodeLimits(0.2))
            assert time.monotonic() - began < 1.0
            assert lost.value.cause == "timeout"
            assert await states(client, group) == ["aborted"]
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
        began = time.monotonic()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert time.monotonic() - began < 1.0
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


async def test_a_run_that_concludes_does_not_wait_for_agents_that_think(
    redis_url: str, run_id: str, chat_policy: Path, tmp_path: Path
) -> None:
    thinking = asyncio.Event()

    async def thinker(problem: Problem, endpoint: AgentEndpoint) -> Ended:
        await say(endpoint, "x")
        if problem.split == "train":
            thinking.set()
            await asyncio.sleep(60)
        return Ended(1.0, True)

    environment = agent_environment("thinker", numbered, thinker)
    async with playing(redis_url, run_id, chat_policy) as (host, _):
        running = asyncio.create_task(run_environment([host.url], plan_for(environment, tmp_path)))
        await asyncio.wait_for(thinking.wait(), 10.0)
        await host.ledger.conclude(0)
        await asyncio.wait_for(running, 6.0)
    assert (tmp_path / "evaluation.json").exists()


async def test_an_environment_with_resources_is_entered_and_left(
    redis_url: str, run_id: str, chat_policy: Path, tmp_path: Path
) -> None:
    class Serving:
        name = "serving"

        def __init__(self) -> None:
            self.said: list[str] = []

        async def __aenter__(self) -> Serving:
            self.said.append("entered")
            return self

        async def __aexit__(self, *_: object) -> None:
            self.said.append("left")

        def problem(self, split: Split, index: int, seed: int) -> Problem:
            return numbered(split, index, seed)

        async def play(self, problem: Problem, endpoint: AgentEndpoint) -> Ended:
            assert self.said == ["entered"]
            return await one_call(problem, endpoint)

    environment = Serving()
    async with playing(redis_url, run_id, chat_policy) as (host, _):
        await host.ledger.conclude(0)
        await asyncio.wait_for(run_environment([host.url], plan_for(environment, tmp_path)), 20.0)
    assert environment.said == ["entered", "left"]


async def test_a_lost_problem_is_played_again_and_then_given_up(
    redis_url: str, run_id: str, chat_policy: Path, tmp_path: Path
) -> None:
    plays: Counter[int] = Counter()

    async def cursed(problem: Problem, endpoint: AgentEndpoint) -> Ended:
        await say(endpoint, "x")
        if problem.split == "train":
            plays[problem.index] += 1
            if problem.index == 1 or (problem.index == 2 and plays[2] == 1):
                raise RuntimeError("cursed")
        return Ended(1.0, True)

    environment = agent_environment("cursed", numbered, cursed)
    async with playing(redis_url, run_id, chat_policy) as (host, _):
        with capture_logs() as logs:
            plan = plan_for(environment, tmp_path, group_size=1, concurrency=1, retries=2)
            running = asyncio.create_task(run_environment([host.url], plan))
            await closed_groups(host, 12, running)
            await host.ledger.conclude(0)
            await asyncio.wait_for(running, 10.0)
    assert plays[1] == 3, "played, and played again twice"
    assert plays[0] == 1
    lost = [line for line in logs if line["event"] == "group lost"]
    assert [(line["problem"], line["attempt"], line["again"]) for line in lost[:3]] == [
        (1, 0, True),
        (1, 1, True),
        (1, 2, False),
    ]
    assert all(line["cause"] == "environment" and "cursed" in line["why"] for line in lost)


async def test_an_environment_that_always_fails_ends_the_run_with_its_reason(
    redis_url: str, run_id: str, chat_policy: Path, tmp_path: Path
) -> None:
    async def broken(problem: Problem, endpoint: AgentEndpoint) -> Ended:
        if problem.split == "train":
            raise KeyError("answer")
        return await one_call(problem, endpoint)

    environment = agent_environment("broken", numbered, broken)
    async with playing(redis_url, run_id, chat_policy) as (host, _):
        with pytest.raises(TooManyLostError, match=r"KeyError: 'answer' \(test_client_agents\.py:\d+\)"):
            await asyncio.wait_for(
                run_environment([host.url], plan_for(environment, tmp_path, group_size=1, concurrency=16)), 20.0
            )
        assert (await host.report())["open_groups"] == 0


async def test_a_broken_environment_of_texts_is_lost_as_a_group(redis_url: str, run_id: str, tiny_policy: Path) -> None:
    class Broken:
        name = "broken"
        first_turn = "12="

        def problem(self, split: Split, index: int, seed: int) -> Problem:
            return numbered(split, index, seed)

        def start(self, problem: Problem) -> Broken:
            return self

        def respond(self, answer: object) -> Ended:
            raise ZeroDivisionError("a bug")

    async with playing(redis_url, run_id, tiny_policy) as (_, client):
        group = await open_group(client, 2)
        with pytest.raises(GroupLostError, match="ZeroDivisionError: a bug") as lost:
            await play_to_end(client, Broken(), group, A_PROBLEM, SAMPLING, EpisodeLimits(10.0))
        assert lost.value.cause == "environment"
        assert await states(client, group) == ["aborted", "aborted"]


async def test_a_server_that_dies_under_agents_is_passed_over(
    redis_url: str, run_id: str, chat_policy: Path, tmp_path: Path
) -> None:
    environment = agent_environment("letters", numbered, one_call)
    async with AsyncExitStack() as stack:
        kept, _ = await stack.enter_async_context(playing(redis_url, run_id, chat_policy))
        async with hosting(
            ScriptedEngine(answer_length=3, max_model_len=2048, step_s=0.02),
            redis_url=redis_url,
            run_id=run_id,
            model=chat_policy,
            settings=small_batch(k=50, batch=4),
            server_id="s1",
        ) as doomed:
            plan = plan_for(environment, tmp_path, concurrency=4)
            running = asyncio.create_task(run_environment([kept.url, doomed.url], plan))
            await closed_groups(kept, 8, running)
        before = (await kept.ledger.accounts()).closed_groups
        await closed_groups(kept, before + 20, running)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_episodes_that_are_lost_in_an_evaluation_count_as_not_solved(
    redis_url: str, run_id: str, chat_policy: Path
) -> None:
    async def half(problem: Problem, endpoint: AgentEndpoint) -> Ended:
        assert endpoint.temperature == 0.0
        if problem.index % 2:
            raise RuntimeError("odd")
        return await one_call(problem, endpoint)

    environment = agent_environment("half", numbered, half)
    async with playing(redis_url, run_id, chat_policy) as (host, client):
        measured = await evaluate(
            ServerPool([client]), environment, seed=1, problems=40, max_tokens=8, limits=EpisodeLimits(10.0)
        )
        assert measured.success == 0.5
        assert measured.mean_length == 2.0
        assert await host.published() == []


async def test_an_environment_of_texts_plays_through_chat_in_one_segment(
    redis_url: str, run_id: str, chat_policy: Path
) -> None:
    class Echo:
        """Three turns, each of which names what was said before."""

        name = "echo"

        def __init__(self) -> None:
            self.first_turn, self.turns = "hello", 0

        def problem(self, split: Split, index: int, seed: int) -> Problem:
            return numbered(split, index, seed)

        def start(self, problem: Problem) -> Echo:
            return Echo()

        def respond(self, answer: object) -> object:
            from clients.environment import NextTurn

            self.turns += 1
            return NextTurn(f"again {self.turns}") if self.turns < 3 else Ended(2.0, True)

    async with playing(redis_url, run_id, chat_policy) as (host, client):
        environment = await in_dialect(client, Echo(), "auto")  # type: ignore[arg-type]
        assert isinstance(environment, ChatEnvironment)
        group = await open_group(client, 1)
        await play_to_end(client, environment, group, A_PROBLEM, SAMPLING, EpisodeLimits(10.0))
        (trajectory,) = await host.published()
    assert len(trajectory.segments) == 1
    mask = unpack_mask(trajectory.segments[0].loss_mask).tolist()
    stretches = sum(1 for before, now in zip([0, *mask], mask, strict=False) if now > before)
    assert stretches == 3
    assert trajectory.reward == 2.0


async def test_a_model_without_a_template_is_spoken_to_in_plain_text(
    redis_url: str, run_id: str, tiny_policy: Path
) -> None:
    environment = make_environment("running-sums")
    async with playing(redis_url, run_id, tiny_policy) as (host, client):
        assert await in_dialect(client, environment, "auto") is environment
        assert isinstance(await in_dialect(client, environment, "chat"), ChatEnvironment)
        assert (await host.report())["open_groups"] == 0

"""Agents and their problems for tests that play them at a real server with a scripted engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp

from clients.environments.base import AgentEndpoint, AnyEnvironment, Ended, Problem, Split
from clients.environments.chat import chat
from clients.rollout.client import RolloutClient
from clients.runner.evaluation import Terms
from clients.runner.runner import RunnerPlan
from clients.runner.tasks import PlayedTask
from services.wire.errors import RollmeshError
from services.wire.rollout_api import GroupOpened, OpenGroup, Purpose, SamplingBody
from tests.support.rollout_host import Host, hosting, small_batch
from tests.support.scripted_engine import ScriptedEngine

SAMPLING = SamplingBody(max_tokens=8, temperature=1.0)


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


def plan_for(
    environment: AnyEnvironment, run_dir: Path, episode_timeout_s: float = 600.0, **changes: object
) -> RunnerPlan:
    plan = {
        "tasks": [PlayedTask(environment, max_tokens=8, episode_timeout_s=episode_timeout_s)],
        "seed": 5,
        "group_size": 3,
        "concurrency": 2,
        "evaluation": Terms(4),
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

"""The rollout client and the environment runner against real rollout servers (a scripted engine decides the tokens)."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from clients.environments.registry import make_environment
from clients.rollout.client import RolloutClient
from clients.rollout.transport import ServerUnreachableError
from clients.runner.evaluation import Terms
from clients.runner.runner import RunnerPlan, run_environment
from clients.runner.tasks import PlayedTask
from services.config.settings import RunSettings
from services.wire.errors import CapacityError, ConcludedError, ContextLengthError, NotFoundError
from services.wire.packed import unpack_mask, unpack_tokens
from services.wire.rollout_api import FinishGroup, OpenGroup, SamplingBody, TakeTurns, Turn
from tests.conftest import free_port
from tests.support.rollout_host import Host, hosting, small_batch
from tests.support.scripted_engine import ScriptedEngine
from trainer.sft.tiny_model import build_tokenizer

SAMPLING = SamplingBody(max_tokens=8)


def plan_for(run_dir: Path, task: str = "running-sums", *, concurrency: int = 4) -> RunnerPlan:
    return RunnerPlan(
        tasks=[PlayedTask(make_environment(task), max_tokens=8)],
        seed=5,
        group_size=3,
        concurrency=concurrency,
        evaluation=Terms(40),
        run_dir=run_dir,
        start_deadline_s=20.0,
    )


@asynccontextmanager
async def two_hosts(redis_url: str, run_id: str, model: Path, settings: RunSettings) -> AsyncIterator[list[Host]]:
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                hosting(
                    ScriptedEngine(answer_length=1),
                    redis_url=redis_url,
                    run_id=run_id,
                    model=model,
                    settings=settings,
                    server_id=f"s{index}",
                )
            )
            for index in range(2)
        ]


async def closed_groups(host: Host, at_least: int, running: asyncio.Task[None]) -> None:
    async with asyncio.timeout(20.0):
        while (await host.ledger.accounts()).closed_groups < at_least:
            assert not running.done(), "the runner ended before the run had concluded"
            await asyncio.sleep(0.01)


async def test_a_run_is_played_on_both_servers_and_every_group_has_its_own_problem(
    redis_url: str, run_id: str, tiny_policy: Path, tmp_path: Path
) -> None:
    async with two_hosts(redis_url, run_id, tiny_policy, small_batch(k=9, batch=4)) as hosts:
        running = asyncio.create_task(run_environment([host.url for host in hosts], plan_for(tmp_path)))
        await closed_groups(hosts[0], 24, running)
        await hosts[0].ledger.conclude(0)
        await asyncio.wait_for(running, 20.0)
        trajectories = await hosts[0].published()

    tokenizer = build_tokenizer()
    environment = make_environment("running-sums")
    assert {trajectory.server_id for trajectory in trajectories} == {"s0", "s1"}
    ordinals = {trajectory.group_ordinal for trajectory in trajectories}
    assert ordinals >= set(range(20))
    for trajectory in trajectories:
        (segment,) = trajectory.segments
        tokens, sampled = unpack_tokens(segment.token_ids), unpack_mask(segment.loss_mask)
        problem = environment.problem("train", trajectory.group_ordinal, 5)
        assert tokenizer.decode(tokens[sampled == 0].tolist()) == problem.prompt
        said = tokenizer.decode(tokens[sampled == 1].tolist(), skip_special_tokens=True)
        assert trajectory.reward == float(said == problem.solution)
        assert trajectory.reward_components == {"success": trajectory.reward}
    report = json.loads((tmp_path / "evaluation.json").read_text(encoding="utf-8"))
    assert report["problems"] == 40
    assert report["success_before"] == report["success_after"]
    assert report["mean_length_before"] == 2.0, "a digit and the end token"
    assert not (tmp_path / "evaluation_before.json").exists()


async def test_turns_of_a_game_alternate_with_masked_replies(
    redis_url: str, run_id: str, tiny_policy: Path, tmp_path: Path
) -> None:
    async with two_hosts(redis_url, run_id, tiny_policy, small_batch(k=9, batch=4)) as hosts:
        running = asyncio.create_task(run_environment([hosts[0].url], plan_for(tmp_path, "guess-number")))
        await closed_groups(hosts[0], 12, running)
        await hosts[0].ledger.conclude(0)
        await asyncio.wait_for(running, 20.0)
        trajectories = await hosts[0].published()
    tokenizer = build_tokenizer()
    replies = [
        (game.reward, tokenizer.decode(unpack_tokens(game.segments[0].token_ids)[position]))
        for game in trajectories
        for position, sampled in enumerate(unpack_mask(game.segments[0].loss_mask))
        if not sampled and position >= len("abc:")
    ]
    assert {reply for _, reply in replies} <= {"H", "L"}
    assert replies, "no game went beyond its first turn"


async def test_a_server_that_stops_is_passed_over(
    redis_url: str, run_id: str, tiny_policy: Path, tmp_path: Path
) -> None:
    settings = small_batch(k=50, batch=4)
    async with two_hosts(redis_url, run_id, tiny_policy, settings) as (kept, _):
        engine = ScriptedEngine(answer_length=1)
        async with hosting(
            engine, redis_url=redis_url, run_id=run_id, model=tiny_policy, settings=settings, server_id="s2"
        ) as doomed:
            running = asyncio.create_task(run_environment([kept.url, doomed.url], plan_for(tmp_path)))
            await closed_groups(kept, 12, running)
        before = (await kept.ledger.accounts()).closed_groups
        await closed_groups(kept, before + 40, running)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running


async def test_a_restarted_runner_keeps_the_measurement_from_before_training(
    redis_url: str, run_id: str, tiny_policy: Path, tmp_path: Path
) -> None:
    (tmp_path / "evaluation_before.json").write_text('{"success": 0.125, "mean_length": 3.5}', encoding="utf-8")
    async with two_hosts(redis_url, run_id, tiny_policy, small_batch()) as hosts:
        await hosts[0].ledger.conclude(0)
        await run_environment([hosts[0].url], plan_for(tmp_path))
    report = json.loads((tmp_path / "evaluation.json").read_text(encoding="utf-8"))
    assert (report["success_before"], report["mean_length_before"]) == (0.125, 3.5)


async def test_errors_of_the_server_come_back_as_their_own_kind(redis_url: str, run_id: str, tiny_policy: Path) -> None:
    async with two_hosts(redis_url, run_id, tiny_policy, small_batch(k=0, batch=1)) as (host, _):
        async with RolloutClient(host.url, patience_s=0.2) as client:
            opening = OpenGroup(task="sums", group_size=1, sampling=SAMPLING)
            group = await client.open_group(opening)
            with pytest.raises(CapacityError) as closed:
                await client.open_group(opening)
            assert closed.value.retry_after_s >= 1.0
            turn = Turn(session_id=group.session_ids[0], text="1" * 500)
            with pytest.raises(ContextLengthError, match="256"):
                await client.take_turns(group.group_id, TakeTurns(turns=[turn]))
            with pytest.raises(NotFoundError):
                await client.finish_group("g-none", FinishGroup(rewards=[]))
            await host.ledger.conclude(0)
            with pytest.raises(ConcludedError):
                await client.open_group(opening)
            assert (await client.run_state()).concluded


async def test_a_server_that_is_not_there_is_waited_for_no_longer_than_asked() -> None:
    began = time.monotonic()
    async with RolloutClient(f"http://127.0.0.1:{free_port()}", patience_s=0.3) as client:
        with pytest.raises(ServerUnreachableError) as refused:
            await client.run_state()
    assert not refused.value.sent
    assert 0.2 < time.monotonic() - began < 5.0

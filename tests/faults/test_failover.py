"""Servers die, are drained and are added while agents speak: no agent sees an error, no token is lost or doubled."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import torch

from services.config.settings import RunSettings
from services.wire.packed import unpack_logprobs, unpack_mask, unpack_tokens
from services.wire.trajectory import Trajectory
from tests.contract.rollout_server.engine_harness import reference
from tests.support.chat_policy import save_chat_policy
from tests.support.fleet import Fleet, fleet_of
from tests.support.talking_agents import Talk, hold
from tests.support.until import until

EPISODES = 32
MAX_TOKENS, TURNS = 48, 4
KILLS = int(os.environ.get("ROLLMESH_TEST_KILLS", "3"))
TOLERANCE = 1e-4
DRAINED_WITHIN_S = 15.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fleet") / "chat"
    save_chat_policy(folder)
    return folder


@pytest.fixture
async def fleet(tmp_path: Path, redis_url: str, run_id: str, model: Path) -> AsyncIterator[Fleet]:
    """Two servers and a gateway."""
    async with fleet_of(2, folder=tmp_path, redis_url=redis_url, run_id=run_id, model=model, settings=wide()) as fleet:
        yield fleet


def wide() -> RunSettings:
    """Admission that never closes."""
    settings = RunSettings()
    settings.rollout.groups_per_step = 4096
    return settings


async def talk_to(fleet: Fleet, talks: list[Talk], max_tokens: int = MAX_TOKENS, turns: int = TURNS) -> None:
    async with httpx.AsyncClient(timeout=60.0) as http, asyncio.TaskGroup() as tasks:
        for talk in talks:
            tasks.create_task(hold(talk, fleet.gateway_url, http, max_tokens=max_tokens, turns=turns))


def sampled(trajectory: Trajectory) -> list[int]:
    """The trained tokens of a trajectory of one segment."""
    (segment,) = trajectory.segments
    tokens, mask = unpack_tokens(segment.token_ids), unpack_mask(segment.loss_mask)
    return [int(token) for token, trained in zip(tokens, mask, strict=True) if trained]


def check_logprobs(model: Path, trajectories: list[Trajectory]) -> None:
    """What is recorded is what a plain forward of the whole segment gives."""
    policy = reference(model)
    for trajectory in trajectories:
        (segment,) = trajectory.segments
        ids, mask = torch.tensor(unpack_tokens(segment.token_ids).tolist()), unpack_mask(segment.loss_mask)
        with torch.no_grad():
            logits = policy(input_ids=ids[None], use_cache=False).logits[0]
        own = torch.log_softmax(logits[:-1], dim=-1).gather(1, ids[1:, None])[:, 0]
        recorded = torch.tensor(unpack_logprobs(segment.logprobs).tolist())[1:]
        trained = torch.tensor(mask.tolist())[1:].bool()
        assert float((own - recorded)[trained].abs().max()) <= TOLERANCE


async def check_all(fleet: Fleet, model: Path, talks: list[Talk]) -> None:
    """Each conversation is in the stream once, token for token as the agent heard it."""
    published = {trajectory.trajectory_id: trajectory for trajectory in await fleet.published()}
    mine = [published[talk.session_id] for talk in talks]
    for talk, trajectory in zip(talks, mine, strict=True):
        assert sampled(trajectory) == [token for answer in talk.tokens for token in answer]
    check_logprobs(model, mine)
    accounts = await fleet.ledger.accounts()
    assert accounts.opened_groups == accounts.closed_groups == accounts.published == len(published)
    assert (accounts.dropped_groups, await fleet.ledger.open_groups()) == (0, {})


async def test_agents_do_not_notice_that_rollout_servers_are_killed(fleet: Fleet, model: Path) -> None:
    unfaulted = [Talk(number) for number in range(EPISODES)]
    await talk_to(fleet, unfaulted)
    chance, everything = random.Random(1), [*unfaulted]
    for number in range(KILLS):
        talks = [Talk(talk) for talk in range(EPISODES)]
        talking = asyncio.create_task(talk_to(fleet, talks))
        # By what agents have heard, not by time: a fast machine would be done.
        heard = chance.randrange(1, EPISODES * TURNS // 2)
        await until(lambda talks=talks, heard=heard: sum(len(talk.tokens) for talk in talks) >= heard, 30.0)  # type: ignore[misc]
        victim = f"s{number % 2}"
        assert not talking.done()
        await fleet.kill(victim)
        try:
            await talking
        except* Exception as failed:
            raise AssertionError(f"an agent noticed kill {number}\n{fleet.logs()}") from failed
        for talk, before in zip(talks, unfaulted, strict=True):
            if talk.greedy:
                assert talk.tokens == before.tokens
        everything += talks
        await fleet.start(victim)
    await check_all(fleet, model, everything)


async def test_a_drained_server_hands_its_agents_over_and_a_new_one_gets_work(fleet: Fleet, model: Path) -> None:
    await fleet.start("s2")
    await until(lambda: _announced(fleet, 3), 10.0)
    talks = [Talk(number) for number in range(EPISODES)]
    talking = asyncio.create_task(talk_to(fleet, talks, turns=6))
    await until(lambda: any(talk.tokens for talk in talks), 30.0)
    started = time.monotonic()
    code = await fleet.terminate("s0")
    took = time.monotonic() - started
    try:
        await talking
    except* Exception as failed:
        raise AssertionError(f"an agent noticed the drain\n{fleet.logs()}") from failed
    assert code in (0, -signal.SIGTERM)
    assert took < DRAINED_WITHIN_S
    await fleet.start("s3")
    joined = time.monotonic()
    more: list[Talk] = []
    while (await _sampled_by(fleet, "s3")) == 0:
        assert time.monotonic() - joined < 5.0, "a server that was added got no work"
        batch = [Talk(number) for number in range(8)]
        await talk_to(fleet, batch, max_tokens=4, turns=1)
        more += batch
    await check_all(fleet, model, [*talks, *more])


async def test_a_server_that_was_only_asleep_cannot_write_into_what_another_has_taken_over(
    fleet: Fleet, model: Path
) -> None:
    talks = [Talk(number) for number in range(8)]
    talking = asyncio.create_task(talk_to(fleet, talks, turns=6))
    await until(lambda: any(talk.tokens for talk in talks), 30.0)
    sleeper = fleet.servers["s0"].process
    os.killpg(sleeper.pid, signal.SIGSTOP)
    await until(lambda: _announced(fleet, 1), 10.0)  # its lease has run out
    await asyncio.sleep(0)
    woken = asyncio.get_running_loop().call_later(4.0, os.killpg, sleeper.pid, signal.SIGCONT)
    try:
        await talking
    except* Exception as failed:
        raise AssertionError(f"an agent noticed the sleep\n{fleet.logs()}") from failed
    finally:
        woken.cancel()
        os.killpg(sleeper.pid, signal.SIGCONT)
    await until(lambda: _announced(fleet, 2), 10.0)
    await check_all(fleet, model, talks)


async def _announced(fleet: Fleet, count: int) -> bool:
    return len(await fleet.registry.servers()) == count


async def _sampled_by(fleet: Fleet, server_id: str) -> int:
    async with httpx.AsyncClient() as http:
        return int((await http.get(f"{fleet.urls[server_id]}/engine")).json()["tokens_generated"])

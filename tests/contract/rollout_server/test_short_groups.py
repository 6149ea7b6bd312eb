"""Groups that lose siblings, from the session API to the trainer's batch: a server, a Valkey and an intake, all real."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from services.policies.batching import Group
from services.policies.length_stats import Lengths
from services.run_store.stream import TrajectoryReader
from services.wire.trajectory import Trajectory, vocabulary_digest
from tests.support.rollout_host import Host, hosting, small_batch, until
from tests.support.scripted_engine import ScriptedEngine
from trainer.data.stream_reader import Intake
from trainer.data.validation import Validator


@pytest.fixture
async def host(redis_url: str, run_id: str, chat_policy: Path) -> AsyncIterator[Host]:
    engine = ScriptedEngine(answer_length=3, max_model_len=2048)
    settings = small_batch(batch=4)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=chat_policy, settings=settings) as host:
        yield host


@pytest.fixture
async def intake(host: Host, chat_policy: Path) -> AsyncIterator[Intake]:
    tokenizer = Tokenizer.from_file(str(chat_policy / "tokenizer.json"))
    screen = Validator(host.run_id, tokenizer.get_vocab_size(), 2048, vocabulary_digest(tokenizer.get_vocab()))
    made = Intake(
        lambda: TrajectoryReader(host.redis, host.run_id), host.ledger, screen, lambda: 0, expire_after_s=0.05
    )
    reading = asyncio.create_task(made.run())
    yield made
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)


async def open_group(host: Host, name: str, size: int, **body: Any) -> list[dict[str, Any]]:
    opened = [
        await host.http.post("/sessions", json={"group_id": name, "group_size": size} | body) for _ in range(size)
    ]
    assert {answer.status_code for answer in opened} == {201}
    return [answer.json() for answer in opened]


async def speak(host: Host, session: dict[str, Any]) -> None:
    headers = {"Authorization": f"Bearer {session['api_key']}"}
    body = {"messages": [{"role": "user", "content": "hello"}]}
    answer = await host.http.post(f"{session['base_url']}/chat/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text


async def finish(host: Host, session: dict[str, Any], reward: float) -> None:
    answer = await host.http.post(f"/sessions/{session['session_id']}/finish", json={"reward": reward})
    assert answer.status_code == 200, answer.text


async def abort(host: Host, session: dict[str, Any]) -> None:
    answer = await host.http.post(f"/sessions/{session['session_id']}/abort")
    assert answer.status_code == 200, answer.text


async def batch_of(intake: Intake, groups: int) -> list[Group[Trajectory]]:
    batch = await asyncio.to_thread(intake.take, groups, 10.0, post=lambda _: None, stopped=lambda: False)
    assert batch is not None
    return batch


async def test_who_finished_is_trained_and_what_the_others_drew_is_counted(host: Host, intake: Intake) -> None:
    sessions = await open_group(host, "short", 4)
    for session in sessions:
        await speak(host, session)
    await finish(host, sessions[0], 1.0)
    await finish(host, sessions[3], 0.0)
    # A sibling still plays: its group is waited for.
    await abort(host, sessions[1])
    assert await host.ledger.still_open(["short"]) == {"short"}
    await abort(host, sessions[2])
    (group,) = await batch_of(intake, 1)
    assert (group.group, [member.index for member in group.members], group.lost) == ("short", [0, 3], 2)
    assert [member.payload.reward for member in group.members] == [1.0, 0.0]
    await intake.settle_trained([member.entry for member in group.members])
    accounts = await host.ledger.accounts()
    assert (accounts.closed_groups, accounts.dropped_groups, accounts.trained, accounts.dropped) == (1, 0, 2, {})
    sampled = [member.payload.sampled_tokens() for member in group.members]
    assert await host.ledger.lengths() == Lengths.of(Counter([*sampled, 4, 4])), "each answered with four tokens"


async def test_siblings_that_expire_leave_a_group_that_is_too_small(host: Host, intake: Intake) -> None:
    late = await open_group(host, "late", 2, idle_timeout_s=0.5)
    for session in late:
        await speak(host, session)
    await finish(host, late[0], 1.0)

    async def dropped() -> bool:
        return (await host.ledger.accounts()).dropped == {"incomplete_group": 1}

    await until(dropped, 10.0)
    assert (await host.ledger.accounts()).dropped_groups == 1
    whole = await open_group(host, "whole", 2)
    for session in whole:
        await speak(host, session)
        await finish(host, session, 1.0)
    (group,) = await batch_of(intake, 1)
    assert (group.group, group.lost) == ("whole", 0)

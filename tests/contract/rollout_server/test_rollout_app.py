"""The rollout API over real sockets and a real Valkey, in front of an engine whose answers are known."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from services.wire.packed import unpack_logprobs, unpack_mask, unpack_tokens
from services.wire.trajectory import VersionSpan
from tests.support.rollout_host import Host, hosting, small_batch, until
from tests.support.scripted_engine import END, ScriptedEngine
from trainer.sft.tiny_model import build_tokenizer


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(answer_length=3)


@pytest.fixture
async def host(engine: ScriptedEngine, redis_url: str, run_id: str, tiny_policy: Path) -> AsyncIterator[Host]:
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tiny_policy, settings=small_batch()) as host:
        yield host


def encode(text: str) -> list[int]:
    ids: list[int] = build_tokenizer().encode(text, add_special_tokens=False)
    return ids


def scripted(prompt: list[int], index: int, length: int = 3) -> list[int]:
    """What the scripted engine answers."""
    return [2 + (sum(prompt) + index + i) % 9 for i in range(length)] + [END]


async def test_a_group_becomes_trajectories_that_hold_exactly_what_was_sampled(host: Host) -> None:
    group = await host.open(group_size=3)
    taken = await host.turns(group, "12=", "12=", "34=", return_token_ids=True)
    finished = await host.finish(group, 1.0, 0.0, 0.5)
    assert (taken.status_code, finished.status_code) == (200, 200)
    assert group["turn_within_s"] == 132.0, "two minutes, and its 24 tokens, two a second"

    expected = [scripted(encode("12="), 0), scripted(encode("12="), 1), scripted(encode("34="), 0)]
    results = taken.json()["results"]
    assert [result["session_id"] for result in results] == group["session_ids"]
    assert [result["token_ids"] for result in results] == expected
    assert [result["text"] for result in results] == [build_tokenizer().decode(tokens[:-1]) for tokens in expected]
    assert {result["finish_reason"] for result in results} == {"stop"}

    trajectories = await host.published()
    assert [trajectory.trajectory_id for trajectory in trajectories] == group["session_ids"]
    assert [trajectory.reward for trajectory in trajectories] == [1.0, 0.0, 0.5]
    assert [trajectory.member for trajectory in trajectories] == [0, 1, 2]
    for trajectory, prompt, sampled in zip(trajectories, ("12=", "12=", "34="), expected, strict=True):
        (segment,) = trajectory.segments
        assert unpack_tokens(segment.token_ids).tolist() == encode(prompt) + sampled
        assert unpack_mask(segment.loss_mask).tolist() == [0, 0, 0, 1, 1, 1, 1]
        assert unpack_logprobs(segment.logprobs).tolist() == [0, 0, 0, -0.125, -0.25, -0.375, -0.5]
        assert segment.version_spans == [VersionSpan(3, 4, 0)]
        assert (trajectory.group_ordinal, trajectory.group_size, trajectory.task) == (0, 3, "sums")
    accounts = await host.ledger.accounts()
    assert (accounts.opened_groups, accounts.closed_groups, accounts.dropped_groups) == (1, 1, 0)
    assert accounts.published == 3


async def test_siblings_with_one_context_cost_the_engine_one_request(host: Host, engine: ScriptedEngine) -> None:
    group = await host.open(group_size=4)
    await host.turns(group, "1=", "1=", "1=", "2=")
    assert sorted((request.n, len(request.prompt_token_ids)) for request in engine.requests) == [(1, 2), (3, 2)]
    engine.requests.clear()
    # Their answers differ, so from here on each has a context of its own.
    await host.turns(group, "H", "H", "H", "H")
    assert sorted(request.n for request in engine.requests) == [1, 1, 1, 1]


async def test_the_next_turn_extends_the_very_tokens_that_were_sampled(host: Host, engine: ScriptedEngine) -> None:
    group = await host.open(group_size=1)
    await host.turns(group, "1=")
    first = scripted(encode("1="), 0)
    engine.set_version(2)
    await host.turns(group, "H", sampling={"max_tokens": 2, "temperature": 0.5})
    prompt = encode("1=") + first + encode("H")
    assert engine.requests[-1].prompt_token_ids == prompt
    await host.finish(group, 1.0)
    (trajectory,) = await host.published()
    (segment,) = trajectory.segments
    assert unpack_tokens(segment.token_ids).tolist() == prompt + scripted(prompt, 0)[:2]
    assert segment.version_spans == [VersionSpan(2, 4, 0), VersionSpan(7, 2, 2, sampling=1)]
    assert trajectory.finish_reason == "length"
    assert [sampling.temperature for sampling in trajectory.samplings] == [1.0, 0.5]


async def test_tokens_may_be_given_instead_of_text(host: Host, engine: ScriptedEngine) -> None:
    group = await host.open(group_size=1)
    turn = {"session_id": group["session_ids"][0], "token_ids": [5, 6]}
    answer = await host.http.post(f"/groups/{group['group_id']}/turns", json={"turns": [turn]})
    assert answer.json()["results"][0]["token_ids"] is None
    assert engine.requests[-1].prompt_token_ids == [5, 6]


async def test_a_finish_repeated_answers_the_same_and_publishes_once(host: Host) -> None:
    group = await host.open()
    await host.turns(group, "1=", "1=")
    answers = await asyncio.gather(*(host.finish(group, 1.0, 0.0) for _ in range(5)))
    answers.append(await host.finish(group, 0.0, 0.0))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.text for answer in answers}) == 1
    assert set(answers[0].json()["stream_ids"]) == set(group["session_ids"])
    assert len(await host.published()) == 2
    assert (await host.ledger.accounts()).closed_groups == 1


async def test_groups_that_finish_together_are_each_published_whole(host: Host) -> None:
    groups = [await host.open() for _ in range(4)]
    await asyncio.gather(*(host.turns(group, "1=", "2=") for group in groups))
    answers = await asyncio.gather(*(host.finish(group, 1.0, 0.0) for group in groups))
    ids = {name: stream_id for answer in answers for name, stream_id in answer.json()["stream_ids"].items()}
    assert len(set(ids.values())) == 8
    trajectories = await host.published()
    assert sorted(trajectory.trajectory_id for trajectory in trajectories) == sorted(ids)
    assert sorted(trajectory.group_ordinal for trajectory in trajectories) == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("rewards", [(), (1.0,)])
async def test_every_session_needs_a_reward(host: Host, rewards: tuple[float, ...]) -> None:
    group = await host.open()
    await host.turns(group, "1=", "1=")
    refused = await host.finish(group, *rewards)
    assert refused.status_code == 422
    assert "exactly one" in refused.json()["error"]["message"]
    assert (await host.finish(group, 1.0, 0.0)).status_code == 200


async def test_rewards_for_strangers_or_twice_are_refused(host: Host) -> None:
    group = await host.open(group_size=1)
    await host.turns(group, "1=")
    (name,) = group["session_ids"]
    for names in ([name, name], [name, "stranger"]):
        body = {"rewards": [{"session_id": each, "reward": 1.0} for each in names]}
        answer = await host.http.post(f"/groups/{group['group_id']}/finish", json=body)
        assert answer.status_code == 422
    assert await host.published() == []


async def test_a_silent_session_cannot_be_finished(host: Host) -> None:
    group = await host.open()
    await host.turns(group, "1=", None)
    refused = await host.finish(group, 1.0, 0.0)
    assert refused.status_code == 409
    assert "took no turn" in refused.json()["error"]["message"]


async def test_late_and_strange_calls_get_their_own_answers(host: Host) -> None:
    group = await host.open(group_size=1)
    await host.turns(group, "1=")
    await host.finish(group, 1.0)
    strange = group | {"group_id": "g-0"}
    assert (await host.turns(group, "H")).status_code == 409
    assert (await host.turns(strange, "H")).status_code == 404
    assert (await host.finish(strange, 1.0)).status_code == 404


async def test_two_turns_at_once_in_one_session_conflict(host: Host, engine: ScriptedEngine) -> None:
    group = await host.open()
    await engine.pause("keep")
    first = asyncio.create_task(host.turns(group, "1=", None))
    await until(lambda: bool(engine.requests))
    second = await host.turns(group, "1=", "1=")
    assert second.status_code == 409
    assert (await host.finish(group, 1.0, 0.0)).status_code == 409
    await engine.resume()
    assert (await first).status_code == 200
    assert (await host.turns(group, None, "1=")).status_code == 200


async def test_a_context_that_is_empty_or_too_long_changes_nothing(host: Host, engine: ScriptedEngine) -> None:
    group = await host.open(group_size=1)
    assert (await host.turns(group, "")).status_code == 422
    too_long = await host.turns(group, "1" * 256)
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")
    # One token of room: the answer is cut to it, and the session goes on as if nothing had been tried.
    answer = await host.turns(group, "1" * 255)
    assert answer.json()["results"][0]["finish_reason"] == "length"
    assert engine.requests[-1].sampling.max_tokens == 1


async def test_misspelt_fields_and_bodies_that_are_no_json_are_refused(host: Host) -> None:
    assert (await host.try_open(groupsize=3)).status_code == 422
    broken = await host.http.post("/groups", content=b"{", headers={"content-type": "application/json"})
    assert broken.status_code == 422
    # What a web page may send without asking must not open anything.
    simple = await host.http.post("/groups", content=b"{}", headers={"content-type": "text/plain"})
    assert simple.status_code == 422
    assert "content-type" in simple.json()["error"]["message"]


async def test_a_client_that_hangs_up_leaves_the_session_as_it_was(host: Host, engine: ScriptedEngine) -> None:
    group = await host.open()
    await host.turns(group, "1=", "1=")
    await engine.pause("keep")
    hasty = asyncio.create_task(host.turns(group, "H", "H"))
    await until(lambda: engine.status().running == 2)
    hasty.cancel()
    await until(lambda: engine.status().running == 0)
    assert engine.aborted_early == 2
    await engine.resume()
    assert (await host.turns(group, "L", "L")).status_code == 200
    assert (await host.finish(group, 1.0, 0.0)).status_code == 200
    for trajectory in await host.published():
        text = build_tokenizer().decode(unpack_tokens(trajectory.segments[0].token_ids))
        assert "L" in text
        assert "H" not in text


async def test_an_engine_that_stands_still_ends_the_turn(redis_url: str, run_id: str, tiny_policy: Path) -> None:
    engine = ScriptedEngine(step_s=60.0)
    settings = small_batch(timeout_s=0.2)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tiny_policy, settings=settings) as host:
        group = await host.open(purpose="evaluate", group_size=1)
        answer = await host.turns(group, "1=")
    assert answer.status_code == 504
    assert engine.status().running == 0


async def test_evaluation_needs_no_admission_and_publishes_nothing(host: Host) -> None:
    for _ in range(4):
        await host.open()
    await host.ledger.conclude(0)
    group = await host.open(purpose="evaluate")
    assert group["ordinal"] == -1
    await host.turns(group, "1=", "1=")
    finished = await host.finish(group, 1.0, 0.0)
    assert finished.json() == {"stream_ids": {}}
    assert await host.published() == []
    assert (await host.ledger.accounts()).opened_groups == 4


async def test_the_run_and_the_engine_say_how_they_are(host: Host, engine: ScriptedEngine) -> None:
    before = (await host.http.get("/run")).json()
    assert before == {"run_id": host.run_id, "policy_version": 0, "concluded": False, "final_version": None}
    engine.set_version(7)
    await host.ledger.conclude(7)
    after = (await host.http.get("/run")).json()
    assert after == {"run_id": host.run_id, "policy_version": 7, "concluded": True, "final_version": 7}
    report = (await host.http.get("/engine")).json()
    assert (report["server_id"], report["name"], report["policy_version"]) == ("s0", "scripted", 7)

"""Answers that no agent got are no part of the trajectory; those that a retry got, or that were continued, are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from rollout_server.completions.base import AnswerDeps, AnswerService
from rollout_server.completions.tokens import GenerateCalls
from rollout_server.journal.records import Record
from rollout_server.sessions.group import Group
from rollout_server.sessions.responses import RequestKey
from rollout_server.sessions.session import Terms
from services.run_store.discovery import ServiceRegistry
from services.run_store.undelivered import UndeliveredCalls
from services.wire.packed import unpack_mask, unpack_tokens
from services.wire.rollout_api import SamplingLimits
from services.wire.vllm_api import GenerateCall
from tests.conftest import free_port
from tests.support.flaky_proxy import flaky_proxy
from tests.support.gateway_host import gateway
from tests.support.memory_journal import MemoryJournal
from tests.support.rollout_host import Host, hosting, small_batch, until
from tests.support.scripted_engine import ScriptedEngine

T = TypeVar("T")


def named(number: int, **more: str) -> dict[str, str]:
    """The header by which a gateway names a call."""
    return {"x-rollmesh-call": f"{number:032d}", **more}


@dataclass
class Talk:
    """A session of the first of two servers, as an agent behind a gateway sees it."""

    host: Host
    other: Host
    session_id: str
    leave: Callable[[], Any]

    async def say(self, number: int, *texts: str, **headers: str) -> tuple[str, list[int], str]:
        """The call of this number: what is said, the tokens sampled, and the answer's id."""
        answer = await self.send(number, *texts, **headers)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        return choice["message"]["content"], choice["token_ids"], answer.json()["id"]

    async def send(self, number: int, *texts: str, **headers: str) -> httpx.Response:
        roles = ("user", "assistant")
        messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
        body = {"messages": messages, "return_token_ids": True}
        path = f"/sessions/{self.session_id}/v1/chat/completions"
        return await self.host.http.post(path, json=body, headers=named(number, **headers))

    async def give_up(self, number: int) -> None:
        """As a gateway does that answers the call of this number with 504."""
        undelivered = UndeliveredCalls(self.host.redis, self.host.run_id)
        await undelivered.note(f"{number:032d}", session_id=self.session_id, group_id=None)

    async def move(self) -> None:
        """The session's server ends; the other one takes it over."""
        await self.leave()
        self.host = self.other

    async def finish(self) -> httpx.Response:
        return await self.host.http.post(f"/sessions/{self.session_id}/finish", json={"reward": 1.0})

    async def trained(self) -> list[list[int]]:
        """Finish; the trained tokens of each segment."""
        finished = await self.finish()
        assert finished.status_code == 200, finished.text
        (trajectory,) = [each for each in await self.host.published() if each.trajectory_id == self.session_id]
        found = []
        for segment in trajectory.segments:
            mask = unpack_mask(segment.loss_mask) == 1
            found.append(unpack_tokens(segment.token_ids)[mask].tolist())
        assert finished.json()["sampled_tokens"] == sum(map(len, found))
        assert (await self.finish()).json() == finished.json()
        return found


@pytest.fixture
async def talk(redis_url: str, run_id: str, chat_policy: Path) -> AsyncIterator[Talk]:
    def serve(server_id: str) -> Any:
        engine = ScriptedEngine(answer_length=6, max_model_len=2048)
        settings = small_batch(batch=16)
        return hosting(
            engine, redis_url=redis_url, run_id=run_id, model=chat_policy, settings=settings, server_id=server_id
        )

    async with serve("s1") as other, AsyncExitStack() as stack:
        host = await stack.enter_async_context(serve("s0"))
        registry = ServiceRegistry(other.redis, run_id)

        async def both_known() -> bool:
            return len(await registry.servers()) == 2

        await until(both_known)
        session = (await host.http.post("/sessions", json={})).json()
        yield Talk(host, other, session["session_id"], stack.aclose)


moved = pytest.mark.parametrize("moves", [False, True], ids=["same server", "taken over"])


@moved
async def test_an_answer_that_the_gateway_gave_up_is_no_part_of_the_trajectory(talk: Talk, moves: bool) -> None:
    first, one, _ = await talk.say(1, "hello")
    second, two, _ = await talk.say(2, "hello", first, "and?")
    await talk.say(3, "hello", first, "and?", second, "unheard")
    await talk.say(4, "unheard too")
    for number in (3, 4):
        await talk.give_up(number)
    if moves:
        await talk.move()
    assert await talk.trained() == [one + two]


@moved
@pytest.mark.parametrize("again", ["the same call", "a call of the client's own"])
async def test_an_answer_that_a_retry_got_is_part_of_it(talk: Talk, moves: bool, again: str) -> None:
    _, tokens, call_id = await talk.say(1, "hello")
    await talk.give_up(1)
    if moves:
        await talk.move()
    retry = {} if again == "the same call" else {"x-stainless-retry-count": "1"}
    assert await talk.say(1 if not retry else 2, "hello", **retry) == (_, tokens, call_id)
    assert await talk.trained() == [tokens]


async def test_a_retry_that_is_given_up_too_counts_no_more_than_the_call(talk: Talk) -> None:
    _, tokens, _ = await talk.say(1, "hello")
    await talk.say(2, "unheard")
    await talk.give_up(2)
    await talk.say(3, "unheard", **{"x-stainless-retry-count": "1"})
    await talk.give_up(3)
    assert await talk.trained() == [tokens]


@moved
async def test_what_was_noted_of_a_try_before_the_answer_was_there_does_not_count(talk: Talk, moves: bool) -> None:
    await talk.give_up(1)
    _, tokens, _ = await talk.say(1, "hello")
    if moves:
        await talk.move()
    assert await talk.trained() == [tokens]


async def test_an_answer_that_was_continued_or_rewarded_was_seen(talk: Talk) -> None:
    first, one, _ = await talk.say(1, "hello")
    _, two, call_id = await talk.say(2, "hello", first, "and?")
    for number in (1, 2):
        await talk.give_up(number)
    path = f"/sessions/{talk.session_id}/reward"
    assert (await talk.host.http.post(path, json={"reward": 0.5, "call_id": call_id})).status_code == 200
    assert await talk.trained() == [one + two]


async def test_a_session_of_which_nothing_was_seen_is_not_finished(talk: Talk) -> None:
    await talk.say(1, "hello")
    await talk.give_up(1)
    refused = await talk.finish()
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    _, tokens, _ = await talk.say(1, "hello")
    assert await talk.trained() == [tokens]


async def test_a_turn_of_a_group_that_was_given_up_is_left_out(talk: Talk) -> None:
    host = talk.host
    group = await host.open()
    turns = {"turns": [{"session_id": name, "text": "1="} for name in group["session_ids"]], "return_token_ids": True}
    path = f"/groups/{group['group_id']}/turns"
    taken = [await host.http.post(path, json=turns, headers=named(number)) for number in (1, 2)]
    undelivered = UndeliveredCalls(host.redis, host.run_id)
    await undelivered.note(f"{2:032d}", session_id=None, group_id=group["group_id"])
    assert (await host.finish(group, 1.0, 0.0)).status_code == 200
    first = [turn["token_ids"] for turn in taken[0].json()["results"]]
    found = []
    for trajectory in await host.published():
        (segment,) = trajectory.segments
        found.append(unpack_tokens(segment.token_ids)[unpack_mask(segment.loss_mask) == 1].tolist())
    assert found == first


@pytest.mark.parametrize("comes_back", [False, True])
async def test_tokens_behind_a_504_are_trained_only_if_a_retry_gets_them(
    redis_url: str, run_id: str, chat_policy: Path, comes_back: bool
) -> None:
    """The server has sent its answer and knows no better; on the way to the gateway it is lost, try for try."""
    engine, port = ScriptedEngine(answer_length=6, max_model_len=2048), free_port()
    async with AsyncExitStack() as stack:
        proxy = await stack.enter_async_context(flaky_proxy(f"http://127.0.0.1:{port}"))
        server = hosting(
            engine, redis_url=redis_url, run_id=run_id, model=chat_policy, port=port, announced_url=proxy.url
        )
        host = await stack.enter_async_context(server)
        front = await stack.enter_async_context(gateway(redis_url, run_id, failover_timeout_s=0.3))
        await front.until_known(s0="serving")
        session = f"/sessions/{(await host.http.post('/sessions', json={})).json()['session_id']}"
        path, hello = f"{session}/v1/chat/completions", {"role": "user", "content": "hello"}
        body: dict[str, Any] = {"messages": [hello], "return_token_ids": True}
        first = (await host.http.post(path, json=body)).json()["choices"][0]
        body["messages"] = [hello, first["message"], {"role": "user", "content": "and?"}]
        proxy.fail(*["lose"] * 1000)  # type: ignore[list-item]
        lost = await front.http.post(path, json=body)
        assert (lost.status_code, lost.json()["error"]["code"]) == (504, "deadline")
        assert len(engine.requests) == 2, "the answer was sampled once, however often it was lost"
        proxy.heal()
        seen = first["token_ids"]
        if comes_back:
            again = await front.http.post(path, json=body, headers={"x-stainless-retry-count": "1"})
            assert again.status_code == 200
            seen = seen + again.json()["choices"][0]["token_ids"]
        finished = await front.http.post(f"{session}/finish", json={"reward": 1.0})
        assert (finished.status_code, finished.json()["sampled_tokens"]) == (200, len(seen))
        (trajectory,) = await host.published()
        (segment,) = trajectory.segments
        assert unpack_tokens(segment.token_ids)[unpack_mask(segment.loss_mask) == 1].tolist() == seen
        assert len(engine.requests) == 2


class HeldJournal(MemoryJournal):
    """Tells that a record is written only when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.asked, self.told = asyncio.Event(), asyncio.Event()

    async def append(self, group_id: str, record: Record, then: Callable[[], T], **more: Any) -> T:
        captured = await super().append(group_id, record, then, **more)
        self.asked.set()
        await self.told.wait()
        return captured


@pytest.mark.parametrize("comes_back", [False, True])
async def test_a_client_that_hangs_up_while_its_answer_is_written_down_got_nothing(comes_back: bool) -> None:
    group = Group("g", 0, 1, "any", "train", 600.0)
    session = group.next_session("s", Terms("any", "train", SamplingLimits(), 600.0), b"")
    group.add(session)
    engine, journal = ScriptedEngine(), HeldJournal()

    async def accepting() -> None:
        """The engine always takes requests."""

    service = AnswerService(AnswerDeps(engine, journal, accepting, 8), lambda error: None)  # type: ignore[arg-type]
    calls = GenerateCalls(engine, "m")
    call = GenerateCall.model_validate({"token_ids": [5, 6], "sampling_params": {}})
    answer = await service.ask(session, RequestKey(b"a"), "gen-1", lambda context: calls.produce(call, context))
    answers = session.memory.answers
    with answers.listening(answer, 30.0):
        await journal.asked.wait()
    journal.told.set()
    await until(lambda: answer.ended)
    session.leave_out(())
    assert (len(session.capture.nodes), session.capture.answers) == (1, 0)
    if comes_back:
        again = await service.ask(session, RequestKey(b"a", retry=1), "gen-2", lambda context: _fail())
        with answers.listening(again, 0.0):
            assert await again.whole()
            again.deliver()
        session.leave_out(())
        assert session.capture.answers == 1


async def _fail() -> None:
    raise AssertionError("a retry was taken for a new call")

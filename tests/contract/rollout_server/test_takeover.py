"""A session continues on another server: from the journal, token for token, and nothing is done twice."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest

from services.run_store.discovery import ServiceRegistry
from services.run_store.keys import RunKeys
from services.wire.packed import unpack_mask, unpack_tokens
from services.wire.trajectory import Trajectory
from tests.support.rollout_host import Host, hosting, small_batch, until
from tests.support.scripted_engine import ScriptedEngine

CALL = "x-rollmesh-call"


class Serve(Protocol):
    def __call__(self, engine: ScriptedEngine, server_id: str) -> AbstractAsyncContextManager[Host]: ...


@pytest.fixture
def serve(redis_url: str, run_id: str, chat_policy: Path) -> Serve:
    def make(engine: ScriptedEngine, server_id: str) -> AbstractAsyncContextManager[Host]:
        settings = small_batch(batch=16)
        return hosting(
            engine, redis_url=redis_url, run_id=run_id, model=chat_policy, settings=settings, server_id=server_id
        )

    return make


class Pair:
    """Two servers of one run; the first can leave."""

    def __init__(self, stack: AsyncExitStack, first: Host, second: Host, engines: list[ScriptedEngine]) -> None:
        self._stack = stack
        self.first, self.second, self.engines = first, second, engines

    async def leave(self) -> None:
        """The first server is ended as SIGTERM ends it."""
        await self._stack.aclose()


@pytest.fixture
async def pair(serve: Serve) -> AsyncIterator[Pair]:
    engines = [ScriptedEngine(answer_length=6, max_model_len=2048) for _ in range(2)]
    async with serve(engines[1], "s1") as second, AsyncExitStack() as stack:
        first = await stack.enter_async_context(serve(engines[0], "s0"))
        registry = ServiceRegistry(second.redis, second.run_id)
        await until(lambda: _alive(registry, 2))
        yield Pair(stack, first, second, engines)


async def _alive(registry: ServiceRegistry, count: int) -> bool:
    return len(await registry.servers()) == count


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


def name(number: int) -> dict[str, str]:
    """The header by which a gateway names a call."""
    return {CALL: f"{number:032d}"}


async def open_session(host: Host, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    answer = await host.http.post("/sessions", json=body, headers=headers)
    assert answer.status_code in (200, 201), answer.text
    opened: dict[str, Any] = answer.json()
    return opened


def asked(*texts: str, **body: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    return {"messages": messages, "return_token_ids": True} | body


async def say(host: Host, session: dict[str, Any], number: int, *texts: str, **body: Any) -> httpx.Response:
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    return await host.http.post(path, json=asked(*texts, **body), headers=name(number))


def spoken(answer: httpx.Response) -> tuple[str, list[int]]:
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["message"]["content"], choice["token_ids"]


def sampled(trajectory: Trajectory) -> list[list[int]]:
    """The trained tokens of each segment."""
    pairs = [(unpack_tokens(each.token_ids), unpack_mask(each.loss_mask)) for each in trajectory.segments]
    return [[int(token) for token, trained in zip(*pair, strict=True) if trained] for pair in pairs]


async def test_a_session_of_a_server_that_left_goes_on_at_another_as_if_nothing_had_happened(pair: Pair) -> None:
    body = {"metadata": {"a": "b"}, "env": "shop", "max_tokens": 100}
    session = await open_session(pair.first, session_id="mine", **body)
    first, tokens = spoken(await say(pair.first, session, 1, "hello"))
    reward = {"reward": 0.25, "call_id": None}
    path = "/sessions/mine"
    assert (await pair.first.http.post(f"{path}/reward", json=reward)).status_code == 200
    before = (await pair.first.http.get(path)).json()
    tree = (await pair.first.http.get(f"{path}/trajectory")).json()
    await pair.leave()

    after = (await pair.second.http.get(path)).json()
    assert after | {"expires_in_s": 0} == before | {"expires_in_s": 0}
    assert (await pair.second.http.get(f"{path}/trajectory")).json() == tree
    again = await pair.second.http.post("/sessions", json={"session_id": "mine"} | body)
    assert again.status_code == 200
    _, more = spoken(await say(pair.second, session, 2, "hello", first, "and?"))
    finished = await pair.second.http.post(f"{path}/finish", json={})
    assert (finished.status_code, finished.json()["reward"], finished.json()["segments"]) == (200, 0.25, 1)
    (trajectory,) = await pair.second.published()
    assert sampled(trajectory) == [[*tokens, *more]]
    first, second = trajectory.call_times
    assert (first.segment, second.segment) == (0, 0) and 0 < first.start < second.start
    assert trajectory.opened_at <= first.began_at <= first.ended_at <= second.began_at
    assert second.began_at <= second.ended_at <= trajectory.finished_at
    assert (trajectory.metadata, trajectory.task) == ({"a": "b"}, "shop")
    accounts = await pair.second.ledger.accounts()
    assert (accounts.opened_groups, accounts.closed_groups, accounts.dropped_groups) == (1, 1, 0)


async def test_a_call_that_was_answered_is_answered_the_same_by_another_server(pair: Pair) -> None:
    session = await open_session(pair.first)
    whole = await say(pair.first, session, 1, "hello", temperature=1.0)
    streamed = await say(pair.first, session, 2, "hello", stream=True)
    await pair.leave()
    assert (await say(pair.second, session, 1, "hello", temperature=1.0)).content == whole.content
    assert (await say(pair.second, session, 2, "hello", stream=True)).content == streamed.content
    status = (await pair.second.http.get(f"/sessions/{session['session_id']}")).json()
    assert status["calls"] == 2


async def test_an_openai_clients_own_retry_finds_its_answer_at_another_server(pair: Pair) -> None:
    session = await open_session(pair.first)
    whole = await say(pair.first, session, 1, "hello")
    await pair.leave()
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    headers = name(2) | {"x-stainless-retry-count": "1"}
    assert (await pair.second.http.post(path, json=asked("hello"), headers=headers)).content == whole.content


@pytest.mark.parametrize("n", [1, 2])
async def test_a_stream_that_broke_off_goes_on_from_its_exact_tokens(pair: Pair, n: int) -> None:
    session = await open_session(pair.first)
    unbroken = await open_session(pair.second)
    path = f"/sessions/{session['session_id']}/v1/chat/completions"
    body = asked("tell me", stream=True, n=n)
    seen = b""
    pair.engines[0]._step_s = 0.05
    with pytest.raises(httpx.TransportError):
        async with pair.first.http.stream("POST", path, json=body, headers=name(1)) as answer:
            leaving = None
            async for chunk in answer.aiter_bytes():
                seen += chunk
                if seen.count(b"data:") >= 3 * n and leaving is None:
                    leaving = asyncio.create_task(pair.leave())
    assert leaving is not None
    await leaving
    assert b"[DONE]" not in seen and b'"error"' not in seen
    rest = await pair.second.http.post(path, json=body, headers=name(1))
    assert rest.content.startswith(seen)
    # The prompt's tokens came in each choice's first chunk, and the server that went on says so byte for byte.
    assert seen.count(b"prompt_token_ids") == rest.content.count(b"prompt_token_ids") == n
    reference = await say(pair.second, unbroken, 9, "tell me", n=n)
    assert _streamed(rest.content, n) == [choice["token_ids"] for choice in reference.json()["choices"]]
    request = pair.engines[1].requests[0]
    assert request.resumed > 0, "the tokens that the agent had seen were sampled again"
    finished = await pair.second.http.post(f"/sessions/{session['session_id']}/finish", json={"reward": 1.0})
    assert finished.json()["sampled_tokens"] == 7 * n


def _streamed(raw: bytes, n: int) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in range(n)]
    events = [line.removeprefix(b"data: ") for line in raw.split(b"\n\n") if line]
    assert events.pop() == b"[DONE]"
    for event in events:
        for choice in json.loads(event)["choices"]:
            tokens[choice["index"]] += choice.get("token_ids") or []
    return tokens


async def test_what_a_server_that_lives_holds_is_not_taken_from_it(pair: Pair) -> None:
    session = await open_session(pair.first, group_id="g", group_size=2)
    for answer in (
        await say(pair.second, session, 1, "hello"),
        await pair.second.http.get(f"/sessions/{session['session_id']}"),
        await pair.second.http.post("/groups/g/finish", json={"rewards": []}),
        await pair.second.http.post("/sessions", json={"group_id": "g", "group_size": 2}),
    ):
        assert code(answer) == (421, "held_elsewhere")
        assert answer.headers["x-rollmesh-owner-url"] == pair.first.url
    assert (await say(pair.first, session, 1, "hello")).status_code == 200


async def test_calls_named_alike_open_one_session_and_one_group(pair: Pair) -> None:
    opened = [await open_session(pair.first, headers=name(1)) for _ in range(2)]
    assert opened[0] == opened[1]
    body = {"task": "sums", "group_size": 2, "sampling": {"max_tokens": 24}}
    groups = [(await pair.first.http.post("/groups", json=body, headers=name(2))).json() for _ in range(2)]
    assert groups[0] == groups[1]
    turns = {"turns": [{"session_id": name, "text": "1="} for name in groups[0]["session_ids"]]}
    path = f"/groups/{groups[0]['group_id']}"
    first = await pair.first.http.post(f"{path}/turns", json=turns, headers=name(3))
    await pair.leave()
    assert (await open_session(pair.second, headers=name(1)))["session_id"] == opened[0]["session_id"]
    assert (await pair.second.http.post("/groups", json=body, headers=name(2))).json() == groups[0]
    assert (await pair.second.http.post(f"{path}/turns", json=turns, headers=name(3))).content == first.content
    rewards = {"rewards": [{"session_id": name, "reward": 1.0} for name in groups[0]["session_ids"]]}
    finished = [await pair.second.http.post(f"{path}/finish", json=rewards) for _ in range(2)]
    assert finished[0].json() == finished[1].json()
    assert [len(part) for trajectory in await pair.second.published() for part in sampled(trajectory)] == [7, 7]


async def test_ends_are_known_to_all_servers(pair: Pair) -> None:
    done, lost = await open_session(pair.first), await open_session(pair.first)
    await say(pair.first, done, 1, "hello")
    finished = await pair.first.http.post(f"/sessions/{done['session_id']}/finish", json={"reward": 1.0})
    await pair.first.http.post(f"/sessions/{lost['session_id']}/abort")
    repeated = await pair.second.http.post(f"/sessions/{done['session_id']}/finish", json={"reward": 1.0})
    assert repeated.json() == finished.json()
    assert code(await say(pair.second, done, 2, "hello")) == (409, "session_concluded")
    status = await pair.second.http.get(f"/sessions/{lost['session_id']}")
    assert status.json()["state"] == "aborted"
    assert len(await pair.second.published()) == 1


async def test_groups_that_nobody_asks_for_are_taken_over_expire_and_give_their_place_back(pair: Pair) -> None:
    await open_session(pair.first, group_id="g", idle_timeout_s=3.0)
    await pair.leave()
    owners = RunKeys(pair.second.run_id).owners
    await until(lambda: _closed(pair.second), 15.0)
    assert await pair.second.redis.hgetall(owners) == {}


@pytest.mark.slow
async def test_a_group_whose_journal_cannot_be_read_hinders_no_other(pair: Pair) -> None:
    keys, redis = RunKeys(pair.second.run_id), pair.second.redis
    for number in range(4):
        await redis.rpush(keys.journal(f"g-bad-{number}"), b"\xffno record")
        await redis.hset(keys.owners, f"g-bad-{number}", "s9/dead")
    await open_session(pair.first, group_id="g", idle_timeout_s=3.0)
    await pair.leave()
    await until(lambda: _closed(pair.second), 15.0)
    assert pair.second.stop.failure is None


async def _closed(host: Host) -> bool:
    accounts = await host.ledger.accounts()
    return (accounts.closed_groups, accounts.dropped_groups) == (1, 1)


async def test_a_group_that_was_admitted_and_never_written_down_gives_its_place_back(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_server.lifecycle.takeover.UNWRITTEN_AFTER_S", 0.5)
    rules = {"engine_version": 0, "base_version": 0, "k": 0, "batch": 16}
    assert await pair.second.ledger.open_group("g-lost", "s9", **rules) >= 0  # type: ignore[arg-type]
    await until(lambda: _closed(pair.second), 10.0)


@pytest.mark.parametrize("then", ["writes it down and dies", "gives its place back", "does nothing yet"])
@pytest.mark.parametrize(
    ("path", "body", "prefix"),
    [
        ("/groups", {"task": "sums", "group_size": 1, "sampling": {"max_tokens": 24}}, "g-"),
        ("/sessions", {"env": "sums"}, "g.s-"),
    ],
)
async def test_a_group_that_another_server_is_just_opening_is_opened_where_the_call_comes_next(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], prefix: str, then: str
) -> None:
    """The other server was lost between admission and the journal's first line, and the gateway sent the call on."""
    monkeypatch.setattr("rollout_server.lifecycle.open._FOUND_WITHIN_S", 0.5)
    ids = [f"{prefix}{number:032d}" for number in (1, 2)]
    async with serve(ScriptedEngine(answer_length=6, max_model_len=2048), "s0") as host:
        keys = RunKeys(host.run_id)
        # What the other server will have written: this one's journal of an earlier call, under the new name.
        await host.http.post(path, json=body, headers=name(1))
        lines = await host.redis.lrange(keys.journal(ids[0]), 0, -1)
        lines = [line.replace(f"{1:032d}".encode(), f"{2:032d}".encode()) for line in lines]
        await host.ledger.open_group(ids[1], "s9", engine_version=0, base_version=0, k=0, batch=16)
        call = asyncio.ensure_future(host.http.post(path, json=body, headers=name(2)))
        done, _ = await asyncio.wait({call}, timeout=0.2)
        assert not done, "it waits for what the other server does"
        if then == "does nothing yet":
            # Not a conflict, which would end the call: the group may be written down a moment later.
            assert code(await call) == (503, "not_ready")
            call = asyncio.ensure_future(host.http.post(path, json=body, headers=name(2)))
        if then == "writes it down and dies":
            await host.redis.rpush(keys.journal(ids[1]), *lines)
            await host.redis.hset(keys.owners, ids[1], "s9/dead")
        else:
            await host.ledger.close_group(ids[1], dropped=True)
        answer = await call
        assert answer.status_code in (200, 201), answer.text
        found = answer.json()["group_id"] if path == "/groups" else f"g.{answer.json()['session_id']}"
        assert found == ids[1]
        owners = await host.redis.hgetall(keys.owners)
        assert set(owners) == {group_id.encode() for group_id in ids}
        assert len(set(owners.values())) == 1, "both are this server's"
        assert {each.server_id for each in (await host.ledger.open_groups()).values()} == {"s0"}


async def test_a_server_reconciles_what_it_remembers_with_a_redis_that_came_back_as_it_was_before(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One group ended since, and is open again in Redis; another was opened since, and Redis does not know it."""
    monkeypatch.setattr("rollout_server.lifecycle.takeover.TAKE_ORPHANS_EVERY_S", 0.1)
    async with serve(ScriptedEngine(answer_length=6, max_model_len=2048), "s0") as host:
        keys = RunKeys(host.run_id)
        old = await open_session(host)
        spoken(await say(host, old, 1, "hello"))
        before = {key: await host.redis.hgetall(key) for key in (keys.owners, keys.open_groups, keys.accounts)}
        ended = await host.http.post(f"/sessions/{old['session_id']}/finish", json={"reward": 1.0})
        assert ended.status_code == 200, ended.text
        new = await open_session(host)
        for key, entries in before.items():
            await host.redis.delete(key)
            await host.redis.hset(key, mapping=entries)
        await host.redis.delete(keys.journal(new["group_id"]), keys.group_of(new["session_id"]))

        async def reconciled() -> bool:
            return not await host.redis.exists(keys.owners, keys.open_groups)

        await until(reconciled)
        accounts = await host.ledger.accounts()
        assert (accounts.opened_groups, accounts.closed_groups, accounts.dropped_groups) == (1, 1, 0)
        assert len(await host.published()) == 1

        async def given_up() -> bool:
            return (await host.http.get(f"/sessions/{new['session_id']}")).status_code == 404

        await until(given_up)
        again = await open_session(host)
        spoken(await say(host, again, 2, "hello"))


async def test_an_answer_interrupted_for_new_weights_goes_on_under_them_with_a_span_of_each(pair: Pair) -> None:
    session = await open_session(pair.first)
    engine = pair.engines[0]
    engine._step_s = 0.02
    calling = asyncio.create_task(say(pair.first, session, 1, "hello"))
    await until(lambda: engine.status().tokens_generated >= 2)
    assert (await pair.first.http.post("/pause?mode=abort")).status_code == 200
    engine.set_version(3)
    assert (await pair.first.http.post("/resume")).status_code == 200
    answer = (await calling).json()["choices"][0]
    assert answer["finish_reason"] == "stop"
    versions = answer["policy_versions"]
    assert [version for version, _ in versions] == [0, 3] and 2 <= versions[1][1] < 7
    unbroken = spoken(await say(pair.second, await open_session(pair.second), 2, "hello"))
    assert (answer["message"]["content"], answer["token_ids"]) == unbroken


async def test_draining_needs_somebody_to_hand_over_to(serve: Serve) -> None:
    async with serve(ScriptedEngine(), "s0") as alone:
        assert code(await alone.http.post("/admin/drain")) == (409, "conflict")
        assert (await alone.http.get("/readyz")).status_code == 200


async def test_a_drained_server_stays_lets_go_and_takes_nothing_new(pair: Pair) -> None:
    session = await open_session(pair.first)
    assert (await pair.first.http.post("/admin/drain")).json() == {"server_id": "s0", "state": "draining"}
    await until(lambda: _taken_over(pair, session))
    assert (await pair.first.http.get("/readyz")).status_code == 503
    assert code(await pair.first.http.post("/sessions", json={})) == (503, "draining")
    assert code(await say(pair.first, session, 2, "hello"))[0] in (421, 503)


async def _taken_over(pair: Pair, session: dict[str, Any]) -> bool:
    return (await say(pair.second, session, 1, "hello")).status_code == 200


async def test_sessions_leave_a_server_whose_engine_serves_nothing_any_more(pair: Pair) -> None:
    session = await open_session(pair.first)
    first, _ = spoken(await say(pair.first, session, 1, "hello"))
    pair.engines[0].failure = "the server behind it has died"
    await until(lambda: _moved(pair, session, first))
    assert (await pair.first.http.get("/readyz")).status_code == 503
    pair.engines[0].failure = None
    await until(lambda: _serves(pair.first))


async def _moved(pair: Pair, session: dict[str, Any], first: str) -> bool:
    return (await say(pair.second, session, 2, "hello", first, "and?")).status_code == 200


async def _serves(host: Host) -> bool:
    answer = await host.http.post("/sessions", json={})
    return answer.status_code == 201

"""The session API over real sockets and a real Valkey: opening, rewarding, ending, and every account in balance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

import httpx
import pytest

from services.config.settings import RunSettings
from services.security.permissions import Keys
from services.wire.trajectory import RewardSpan, Trajectory
from tests.support.rollout_host import Host, hosting, small_batch, until
from tests.support.scripted_engine import ScriptedEngine


class Serve(Protocol):
    def __call__(
        self, engine: ScriptedEngine, settings: RunSettings | None = None, **changes: Any
    ) -> AbstractAsyncContextManager[Host]: ...


@pytest.fixture
def serve(redis_url: str, run_id: str, chat_policy: Path) -> Serve:
    def make(
        engine: ScriptedEngine, settings: RunSettings | None = None, **changes: Any
    ) -> AbstractAsyncContextManager[Host]:
        plain = {"redis_url": redis_url, "run_id": run_id, "model": chat_policy, "settings": settings or small_batch()}
        return hosting(engine, **(plain | changes))

    return make


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(answer_length=3, max_model_len=2048)


@pytest.fixture
async def host(serve: Serve, engine: ScriptedEngine) -> AsyncIterator[Host]:
    async with serve(engine) as host:
        yield host


async def open_session(host: Host, **body: Any) -> dict[str, Any]:
    answer = await host.http.post("/sessions", json=body)
    assert answer.status_code in (200, 201), answer.text
    opened: dict[str, Any] = answer.json()
    return opened


async def say(host: Host, session: dict[str, Any], *texts: str, **body: Any) -> httpx.Response:
    """A chat call with the session's own key; `texts` alternate between user and assistant."""
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text} for index, text in enumerate(texts)]
    headers = {"Authorization": f"Bearer {session['api_key']}"}
    return await host.http.post(
        f"{session['base_url']}/chat/completions", json={"messages": messages} | body, headers=headers
    )


async def finish(host: Host, session: dict[str, Any], **body: Any) -> httpx.Response:
    return await host.http.post(f"/sessions/{session['session_id']}/finish", json=body)


def code(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_the_same_session_again_is_the_same_and_another_body_a_conflict(host: Host) -> None:
    body = {"session_id": "mine", "group_id": "ours", "group_size": 2, "metadata": {"try": "1"}}
    first = await host.http.post("/sessions", json=body)
    again = await host.http.post("/sessions", json=body | {"wait_s": 1.0})
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    assert code(await host.http.post("/sessions", json=body | {"max_tokens": 5})) == (409, "conflict")
    assert (await host.ledger.accounts()).opened_groups == 1


async def test_siblings_that_come_at_once_open_one_group_and_are_numbered(host: Host) -> None:
    opened = await asyncio.gather(*(open_session(host, group_id="g", group_size=4) for _ in range(4)))
    assert sorted(session["member"] for session in opened) == [0, 1, 2, 3]
    assert {session["ordinal"] for session in opened} == {0}
    assert (await host.ledger.accounts()).opened_groups == 1
    assert code(await host.http.post("/sessions", json={"group_id": "g", "group_size": 4})) == (409, "conflict")
    assert code(await host.http.post("/sessions", json={"group_id": "g", "group_size": 3})) == (409, "conflict")


async def test_a_session_becomes_one_trajectory_however_often_it_is_finished(host: Host) -> None:
    session = await open_session(host, env="shop", task_id="t-7", metadata={"a": "b"})
    assert (await say(host, session, "hello")).status_code == 200
    assert code(await finish(host, session)) == (409, "conflict")  # no reward yet
    answers = await asyncio.gather(*(finish(host, session, reward=0.5, components={"x": 1.0}) for _ in range(1)))
    answers += [await finish(host, session), await finish(host, session, reward=2.0)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.text for answer in answers}) == 1
    (trajectory,) = await host.published()
    assert (trajectory.task, trajectory.task_id, trajectory.metadata) == ("shop", "t-7", {"a": "b"})
    assert (trajectory.reward, trajectory.reward_components) == (0.5, {"x": 1.0})
    assert trajectory.trajectory_id == session["session_id"]
    assert answers[0].json()["stream_id"] is not None
    accounts = await host.ledger.accounts()
    assert (accounts.opened_groups, accounts.closed_groups, accounts.dropped_groups, accounts.published) == (1, 1, 0, 1)
    assert code(await say(host, session, "hello")) == (409, "session_concluded")


async def test_a_finish_repeated_after_a_restart_answers_the_same_stream_id(serve: Serve) -> None:
    async with serve(ScriptedEngine()) as host:
        session = await open_session(host, session_id="kept")
        await say(host, session, "hello")
        first = (await finish(host, session, reward=1.0)).json()
    async with serve(ScriptedEngine()) as host:
        again = await finish(host, session, reward=9.0)
        assert again.json() == first
        assert code(await host.http.post("/sessions", json={"session_id": "kept"})) == (409, "session_concluded")
        tokens = (await host.http.get("/sessions/kept/trajectory")).json()
        assert sum(tokens["segments"][0]["loss_mask"]) == first["sampled_tokens"]
        assert len(await host.published()) == 1


async def test_rewards_of_calls_and_of_the_session_add_up_and_may_be_given_again(host: Host) -> None:
    session = await open_session(host)
    first = (await say(host, session, "one")).json()
    second = (await say(host, session, "one", first["choices"][0]["message"]["content"], "two")).json()
    path = f"/sessions/{session['session_id']}/reward"
    for body in (
        {"reward": 7.0, "call_id": first["id"]},
        {"reward": 1.0, "call_id": first["id"], "components": {"tool": 1.0}},
        {"reward": -0.5, "call_id": second["id"], "components": {"tool": 2.0}},
        {"reward": 10.0, "components": {"final": 1.0}},
    ):
        assert (await host.http.post(path, json=body)).status_code == 200
    assert code(await host.http.post(path, json={"reward": 1.0, "call_id": "nobody"})) == (404, "not_found")
    nan = await host.http.post(path, content=b'{"reward": NaN}', headers={"content-type": "application/json"})
    assert code(nan) == (422, "schema")
    assert (await finish(host, session)).json()["reward"] == 10.5
    (trajectory,) = await host.published()
    assert trajectory.reward_components == {"tool": 3.0, "final": 1.0}
    (segment,) = trajectory.segments
    sampled = [(span.start, span.length) for span in segment.version_spans]
    assert trajectory.reward_spans == [
        RewardSpan(0, *sampled[0], 1.0, {"tool": 1.0}),
        RewardSpan(0, *sampled[1], -0.5, {"tool": 2.0}),
    ]


async def test_siblings_that_finish_one_by_one_close_their_group_with_the_last(host: Host) -> None:
    sessions = [await open_session(host, group_id="g", group_size=2) for _ in range(2)]
    for session in sessions:
        await say(host, session, "hello")
    await finish(host, sessions[0], reward=1.0)
    state = (await host.http.get("/groups/g")).json()
    assert (state["missing"], [sibling["state"] for sibling in state["siblings"]]) == ([1], ["finished", "open"])
    assert set(await host.ledger.open_groups()) == {"g"}
    await finish(host, sessions[1], reward=0.0)
    assert (await host.http.get("/groups/g")).json()["missing"] == []
    accounts = await host.ledger.accounts()
    assert (accounts.closed_groups, accounts.dropped_groups) == (1, 0)
    members = [(each.group_id, each.group_size, each.member) for each in await host.published()]
    assert members == [("g", 2, 0), ("g", 2, 1)]


async def test_a_group_says_which_siblings_nobody_opened(host: Host) -> None:
    await open_session(host, group_id="g", group_size=3)
    state = (await host.http.get("/groups/g")).json()
    assert [sibling["state"] for sibling in state["siblings"]] == ["open", "missing", "missing"]
    assert state["missing"] == [0, 1, 2]
    assert code(await host.http.get("/groups/strange")) == (404, "not_found")


async def test_an_aborted_session_ends_its_calls_and_never_reaches_the_stream(
    host: Host, engine: ScriptedEngine
) -> None:
    session = await open_session(host)
    await engine.pause("keep")
    calling = asyncio.create_task(say(host, session, "hello"))
    await until(lambda: engine.status().running == 1)
    path = f"/sessions/{session['session_id']}/abort"
    assert (await host.http.post(path)).json()["state"] == "aborted"
    assert code(await calling) == (409, "session_concluded")
    await until(lambda: engine.status().running == 0)
    assert (await host.http.post(path)).status_code == 200
    assert code(await finish(host, session, reward=1.0)) == (409, "session_concluded")
    assert await host.published() == []
    accounts = await host.ledger.accounts()
    assert (accounts.closed_groups, accounts.dropped_groups) == (1, 1)


async def test_a_sibling_lost_after_another_was_published_leaves_the_drop_to_the_trainer(host: Host) -> None:
    sessions = [await open_session(host, group_id="g", group_size=2) for _ in range(2)]
    await say(host, sessions[0], "hello")
    await finish(host, sessions[0], reward=1.0)
    await host.http.post(f"/sessions/{sessions[1]['session_id']}/abort")
    accounts = await host.ledger.accounts()
    assert (accounts.closed_groups, accounts.dropped_groups) == (1, 0)
    assert await host.ledger.still_open(["g"]) == set()


async def test_finishing_while_a_call_is_in_flight_is_refused_and_succeeds_after_it(
    host: Host, engine: ScriptedEngine
) -> None:
    session = await open_session(host)
    await engine.pause("keep")
    calling = asyncio.create_task(say(host, session, "hello"))
    await until(lambda: engine.status().running == 1)
    assert code(await finish(host, session, reward=1.0)) == (409, "conflict")
    await engine.resume()
    assert (await calling).status_code == 200
    assert (await finish(host, session, reward=1.0)).status_code == 200


async def test_an_idle_session_expires_and_a_heartbeat_keeps_one_alive(serve: Serve) -> None:
    async with serve(ScriptedEngine(), small_batch(timeout_s=0.4)) as host:
        idle = await open_session(host)
        kept = await open_session(host, idle_timeout_s=1.5)
        beating = True

        async def beat() -> None:
            while beating:
                answer = await host.http.post(f"/sessions/{kept['session_id']}/heartbeat")
                assert answer.json()["state"] == "open"
                await asyncio.sleep(0.1)

        beats = asyncio.create_task(beat())

        async def gone() -> bool:
            return bool((await host.http.get(f"/sessions/{idle['session_id']}")).json()["state"] == "expired")

        await until(gone)
        assert code(await say(host, idle, "hello")) == (410, "session_expired")
        assert code(await finish(host, idle, reward=1.0)) == (410, "session_expired")
        await asyncio.sleep(1.5)
        beating = False
        await beats
        assert (await say(host, kept, "hello")).status_code == 200
        assert (await host.ledger.accounts()).dropped_groups == 1


async def test_a_deadline_ends_the_call_that_it_meets_and_then_the_session(serve: Serve) -> None:
    engine = ScriptedEngine(step_s=60.0)
    # A group that nobody uses is dropped after `timeout_s`, and its sessions are then concluded: long after this.
    async with serve(engine, small_batch(timeout_s=20.0)) as host:
        session = await open_session(host, deadline_s=0.5, idle_timeout_s=60.0)
        assert code(await say(host, session, "hello")) == (504, "deadline")
        assert engine.status().running == 0

        async def expired() -> bool:
            return bool((await host.http.get(f"/sessions/{session['session_id']}")).json()["state"] == "expired")

        await until(expired)
        assert code(await say(host, session, "hello")) == (410, "session_expired")


async def test_a_sessions_tokens_are_bounded(host: Host) -> None:
    session = await open_session(host, max_tokens=6)
    first = (await say(host, session, "hello")).json()
    assert first["usage"]["completion_tokens"] == 4
    second = (await say(host, session, "hello", n=1)).json()
    assert (second["usage"]["completion_tokens"], second["choices"][0]["finish_reason"]) == (2, "length")
    assert code(await say(host, session, "hello")) == (400, "token_budget_exhausted")


async def test_admission_answers_429_with_retry_after_and_leaves_nothing_open(serve: Serve) -> None:
    async with serve(ScriptedEngine(), small_batch(k=0, batch=1)) as host:
        await open_session(host, group_id="first")
        refused = await host.http.post("/sessions", json={"group_id": "second"})
        assert code(refused) == (429, "capacity")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await open_session(host, purpose="evaluate"))["ordinal"] == -1
        assert set(await host.ledger.open_groups()) == {"first"}


async def test_a_group_of_another_server_cannot_be_joined_here(serve: Serve) -> None:
    async with serve(ScriptedEngine()) as first, serve(ScriptedEngine(), server_id="s1") as second:
        await open_session(first, group_id="g", group_size=2)
        refused = await second.http.post("/sessions", json={"group_id": "g", "group_size": 2})
        assert code(refused) == (421, "held_elsewhere")
        assert refused.headers["x-rollmesh-owner-url"] == first.url
        assert refused.headers["connection"] == "close"
        assert "another rollout server" in refused.json()["error"]["message"]
        other = await open_session(second)
        # One run, one secret: a key says which session it opens on every server of the run.
        assert code(await say(first, other | {"base_url": f"{first.url}/v1"}, "hello")) == (421, "held_elsewhere")


async def test_a_sessions_key_opens_that_session_and_nothing_of_the_environments(host: Host) -> None:
    session, other = await open_session(host), await open_session(host)
    with_key = {"Authorization": f"Bearer {session['api_key']}"}
    own, strange = f"/sessions/{session['session_id']}", f"/sessions/{other['session_id']}"
    assert (await host.http.get(own, headers=with_key)).status_code == 200
    assert (await host.http.post(f"{own}/heartbeat", headers=with_key)).status_code == 200
    for method, path in (
        ("GET", strange),
        ("POST", f"{own}/abort"),
        ("DELETE", own),
        ("GET", f"/groups/{session['group_id']}"),
        ("GET", "/trajectories"),
    ):
        assert code(await host.http.request(method, path, headers=with_key)) == (403, "permission_denied")
    for path, body in ((f"{own}/finish", {"reward": 1}), (f"{own}/reward", {"reward": 1}), ("/sessions", {})):
        assert code(await host.http.post(path, json=body, headers=with_key)) == (403, "permission_denied")
    mixed = other | {"api_key": session["api_key"]}
    assert code(await say(host, mixed, "hello")) == (403, "permission_denied")
    forged = session | {"api_key": session["api_key"][:-1] + ("0" if session["api_key"][-1] != "0" else "1")}
    assert code(await say(host, forged, "hello")) == (401, "invalid_api_key")


async def test_with_an_agent_key_configured_nothing_opens_without_one(serve: Serve) -> None:
    async with serve(ScriptedEngine(), keys=Keys(agent="secret")) as host:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
            assert code(await host.http.post("/sessions", json={}, headers=headers)) == (401, "invalid_api_key")
            refused = await host.http.post(
                "/v1/chat/completions", json={"messages": [{"role": "user"}]}, headers=headers
            )
            assert code(refused) == (401, "invalid_api_key")
        host.http.headers["Authorization"] = "Bearer secret"
        session = await open_session(host)
        assert (await say(host, session, "hello")).status_code == 200
        assert (await finish(host, session, reward=1.0)).status_code == 200


async def test_three_ways_name_the_same_session(host: Host, engine: ScriptedEngine) -> None:
    session = await open_session(host)
    body = {"messages": [{"role": "user", "content": "hello"}]}
    by_url = await host.http.post(f"/sessions/{session['session_id']}/v1/chat/completions", json=body)
    by_key = await host.http.post(
        "/v1/chat/completions", json=body, headers={"Authorization": f"Bearer {session['api_key']}"}
    )
    by_header = await host.http.post("/v1/chat/completions", json=body, headers={"X-Session-ID": session["session_id"]})
    assert [answer.status_code for answer in (by_url, by_key, by_header)] == [200] * 3
    assert code(await host.http.post("/v1/chat/completions", json=body)) == (401, "invalid_api_key")
    status = (await host.http.get(f"/sessions/{session['session_id']}")).json()
    assert (status["calls"], status["segments"]) == (3, 3)


async def test_what_was_finished_is_listed_in_the_order_of_completion(host: Host) -> None:
    sessions = [await open_session(host, session_id=f"s{number}") for number in range(3)]
    for session in sessions:
        await say(host, session, "hello")
    for number in (2, 0, 1):
        await finish(host, sessions[number], reward=float(number))
    page = (await host.http.get("/trajectories?limit=2")).json()
    assert [(each["session_id"], each["reward"]) for each in page["trajectories"]] == [("s2", 2.0), ("s0", 0.0)]
    rest = (await host.http.get("/trajectories", params={"after": page["next_after"]})).json()
    assert [each["session_id"] for each in rest["trajectories"]] == ["s1"]
    waiting = asyncio.create_task(host.http.get("/trajectories", params={"after": rest["next_after"], "wait_s": 10.0}))
    late = await open_session(host, session_id="late")
    await say(host, late, "hello")
    await finish(host, late, reward=1.0)
    assert [each["session_id"] for each in (await waiting).json()["trajectories"]] == ["late"]


async def test_a_session_can_be_looked_into_and_forgotten(host: Host) -> None:
    session = await open_session(host)
    path = f"/sessions/{session['session_id']}"
    said = (await say(host, session, "hello")).json()["choices"][0]["message"]["content"]
    await say(host, session, "hello", said, "and then?")
    messages = (await host.http.get(f"{path}/trajectory?format=messages")).json()
    (conversation,) = messages["conversations"]
    assert [message["role"] for message in conversation] == ["user", "assistant", "user", "assistant"]
    assert [message["content"] for message in conversation[:3]] == ["hello", said, "and then?"]
    (segment,) = (await host.http.get(f"{path}/trajectory")).json()["segments"]
    assert sum(segment["loss_mask"]) == 8
    assert (await host.http.delete(path)).status_code == 204
    assert code(await host.http.get(path)) == (404, "not_found")
    assert await host.published() == []


async def test_what_the_opener_decides_about_sampling_wins_over_the_agent(host: Host, engine: ScriptedEngine) -> None:
    session = await open_session(host, sampling_params={"temperature": 1.0, "max_tokens": 3})
    await say(host, session, "hello", temperature=0.0, top_p=0.5, max_tokens=100)
    sampling = engine.requests[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (1.0, 0.5, 3)
    await finish(host, session, reward=1.0)
    (trajectory,) = await host.published()
    assert [(each.temperature, each.top_p) for each in trajectory.samplings] == [(1.0, 0.5)]
    assert not trajectory.samplings[0].whole


async def test_sessions_of_a_group_that_was_opened_whole_speak_the_dialect_too(host: Host) -> None:
    group = await host.open(group_size=2)
    opened = [
        {"session_id": name, "api_key": key, "base_url": f"{host.url}/sessions/{name}/v1"}
        for name, key in zip(group["session_ids"], group["api_keys"], strict=True)
    ]
    for session in opened:
        assert (await say(host, session, "hello")).status_code == 200
    assert (await host.finish(group, 1.0, 0.0)).status_code == 200
    trajectories: list[Trajectory] = await host.published()
    assert [trajectory.reward for trajectory in trajectories] == [1.0, 0.0]


async def test_siblings_that_were_opened_together_wait_for_each_other(serve: Serve) -> None:
    async with serve(ScriptedEngine(), small_batch(timeout_s=1.0)) as host:
        group = await host.open(group_size=2)
        early, late = (
            {"session_id": name, "api_key": key, "base_url": f"{host.url}/sessions/{name}/v1"}
            for name, key in zip(group["session_ids"], group["api_keys"], strict=True)
        )
        await say(host, early, "hello")
        for _ in range(8):  # one agent works on, far beyond the idle time of its sibling
            await asyncio.sleep(0.25)
            assert (await say(host, late, "hello")).status_code == 200
        assert (await host.finish(group, 1.0, 0.0)).status_code == 200

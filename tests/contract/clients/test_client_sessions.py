"""A session from its opening to its trajectory, through both clients, on a real rollout server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from clients.rollout.client import RolloutClient
from clients.rollout.sync_client import SyncRolloutClient
from services.wire.errors import (
    ConflictError,
    ForbiddenError,
    NotFoundError,
    RollmeshError,
    SessionConcludedError,
    UnauthenticatedError,
)
from services.wire.rollout_api import SamplingLimits
from services.wire.session_api import FinishSession, GiveReward, OpenSession
from tests.support.rollout_host import Host, hosting, small_batch
from tests.support.scripted_engine import ScriptedEngine

Ask = Callable[..., Any]
both = pytest.mark.parametrize("kind", ["async", "sync"])


@asynccontextmanager
async def asking(kind: str, host: Host, **settings: Any) -> AsyncIterator[Ask]:
    if kind == "async":
        async with RolloutClient(host.url, patience_s=1.0, **settings) as client:

            async def ask(method: str, *arguments: Any, **more: Any) -> Any:
                return await getattr(client, method)(*arguments, **more)

            yield ask
        return
    with SyncRolloutClient(host.url, patience_s=1.0, **settings) as blocking:

        async def ask_in_thread(method: str, *arguments: Any, **more: Any) -> Any:
            return await asyncio.to_thread(getattr(blocking, method), *arguments, **more)

        yield ask_in_thread


@pytest.fixture
async def host(redis_url: str, run_id: str, tiny_policy: Path) -> AsyncIterator[Host]:
    engine = ScriptedEngine(answer_length=2)
    settings = small_batch(k=9, batch=4)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tiny_policy, settings=settings) as host:
        yield host


async def speak(base_url: str, api_key: str, prompt: str = "12=") -> str:
    """A text completion; returns its id."""
    async with httpx.AsyncClient(headers={"Authorization": f"Bearer {api_key}"}) as http:
        answer = await http.post(f"{base_url}/completions", json={"model": "any", "prompt": prompt, "max_tokens": 8})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])


@both
async def test_a_session_is_opened_rewarded_and_finished_exactly_once(kind: str, host: Host) -> None:
    async with asking(kind, host) as ask:
        body = OpenSession(
            env="mine", task_id="7", sampling_params=SamplingLimits(temperature=1.0), metadata={"a": "b"}
        )
        opened = await ask("open_session", body)
        assert opened.base_url == f"{host.url}/sessions/{opened.session_id}/v1"
        call = await speak(opened.base_url, opened.api_key)
        assert (await ask("heartbeat", opened.session_id)).state == "open"
        await ask("give_reward", opened.session_id, GiveReward(reward=0.25, call_id=call))
        status = await ask("give_reward", opened.session_id, GiveReward(reward=0.5, components={"neat": 1.0}))
        assert (status.reward, status.calls, status.sampled_tokens) == (0.75, 1, 3)
        tokens = await ask("trajectory_tokens", opened.session_id)
        assert sum(tokens.segments[0].loss_mask) == 3
        finished = await ask("finish_session", opened.session_id, FinishSession())
        again = await ask("finish_session", opened.session_id, FinishSession())
        assert finished == again
        assert finished.reward == 0.75
        assert (await ask("session_status", opened.session_id)).stream_id == finished.stream_id
        page = await ask("trajectories", limit=10, wait_s=1.0)
        (summary,) = page.trajectories
        assert (summary.stream_id, summary.env, summary.task_id) == (finished.stream_id, "mine", "7")
        assert summary.metadata == {"a": "b"}
        assert (await ask("trajectories", page.next_after)).trajectories == []
        with pytest.raises(SessionConcludedError):
            await ask("heartbeat", opened.session_id)
    (trajectory,) = await host.published()
    assert trajectory.reward == 0.75


@both
async def test_siblings_meet_in_a_group_that_says_who_is_missing(kind: str, host: Host) -> None:
    async with asking(kind, host) as ask:
        first = await ask("open_session", OpenSession(session_id="a", group_id="pair", group_size=2))
        assert (await ask("open_session", OpenSession(session_id="a", group_id="pair", group_size=2))) == first
        with pytest.raises(ConflictError):
            await ask("open_session", OpenSession(session_id="a", group_id="pair", group_size=2, env="another"))
        await speak(first.base_url, first.api_key)
        await ask("finish_session", "a", FinishSession(reward=1.0))
        state = await ask("group_state", "pair")
        assert (state.group_size, state.missing) == (2, [1])
        second = await ask("open_session", OpenSession(session_id="b", group_id="pair", group_size=2))
        assert second.ordinal == first.ordinal
        assert (await ask("abort_session", "b")).state == "aborted"
        await ask("delete_session", "b")


@both
async def test_a_sessions_key_opens_its_session_and_nothing_else(kind: str, host: Host) -> None:
    async with asking(kind, host) as ask:
        opened = await ask("open_session", OpenSession())
        other = await ask("open_session", OpenSession())
        with pytest.raises(NotFoundError):
            await ask("session_status", "nobody")
    async with asking(kind, host, api_key=opened.api_key) as ask:
        assert (await ask("heartbeat", opened.session_id)).state == "open"
        for method, *arguments in (
            ("heartbeat", other.session_id),
            ("give_reward", opened.session_id, GiveReward(reward=1.0)),
            ("finish_session", opened.session_id, FinishSession(reward=1.0)),
        ):
            with pytest.raises(ForbiddenError):
                await ask(method, *arguments)
    async with asking(kind, host, api_key=f"rs-{opened.session_id}-00") as ask:
        with pytest.raises(UnauthenticatedError):
            await ask("heartbeat", opened.session_id)


@both
async def test_a_name_that_needs_quoting_stays_one_part_of_the_path(kind: str, host: Host) -> None:
    async with asking(kind, host) as ask:
        for name in ("../run", "a b", "a?x=1", "ü"):
            with pytest.raises(RollmeshError) as refused:
                await ask("session_status", name)
            assert refused.value.code in ("not_found", "schema"), name

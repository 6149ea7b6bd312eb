"""A session that cannot be ended ends no server: the others expire, calls answer 503, and it is tried again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from rollout_server.lifecycle.expire import expire_idle
from rollout_server.sessions.group import Group, GroupRegistry
from rollout_server.sessions.session import Session, SessionEnd, Terms
from services.run_store.keys import RunKeys
from services.wire.errors import DrainingError
from services.wire.rollout_api import SamplingLimits
from services.wire.sampling import SamplingParams
from tests.support.cut_valkey import CutValkey
from tests.support.rollout_host import Host, hosting, small_batch
from tests.support.scripted_engine import ScriptedEngine
from tests.support.until import until

IDLE_S = 0.4


async def open_session(host: Host, group_id: str) -> None:
    body = {"group_id": group_id, "session_id": f"{group_id}.s", "idle_timeout_s": IDLE_S}
    assert (await host.http.post("/sessions", json=body)).status_code == 201


async def dropped(host: Host, groups: int) -> bool:
    accounts = await host.ledger.accounts()
    return (accounts.closed_groups, accounts.dropped_groups) == (groups, groups)


async def test_a_group_that_was_taken_over_keeps_no_other_from_expiring(
    redis_url: str, run_id: str, tiny_policy: Path
) -> None:
    settings = small_batch(batch=16, timeout_s=2.0)
    async with hosting(
        ScriptedEngine(), redis_url=redis_url, run_id=run_id, model=tiny_policy, settings=settings
    ) as host:
        for group_id in ("a", "lost", "z"):
            await open_session(host, group_id)
        await host.redis.hset(RunKeys(run_id).owners, "lost", "another/1")
        await until(lambda: dropped(host, 2))
        assert host.stop.failure is None
        # The other does not live: the group comes back, and ends here after all.
        await until(lambda: dropped(host, 3), 15.0)
        assert (await host.http.get("/readyz")).status_code == 200
        assert host.stop.failure is None


@pytest.mark.slow
async def test_a_server_outlives_the_redis_that_it_would_write_ends_to(
    run_id: str, tiny_policy: Path, tmp_path: Path
) -> None:
    valkey = CutValkey(tmp_path)
    try:
        settings = small_batch(batch=16, timeout_s=2.0)
        async with hosting(
            ScriptedEngine(), redis_url=valkey.plan.url, run_id=run_id, model=tiny_policy, settings=settings
        ) as host:
            await open_session(host, "a")
            valkey.kill()

            async def given_up() -> bool:
                answer = await host.http.get("/sessions/a.s")
                assert answer.status_code in (200, 503), answer.text
                return answer.status_code == 503

            with capture_logs() as lines:
                await until(given_up, 15.0)
                # Whatever else needs Redis says so, and says that it may be sent again.
                for answer in await asyncio.gather(*(host.http.get(path) for path in ("/run", "/trajectories"))):
                    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
            assert "Redis answers again" not in [line["event"] for line in lines]
            assert host.stop.failure is None
            valkey.start()
            await until(lambda: dropped(host, 1), 20.0)
            assert host.stop.failure is None
    finally:
        valkey.close()


class Ending:
    """Ends sessions as `Finisher` does, but for those of a group for which it fails."""

    def __init__(self, registry: GroupRegistry, fails: dict[str, Exception]) -> None:
        self.registry = registry
        self.fails = fails
        self.tried: list[str] = []

    async def abandon(self, session: Session, state: Any) -> SessionEnd:
        self.tried.append(session.group_id)
        await asyncio.sleep(0)
        failure = self.fails.get(session.group_id)
        if failure is not None:
            if isinstance(failure, DrainingError):  # as the journal does with one that is lost
                self.registry.forget_open(session.group_id, failure)
            raise failure
        return session.conclude(state)

    async def settle(self, group: Group) -> bool:
        failure = self.fails.get(f"settling {group.group_id}")
        if failure is not None:
            raise failure
        self.registry.drop(group, "idle")
        return True


@pytest.mark.parametrize(
    "failure",
    [DrainingError("another has it"), RuntimeError("a bug"), KeyError("g1"), ValueError("a bug")],
    ids=lambda failure: type(failure).__name__,
)
async def test_whatever_fails_for_a_group_the_sweep_goes_on(failure: Exception) -> None:
    registry = GroupRegistry()
    for name in ("g0", "g1", "g2", "g3"):
        group = Group(name, 0, 2, "t", "evaluate", 0.01)
        group.fill(Terms(task="t", purpose="evaluate", sampling=SamplingLimits(), idle_timeout_s=0.01))
        registry.add(group)
    ending = Ending(registry, {"g1": failure, "settling g2": failure})
    sweeping = asyncio.create_task(expire_idle(registry, ending, 0.01))  # type: ignore[arg-type]
    try:
        await until(lambda: ending.tried.count("g1") > 1 or registry.get_open("g1") is None)
        await until(lambda: registry.find_ended("g0") is not None and registry.find_ended("g3") is not None)
        del ending.fails["settling g2"]
        await until(lambda: registry.find_ended("g2") is not None)
        assert not sweeping.done()
    finally:
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)


async def test_of_siblings_opened_together_none_is_idle_while_one_is_used() -> None:
    registry = GroupRegistry()

    def add(name: str) -> Group:
        group = Group(name, 0, 3, "t", "evaluate", 0.01, SamplingParams(max_tokens=1))
        group.fill(Terms(task="t", purpose="evaluate", sampling=SamplingLimits(), idle_timeout_s=0.01))
        registry.add(group)
        return group

    in_use, *_ = add("g").sessions.values()
    in_use.calls_in_flight += 1
    ending = Ending(registry, {})
    sweeping = asyncio.create_task(expire_idle(registry, ending, 0.01))  # type: ignore[arg-type]
    try:
        for name in ("later", "last"):
            add(name)
            await until(lambda name=name: registry.find_ended(name) is not None)
        assert "g" not in ending.tried
        in_use.calls_in_flight -= 1
        await until(lambda: registry.find_ended("g") is not None)
    finally:
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)

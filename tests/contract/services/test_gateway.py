"""The gateway in front of servers that behave: calls are passed through whole, and go where their session is."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import httpx
import pytest

from services.gateway.upstream import _CheckedResolver
from services.run_store.discovery import ServerRecord
from tests.support.fake_servers import FakeServer
from tests.support.gateway_host import gateway, mesh
from tests.support.until import until

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def chat(session: dict[str, Any]) -> str:
    return f"/sessions/{session['session_id']}/v1/chat/completions"


def holder(servers: list[FakeServer], session: dict[str, Any]) -> FakeServer:
    return next(server for server in servers if server.name == session["server"])


async def test_a_session_is_served_by_the_server_that_opened_it(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id, "abc") as (host, servers):
        for _ in range(12):
            session = await host.open()
            key = {"Authorization": f"Bearer {session['api_key']}"}
            for path, headers in (
                (chat(session), {}),
                ("/v1/chat/completions", key),
                ("/v1/completions", {"X-Session-ID": session["session_id"]}),
            ):
                answer = await host.http.post(path, json=CHAT, headers=headers)
                assert answer.json()["server"] == session["server"]
        refused = [seen for server in servers for seen in server.seen if seen.path == "/admin"]
        assert refused == []
        # None was sent to a server that does not hold it: the three kinds of naming are understood at once.
        assert sum(len(server.seen) for server in servers) == 12 * 4


async def test_new_sessions_are_spread_over_all_servers(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id, "abc") as (host, _):
        opened = await asyncio.gather(*(host.open() for _ in range(30)))
        counts = [sum(each["server"] == name for each in opened) for name in "abc"]
        assert counts == [10, 10, 10]


@pytest.mark.parametrize("whole", [False, True], ids=["sessions", "groups"])
async def test_what_ended_holds_no_place_though_no_heartbeat_has_told_of_it(
    whole: bool, redis_url: str, run_id: str
) -> None:
    async with mesh(redis_url, run_id) as (host, servers):

        def opened_at() -> list[int]:
            return [sum(path in ("POST /sessions", "POST /groups") for path in each.paths()) for each in servers]

        async def open_one() -> tuple[int, str]:
            """The server that has it now, and how it is ended."""
            before = opened_at()
            if whole:
                end = f"/groups/{(await host.http.post('/groups', json={'group_size': 2})).json()['group_id']}/finish"
            else:
                end = f"/sessions/{(await host.open())['session_id']}/abort"
            return [now - then for now, then in zip(opened_at(), before, strict=True)].index(1), end

        opened = [await open_one() for _ in range(16)]
        assert opened_at() == [8, 8]
        for server, end in opened:
            if server == 0:
                assert (await host.http.post(end, json={})).status_code == 200
        assert [(await open_one())[0] for _ in range(8)] == [0] * 8


async def test_siblings_of_a_group_are_opened_on_one_server(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id, "abc") as (host, _):
        for group in range(6):
            siblings = await asyncio.gather(*(host.open(group_id=f"g{group}", group_size=4) for _ in range(4)))
            assert len({each["server"] for each in siblings}) == 1


async def test_a_gateway_that_knows_nothing_finds_the_holder(redis_url: str, run_id: str) -> None:
    """Nothing is lost with a gateway: a new one guesses, and the server that it asks knows better."""
    async with mesh(redis_url, run_id, "abc") as (first, servers):
        sessions = [await first.open() for _ in range(9)]
        groups = (await first.http.post("/groups", json={"group_size": 2})).json()
        async with gateway(redis_url, run_id) as second:
            await second.until_known(a="serving", b="serving", c="serving")
            for session in sessions:
                for _ in range(2):
                    answer = await second.http.post(chat(session), json=CHAT)
                    assert answer.json()["server"] == session["server"]
            turns = await second.http.post(f"/groups/{groups['group_id']}/turns", json={"turns": []})
            assert turns.status_code == 200
        for session in sessions:
            hops = [seen for server in servers for seen in server.seen if seen.path == chat(session)]
            assert len(hops) <= 3, "two calls, and at most one guess: the holder was not remembered"


async def test_calls_and_answers_pass_unchanged(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id, "a") as (host, (server,)):
        body = b'{"odd":   "spacing", "\xc3\xbc": 1}'
        answer = await host.http.post(
            "/sessions/made-up%20id/x?format=tokens&after=%2B",
            content=body,
            headers={
                "x-kept": "yes",
                "connection": "keep-alive, x-hop",
                "te": "trailers",
                "x-rollmesh-base-url": "lie",
            },
        )
        (seen,) = server.seen
        assert seen.path == "/sessions/made-up%20id/x?format=tokens&after=%2B"
        assert seen.body == body
        assert seen.headers["x-kept"] == "yes"
        assert seen.headers["x-rollmesh-base-url"] == host.url
        assert "te" not in seen.headers
        assert len(seen.call) == 32
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == "no such session"
        named = await host.http.get("/trajectories", headers={"x-rollmesh-call": "mine"})
        assert named.status_code == 200
        assert server.seen[-1].call == "mine"


async def test_streams_pass_as_they_come(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id, "a") as (host, (server,)):
        session = await host.open()
        server.hold.clear()
        async with host.http.stream("POST", chat(session), json=CHAT | {"stream": True}) as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            chunks = answer.aiter_raw()
            # The rest is not sampled before the first has arrived here.
            assert (await anext(chunks)).startswith(b"data: 1/0")
            server.hold.set()
            rest = b"".join([chunk async for chunk in chunks])
        assert rest == b"".join(server.world.answers[server.seen[-1].call][1:])


async def test_other_refusals_are_the_agents_to_see(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id, "ab") as (host, servers):
        for server in servers:
            server.custom = lambda seen: (429, [b'{"error": {"code": "capacity"}}'])
        answer = await host.http.post("/sessions", json={})
        assert (answer.status_code, answer.json()) == (429, {"error": {"code": "capacity"}})
        assert sum(len(server.seen) for server in servers) == 1


async def test_an_agent_that_hangs_up_ends_the_call(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id, "a") as (host, (server,)):
        session = await host.open()
        server.hold.clear()
        async with httpx.AsyncClient(base_url=host.url) as impatient:
            async with asyncio.timeout(5.0):
                while server.hung_up < 2:
                    for body in (CHAT, CHAT | {"stream": True}):
                        try:
                            await impatient.post(chat(session), json=body, timeout=0.1)
                        except httpx.TimeoutException:
                            continue
        await host.until_known(a="serving")
        assert [each["in_flight"] for each in await host.servers()] == [0]


async def test_the_run_is_as_far_as_its_last_server(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id, "abcd") as (host, servers):
        for server, version in zip(servers, (7, 5, 6, 0), strict=True):
            state = {"run_id": run_id, "policy_version": version, "concluded": True, "final_version": 7}
            server.custom = lambda _, state=state: (200, [json.dumps(state).encode()])
        servers[3].refusal = (503, "draining")
        answer = await host.http.get("/run")
        assert (answer.status_code, answer.json()["policy_version"]) == (200, 5)
        for server in servers:
            server.die()
        assert (await host.http.get("/run")).json()["error"]["code"] == "not_ready"


async def test_engines_are_not_operated_through_the_gateway(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id, "a") as (host, (server,)):
        for path in ("/pause", "/resume", "/update_weights", "/abort_requests", "/weights/commit", "/inference/v2/x"):
            answer = await host.http.post(path, json={})
            assert answer.status_code == 404
            assert "at its rollout server itself" in answer.json()["error"]["message"]
        too_large = await host.http.post("/sessions", content=b"x" * (1 << 20) + b"y")
        assert (too_large.status_code, too_large.json()["error"]["code"]) == (413, "request_too_large")
        assert server.seen == []


def generate(tail: int, *blocks: int) -> dict[str, Any]:
    """A call whose prompt has whole blocks of 64 ids, and a tail."""
    prompt = [block for block in blocks for _ in range(64)]
    return {"token_ids": [*prompt, tail], "sampling_params": {"max_tokens": 1}}


async def test_prompts_go_where_their_prefix_was_computed(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id, "abcd") as (host, servers):
        for server in servers:
            server.custom = lambda _, name=server.name: (200, [json.dumps({"server": name}).encode()])

        tails = itertools.count(1000)

        async def asked(*blocks: int) -> str:
            body = generate(next(tails), *blocks)
            # Ties are decided by the call's name: chance stays out of it.
            named = {"x-rollmesh-call": f"call {body['token_ids'][-1]}"}
            answer = await host.http.post("/inference/v1/generate", json=body, headers=named)
            name: str = answer.json()["server"]
            return name

        homes = {prefix: await asked(prefix, prefix) for prefix in range(1, 13)}
        assert len(set(homes.values())) == 4, "every server computes some of the prefixes"
        for prefix, home in homes.items():
            assert [await asked(prefix, prefix, more) for more in (50, 51, 52)] == [home] * 3
            # The first block alone is shared too, and the longest prefix that is known decides.
            assert await asked(prefix, 99) == home


async def test_a_prefix_does_not_overload_its_server(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id, "ab", prefix_slack=3) as (host, servers):
        for server in servers:
            server.hold.clear()
        bodies = [generate(tail, 1, 1) for tail in range(16)]
        calls = [asyncio.create_task(host.http.post("/inference/v1/generate", json=body)) for body in bodies]
        await until(lambda: sum(len(server.seen) for server in servers) == 16)
        counts = sorted(len(server.seen) for server in servers)
        assert counts[1] - counts[0] <= 4
        for server in servers:
            server.hold.set()
        await asyncio.gather(*calls)


async def test_groups_of_one_problem_go_to_one_server(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id, "abcd") as (host, _):
        homes = []
        for task in range(6):
            opened = [await host.open(env="sums", task_id=str(task), group_id=f"{task}-{each}") for each in range(2)]
            assert opened[0]["server"] == opened[1]["server"]
            homes.append(opened[0]["server"])
        assert len(set(homes)) == 4


@pytest.mark.parametrize("url", ["http://169.254.169.254", "http://[fe80::1]:8100", "http://u:p@127.0.0.1", "nothing"])
async def test_a_server_that_announces_where_none_is_gets_no_call(redis_url: str, run_id: str, url: str) -> None:
    async with mesh(redis_url, run_id, "a") as (host, (server,)):
        others = [("b", url), ("c", server.url)]
        records = [ServerRecord(name=name, url=at, state="serving", model="m", policy_version=0) for name, at in others]
        await host.registry.announce(records)
        # They were announced together: a view with the last one has seen the first.
        await host.until_known(a="serving", c="serving")
        assert {(await host.open())["server"] for _ in range(4)} == {"a"}


async def test_a_name_that_leads_where_no_server_is_is_not_connected_to() -> None:
    resolver = _CheckedResolver()
    # What the system's own resolver makes of a number: the metadata service.
    with pytest.raises(OSError, match="metadata service"):
        await resolver.resolve("2852039166", 80)
    assert {each["host"] for each in await resolver.resolve("localhost", 80)} == {"127.0.0.1"}

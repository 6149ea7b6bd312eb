"""Both rollout clients against a stand-in server: what goes over the wire, what is sent again, which error comes back."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response
from pydantic_core import to_jsonable_python

from clients.environments.base import AgentEndpoint
from clients.environments.chat import chat
from clients.rollout.client import RolloutClient
from clients.rollout.sync_client import SyncRolloutClient
from clients.rollout.transport import ServerUnreachableError, open_session
from services.http.app import Stop, make_server, open_port
from services.wire.errors import (
    CapacityError,
    ConflictError,
    ContextLengthError,
    ForbiddenError,
    RollmeshError,
    SessionConcludedError,
    SessionExpiredError,
    UnauthenticatedError,
    UnsupportedParameterError,
    WireError,
)
from services.wire.rollout_api import FinishGroup, OpenGroup, Runner, SamplingBody
from services.wire.session_api import FinishSession, GiveReward, OpenSession
from tests.conftest import free_port
from tests.support.until import until

STATUS = {
    "session_id": "s1",
    "group_id": "g1",
    "ordinal": 0,
    "member": 0,
    "state": "open",
    "calls": 1,
    "calls_in_flight": 0,
    "sampled_tokens": 3,
    "segments": 1,
    "reward": None,
    "stream_id": None,
    "policy_version": 4,
    "expires_in_s": 9.5,
    "metadata": {},
}
OPENED = {
    "session_id": "s1",
    "group_id": "g1",
    "ordinal": 0,
    "member": 0,
    "base_url": "http://x/sessions/s1/v1",
    "api_key": "k",
    "policy_version": 4,
}
FINISHED = {
    "session_id": "s1",
    "stream_id": "7-0",
    "reward": 1.0,
    "segments": 1,
    "sampled_tokens": 3,
    "finish_reason": "stop",
}
GROUP = {"group_id": "g1", "ordinal": 0, "group_size": 1, "purpose": "train", "siblings": [], "missing": [0]}
SAMPLING = SamplingBody(max_tokens=4)


@dataclass
class Said:
    method: str
    path: str
    query: str
    key: str | None
    body: Any


@dataclass
class StandIn:
    """Gives the scripted answers in turn, the last one for ever, and keeps what was said to it."""

    url: str = ""
    answers: list[tuple[int, Any]] = field(default_factory=list)
    retry_after: str | None = None
    said: list[Said] = field(default_factory=list)

    def will_answer(self, *answers: tuple[int, Any]) -> None:
        self.answers = list(answers)
        self.said.clear()

    async def handle(self, request: Request) -> Response:
        content = await request.body()
        url, key = request.url, request.headers.get("Authorization")
        self.said.append(Said(request.method, url.path, url.query, key, json.loads(content) if content else None))
        status, body = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        headers = {} if self.retry_after is None else {"Retry-After": self.retry_after}
        content = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        return Response(content, status_code=status, headers=headers, media_type="application/json")


def an_error(code: str, message: str = "no: try something else") -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": code}}


@asynccontextmanager
async def standing_in() -> AsyncIterator[StandIn]:
    listener = open_port("127.0.0.1", 0)
    stand_in = StandIn(f"http://127.0.0.1:{listener.getsockname()[1]}")
    app = FastAPI()
    app.add_route("/{rest:path}", stand_in.handle, methods=["GET", "POST", "DELETE"])
    server = make_server(app, Stop())
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield stand_in
    finally:
        server.should_exit = True
        await serving


Ask = Callable[..., Any]


@asynccontextmanager
async def asking(kind: str, url: str, **settings: Any) -> AsyncIterator[Ask]:
    """`ask("heartbeat", "s1")` calls that method of the client of this kind."""
    if kind == "async":
        async with RolloutClient(url, **settings) as client:

            async def ask(method: str, *arguments: Any, **more: Any) -> Any:
                return await getattr(client, method)(*arguments, **more)

            yield ask
        return
    with SyncRolloutClient(url, **settings) as blocking:

        async def ask_in_thread(method: str, *arguments: Any, **more: Any) -> Any:
            return await asyncio.to_thread(getattr(blocking, method), *arguments, **more)

        yield ask_in_thread


both = pytest.mark.parametrize("kind", ["async", "sync"])

CALLS = [
    ("join_runner", (Runner(name="e", incarnation="0000aaaa"),), {}, "POST /runners", {"lease_s": 9.0}),
    ("renew_runner", (Runner(name="e", incarnation="0000aaaa"),), {}, "POST /runners/heartbeat", {"lease_s": 9.0}),
    ("session_status", ("s1",), {}, "GET /sessions/s1", STATUS),
    ("give_reward", ("s1", GiveReward(reward=0.5, call_id="c")), {}, "POST /sessions/s1/reward", STATUS),
    ("finish_session", ("s1", FinishSession(reward=1.0)), {}, "POST /sessions/s1/finish", FINISHED),
    ("abort_session", ("s1",), {}, "POST /sessions/s1/abort", STATUS),
    ("heartbeat", ("s1",), {}, "POST /sessions/s1/heartbeat", STATUS),
    ("group_state", ("g1",), {}, "GET /groups/g1", GROUP),
    ("finish_group", ("g1", FinishGroup(rewards=[])), {}, "POST /groups/g1/finish", {"stream_ids": {}}),
    (
        "trajectory_tokens",
        ("s1",),
        {},
        "GET /sessions/s1/trajectory?format=tokens",
        {"session_id": "s1", "segments": []},
    ),
    (
        "trajectory_messages",
        ("s1",),
        {},
        "GET /sessions/s1/trajectory?format=messages",
        {"session_id": "s1", "conversations": []},
    ),
    (
        "trajectories",
        ("7-0",),
        {"limit": 5, "wait_s": 2.0},
        "GET /trajectories?after=7-0&limit=5&wait_s=2.0",
        {"trajectories": [], "next_after": "7-0"},
    ),
]


@both
async def test_every_call_has_its_route_and_its_typed_answer(kind: str) -> None:
    async with standing_in() as server, asking(kind, server.url, api_key="agent-key") as ask:
        for method, arguments, more, route, answer in CALLS:
            server.will_answer((200, answer))
            got = await ask(method, *arguments, **more)
            assert to_jsonable_python(got) == answer, method
            (said,) = server.said
            path = said.path if not said.query else f"{said.path}?{said.query}"
            assert f"{said.method} {path}" == route
            assert said.key == "Bearer agent-key"
        runner = Runner(name="env", incarnation="0000aaaa")
        server.will_answer((204, None))
        assert await ask("leave_runner", runner) is None
        assert (server.said[0].path, server.said[0].body) == ("/runners/leave", runner.model_dump())
        server.will_answer((204, None))
        assert await ask("delete_session", "s1") is None
        assert (server.said[0].method, server.said[0].path) == ("DELETE", "/sessions/s1")


def test_both_clients_have_the_same_methods() -> None:
    def methods(client: type) -> dict[str, list[str]]:
        public = {name: kind for name, kind in vars(client).items() if not name.startswith("_") and callable(kind)}
        return {name: list(inspect.signature(method).parameters) for name, method in public.items()}

    assert methods(RolloutClient) == methods(SyncRolloutClient)


@both
async def test_a_session_opened_again_after_a_lost_answer_is_the_same_session(kind: str) -> None:
    async with standing_in() as server, asking(kind, server.url) as ask:
        server.will_answer((503, an_error("not_ready")), (503, an_error("not_ready")), (201, OPENED))
        await ask("open_session", OpenSession(env="mine"))
        assert len(server.said) == 3
        chosen = {said.body["session_id"] for said in server.said}
        assert len(chosen) == 1, "every attempt names the same session"
        await ask("open_session", OpenSession(env="mine"))
        assert server.said[-1].body["session_id"] not in chosen
        await ask("open_session", OpenSession(session_id="my-own"))
        assert server.said[-1].body["session_id"] == "my-own"
        assert server.said[-1].key is None


@both
@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("session_concluded", SessionConcludedError),
        ("session_expired", SessionExpiredError),
        ("context_length_exceeded", ContextLengthError),
        ("invalid_api_key", UnauthenticatedError),
        ("permission_denied", ForbiddenError),
        ("unsupported_parameter", UnsupportedParameterError),
        ("conflict", ConflictError),
    ],
)
async def test_errors_come_back_as_their_own_kind_and_are_not_repeated(
    kind: str, code: str, error: type[RollmeshError]
) -> None:
    async with standing_in() as server, asking(kind, server.url) as ask:
        server.will_answer((error.status, an_error(code, "the maximum context length is 8")))
        with pytest.raises(error, match=f"answered {error.status} .the maximum context length is 8"):
            await ask("heartbeat", "s1")
        assert len(server.said) == 1


@both
async def test_capacity_is_waited_for_as_long_as_the_server_says_and_no_longer_than_patience(kind: str) -> None:
    async with standing_in() as server:
        server.retry_after = "0.05"
        async with asking(kind, server.url, patience_s=5.0) as ask:
            server.will_answer((429, an_error("capacity")), (429, an_error("capacity")), (201, OPENED))
            await ask("open_session", OpenSession())
            assert len(server.said) == 3
        server.retry_after = "60"
        async with asking(kind, server.url, patience_s=5.0) as ask:
            server.will_answer((429, an_error("capacity")))
            with pytest.raises(CapacityError) as closed:
                await ask("open_session", OpenSession())
            assert closed.value.retry_after_s == 60.0
            assert len(server.said) == 1
        server.retry_after = "Wed, 21 Oct 2026 07:28:00 GMT"
        async with asking(kind, server.url, patience_s=0.5) as ask:
            with pytest.raises(CapacityError) as closed:
                await ask("open_session", OpenSession())
            assert closed.value.retry_after_s == 1.0


@both
async def test_an_answer_of_another_version_of_the_api_says_so(kind: str) -> None:
    async with standing_in() as server, asking(kind, server.url) as ask:
        server.will_answer((200, {"surprise": True}))
        with pytest.raises(WireError, match="answered no SessionStatus"):
            await ask("heartbeat", "s1")
        server.will_answer((200, {"surprise": True}))
        with pytest.raises(WireError, match=r"groups/g/finish answered what is not expected .*stream_ids"):
            await ask("finish_group", "g", FinishGroup(rewards=[]))
        server.will_answer((500, b"<html>a proxy's page</html>"))
        with pytest.raises(RollmeshError, match="no error of ours"):
            await ask("heartbeat", "s1")


@asynccontextmanager
async def hanging_up(counted: list[str]) -> AsyncIterator[str]:
    """A server that reads a request and hangs up: nobody can tell whether it was carried out."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        counted.append((await reader.readuntil(b"\r\n\r\n")).decode().lower())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@both
async def test_a_call_whose_answer_was_lost_is_sent_again_as_the_same_call(kind: str) -> None:
    counted: list[str] = []
    async with hanging_up(counted) as url, asking(kind, url, patience_s=0.5) as ask:
        for method, *arguments in (("finish_session", "s1", FinishSession()), ("open_session", OpenSession())):
            counted.clear()
            with pytest.raises(ServerUnreachableError) as broken:
                await ask(method, *arguments)
            assert broken.value.sent
            assert len(counted) > 2, method
        names = []
        for _ in range(2):
            counted.clear()
            with pytest.raises(ServerUnreachableError):
                await ask("open_group", OpenGroup(task="t", group_size=1, sampling=SAMPLING))
            assert len(counted) > 2
            (name,) = {line for request in counted for line in request.split("\r\n") if "x-rollmesh-call" in line}
            names.append(name)
        assert names[0] != names[1], "two calls, not one"


async def test_an_environments_chat_outlasts_a_gateway_that_is_started_again_as_one_call() -> None:
    names: list[str | None] = []
    completion = {"choices": [{"message": {"role": "assistant", "content": "4"}, "finish_reason": "stop"}]}
    port = free_port()

    async def answer(request: Request) -> Response:
        names.append(request.headers.get("x-rollmesh-call"))
        return Response(json.dumps(completion), media_type="application/json")

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        names.extend(line.partition(": ")[2] for line in head.split("\r\n") if line.startswith("x-rollmesh-call"))
        writer.close()

    endpoint = AgentEndpoint(f"http://127.0.0.1:{port}/v1", "key", "s", 8, 1.0)
    async with open_session(True) as http:
        async with await asyncio.start_server(hang_up, "127.0.0.1", port):
            asking_it = asyncio.create_task(chat(http, endpoint, [{"role": "user", "content": "2+2?"}]))
            await until(lambda: len(names) > 0)
        app = FastAPI()
        app.add_route("/{rest:path}", answer, methods=["POST"])
        server = make_server(app, Stop())
        serving = asyncio.create_task(server.serve(sockets=[open_port("127.0.0.1", port)]))
        try:
            _, said = await asyncio.wait_for(asking_it, 10.0)
        finally:
            server.should_exit = True
            await serving
    assert said.text == "4"
    assert len(names) > 1 and len(set(names)) == 1 and names[0], "the same call each time"


async def test_a_client_that_does_not_wait_for_admission_still_waits_for_its_server() -> None:
    async with standing_in() as server, asking("async", server.url, waits_for_admission=False) as ask:
        server.retry_after = "0.01"
        server.will_answer((503, an_error("not_ready")), (503, an_error("draining")), (429, an_error("capacity")))
        with pytest.raises(CapacityError):
            await ask("open_group", OpenGroup(task="t", group_size=1, sampling=SAMPLING))
        assert len(server.said) == 3


@both
async def test_a_server_that_is_not_there_is_said_to_be_out_of_reach(kind: str) -> None:
    async with asking(kind, f"http://127.0.0.1:{free_port()}", patience_s=0.2) as ask:
        with pytest.raises(ServerUnreachableError) as refused:
            await ask("run_state")
    assert not refused.value.sent


@both
async def test_a_client_outside_its_block_says_how_to_use_it(kind: str) -> None:
    client: Any = RolloutClient("http://x") if kind == "async" else SyncRolloutClient("http://x")
    with pytest.raises(RuntimeError, match="context manager"):
        answer = client.heartbeat("s1")
        await answer

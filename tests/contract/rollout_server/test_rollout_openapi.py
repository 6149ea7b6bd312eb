"""Schemathesis over the rollout server's own OpenAPI document: whatever is sent, the answer is one that it declares.

Calls get ids of sessions and groups that are open, so that they come past 404, and now and then ids that it makes up.
Routes that stop the engine for all others have a pass of their own, and the engine is resumed after each of their calls.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.support.chat_policy import save_chat_policy
from tests.support.examples import examples
from tests.support.rollout_host import hosting, small_batch
from tests.support.telling_engine import TellingEngine

EXAMPLES = 20
"""Calls of each route that fit the document, and as many that do not."""
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
STOPPING = ("/pause", "/abort_requests")
"""Routes that other calls wait for."""
NEEDS_A_MANIFEST = (
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/weights/stage",
    "/weights/commit",
    "/weights/rollback",
)
"""Routes that only succeed for a trainer, after its other calls, or never."""
BOUND_TO_OTHERS = ("wait_s", "call_id", "min_tokens")
"""Fields whose values are right or wrong for reasons that no document tells."""
VOCABULARY = 256
NO_JSON = ("/weights/stage",)
"""Routes whose bodies are bytes."""
SCORED = ("/v1/completions", "/inference/v1/generate")
"""Routes that tell the logprobs of a prompt."""
UNSUPPORTED = (
    *("functions", "chat_template_kwargs", "modalities", "logit_bias", "tool_choice", "response_format", "echo"),
    *("suffix", "best_of", "output_mode", "features", "content_parts", "kv_transfer_params", "ec_transfer_params"),
)


class Server:
    """A server in a thread of its own, and ids of what is open there."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=20.0)
        self.requests = requests.Session()
        self._sessions: list[str] = []
        self._groups: list[dict[str, Any]] = []

    def session(self) -> str:
        """The id of an open session in which something was said."""
        while True:
            if not self._sessions:
                opened = self.http.post("/sessions", json={}).json()
                said = {"messages": [{"role": "user", "content": "hello"}]}
                self.http.post(f"/sessions/{opened['session_id']}/v1/chat/completions", json=said).raise_for_status()
                self._sessions.append(opened["session_id"])
            found = self.http.get(f"/sessions/{self._sessions[0]}")
            if found.status_code == 200 and found.json()["state"] == "open":
                return self._sessions[0]
            self._sessions.pop()

    def group(self) -> dict[str, Any]:
        """An open group of two."""
        while True:
            if not self._groups:
                body = {"task": "fuzz", "group_size": 2, "sampling": {"max_tokens": 4}}
                group = self.http.post("/groups", json=body).json()
                turns = [{"session_id": name, "text": "hello"} for name in group["session_ids"]]
                self.http.post(f"/groups/{group['group_id']}/turns", json={"turns": turns}).raise_for_status()
                self._groups.append(group)
            state = self.http.get(f"/groups/{self._groups[0]['group_id']}").json()
            if {sibling["state"] for sibling in state["siblings"]} == {"open"}:
                return self._groups[0]
            self._groups.pop()


@pytest.fixture(scope="module")
def server(valkey: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("chat") / "chat-policy"
    save_chat_policy(folder)
    ready, done = threading.Event(), asyncio.Event()
    found: list[tuple[str, asyncio.AbstractEventLoop]] = []

    async def live() -> None:
        terms = small_batch(batch=1 << 20)
        async with hosting(
            TellingEngine(), redis_url=valkey.url, run_id="openapi", model=folder, settings=terms
        ) as host:
            found.append((host.url, asyncio.get_running_loop()))
            ready.set()
            await done.wait()

    thread = threading.Thread(target=lambda: asyncio.run(live()))
    thread.start()
    try:
        assert ready.wait(30.0)
        url, loop = found[0]
        server = Server(url)
        yield server
        server.http.close()
        server.requests.close()
        loop.call_soon_threadsafe(done.set)
    finally:
        thread.join(timeout=20.0)


@pytest.mark.parametrize("tag", ["rollout", "sessions", "openai", "engine", "weights", "probes"])
def test_every_call_is_answered_as_the_document_says(server: Server, tag: str) -> None:
    statuses: dict[str, Counter[int]] = {}
    for operation in all_operations(server):
        if (operation.tags or ["probes"]) == [tag] and operation.path not in (*STOPPING, *NO_JSON):
            statuses[operation.label] = fuzz(server, operation)
    assert statuses, f"no route has the tag {tag}"
    for label, seen in statuses.items():
        if not label.endswith(NEEDS_A_MANIFEST):
            assert any(200 <= status < 300 for status in seen), f"{label} never came past {dict(seen)}"


def test_calls_that_stop_the_engine_are_answered_as_the_document_says(server: Server) -> None:
    operations = [operation for operation in all_operations(server) if operation.path in STOPPING]
    assert len(operations) == len(STOPPING)
    for operation in operations:
        fuzz(server, operation)
    assert server.http.get("/is_paused").json() == {"is_paused": False}


def all_operations(server: Server) -> list[Any]:
    """The operations of the served document."""
    document = _without_tuples(server.http.get("/openapi.json").json())
    return [found.ok() for found in schemathesis.openapi.from_dict(document).get_all_operations()]


def _without_tuples(node: Any) -> Any:
    """The same schema with pairs of one type as lists of two: schemathesis spells tuples as an older draft does."""
    if isinstance(node, list):
        return [_without_tuples(each) for each in node]
    if not isinstance(node, dict):
        return node
    parts = node.get("prefixItems")
    if isinstance(parts, list) and all(part == parts[0] for part in parts):
        node = {key: value for key, value in node.items() if key != "prefixItems"} | {"items": parts[0]}
    return {key: _without_tuples(value) for key, value in node.items()}


def fuzz(server: Server, operation: Any) -> Counter[int]:
    """Many calls of one route, each checked; returns how often each status was answered."""
    statuses: Counter[int] = Counter()
    # Without a body or a query there is nothing that does not fit.
    modes = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE][: 1 + bool(operation.body or operation.query)]

    for mode in modes:

        @settings(examples(EXAMPLES), suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode), known=st.sampled_from([True, True, True, False]))
        def call(case: Any, known: bool) -> None:
            if known:
                tame(server, case)
            wait_s = (case.query or {}).get("wait_s")
            if isinstance(wait_s, int | float) and 0.0 <= wait_s <= 60.0:
                case.query["wait_s"] = 0  # nobody waits a minute for what never comes
            answer = case.call(base_url=server.url, session=server.requests, timeout=20.0)
            if operation.path in STOPPING:
                server.http.post("/resume").raise_for_status()
            statuses[answer.status_code] += 1
            case.validate_response(answer, checks=CHECKS)

        call()
    return statuses


def tame(server: Server, case: Any) -> None:
    """Name what is open, and leave out what no call may ask for."""
    names = case.path_parameters or {}
    body = case.body if isinstance(case.body, dict) else {}
    if "session_id" in names:
        names["session_id"] = server.session()
    if "group_id" in names:
        group = server.group()
        names["group_id"] = group["group_id"]
        for name in ("turns", "rewards"):
            if isinstance(body.get(name), list):
                body[name] = [one for one in body[name] if isinstance(one, dict)][: len(group["session_ids"])]
                for one, session_id in zip(body[name], group["session_ids"], strict=False):
                    one["session_id"] = session_id
                    _one_of(one)
    if isinstance(body.get("token_ids"), list):
        body["token_ids"] = [token % VOCABULARY for token in body["token_ids"] if isinstance(token, int)]
    if "prompt" in body:
        body["prompt"] = body["prompt"] if body["prompt"] and isinstance(body["prompt"], str) else "hello"
    if case.path in ("/v1/chat/completions", "/v1/completions"):
        case.headers["X-Session-ID"] = server.session()
    for scored in (body, body.get("sampling_params")):
        # Only 0 is taken, only outside sessions, of one whole answer: one call in so many.
        if isinstance(scored, dict) and scored.pop("prompt_logprobs", None) is not None and case.path in SCORED:
            scored |= {"prompt_logprobs": 0, "n": 1}
            body["stream"] = False
            case.headers.pop("X-Session-ID", None)
    for name in (*UNSUPPORTED, *BOUND_TO_OTHERS):
        body.pop(name, None)


def _one_of(turn: dict[str, Any]) -> None:
    """Turns say text or tokens, which the document does not tell."""
    if turn.get("token_ids"):
        turn.pop("text", None)
    elif "reward" not in turn:
        turn.pop("token_ids", None)
        turn["text"] = turn.get("text") or "x"

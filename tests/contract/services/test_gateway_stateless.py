"""Requests outside any session whose server fails: the gateway continues them from their own tokens, unnoticed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from services.run_store.client import connect
from services.run_store.keys import RunKeys
from services.wire.gateway_api import CALL_HEADER
from tests.support.fake_servers import FakeServer, Seen
from tests.support.gateway_host import GatewayHost, mesh

GENERATE = "/inference/v1/generate"
PROMPT = [900, 901, 902]
EVERY = 1 << 20


def call(length: int, *, n: int = 1, **more: Any) -> dict[str, Any]:
    sampling = {"max_tokens": length, "logprobs": 1, "n": n, "min_tokens": 1}
    return {"token_ids": PROMPT, "sampling_params": sampling} | more


def choice(index: int, tokens: list[int], finish: str | None, version: int | None) -> dict[str, Any]:
    entries = [
        {"token": f"token_id:{token}", "token_id": token, "logprob": -token / 100, "rank": None, "top_logprobs": []}
        for token in tokens
    ]
    sampled: dict[str, Any] = {"index": index, "token_ids": tokens, "logprobs": {"content": entries}}
    sampled["finish_reason"] = finish
    if version is not None:
        sampled["policy_versions"] = [[version, 0]]
        sampled["weight_versions"] = [{"version": str(version), "start": 0, "end": len(tokens)}]
    return sampled


def engine(version: int, breaks_after: Callable[[int], int] = lambda _: EVERY) -> Callable[[Seen], Any]:
    """Generates 0, 1, 2 … whatever it is asked, so an unbroken sample is known; sample `index` breaks off as told."""

    def answer(seen: Seen) -> tuple[int, list[bytes]]:
        asked = seen.json()
        begin, most = asked.get("resumed", 0), asked["sampling_params"]["max_tokens"]
        first = asked.get("first_index", 0)
        samples = []
        for index in range(asked["sampling_params"]["n"]):
            count = min(most, breaks_after(first + index))
            samples.append((list(range(begin, begin + count)), "length" if count == most else "abort"))
        if asked.get("stream"):
            return 200, _events(asked, samples[0][0], samples[0][1], version)
        sampled = sum(len(tokens) for tokens, _ in samples)
        prompt = len(asked["token_ids"])
        body = {
            "request_id": f"r{version}",
            "created": 5,
            "model": "m",
            "choices": [choice(index, *sample, version) for index, sample in enumerate(samples)],
            "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
        }
        return 200, [json.dumps(body, separators=(",", ":")).encode()]

    return answer


def _events(asked: dict[str, Any], tokens: list[int], finish: str, version: int) -> list[bytes]:
    """One event a token, the last with the reason; then the usage; then the end."""
    assert asked["stream_options"]["version_spans"]
    pieces = [choice(0, [token], None, None) | {"version_spans": [[0, 1, version]]} for token in tokens]
    pieces.append(choice(0, [], finish, version))
    pieces[-1]["weight_versions"][0]["end"] = len(tokens)
    bodies: list[dict[str, Any]] = [{"request_id": f"r{version}", "choices": [piece]} for piece in pieces]
    if asked["stream_options"].get("include_usage"):
        count, prompt = len(tokens), len(asked["token_ids"])
        spent = {"prompt_tokens": prompt, "completion_tokens": count, "total_tokens": prompt + count}
        bodies.append({"request_id": f"r{version}", "choices": [], "usage": spent})
    return [*(b"data: " + json.dumps(body).encode() + b"\n\n" for body in bodies), b"data: [DONE]\n\n"]


def only_first_breaks(servers: list[FakeServer], breaks_after: Callable[[int], int]) -> None:
    """Whichever server is asked first breaks off, all others go on to the end. Versions: 1 for the first, 2 for others."""

    def first(seen: Seen) -> Any:
        for server in servers:
            server.custom = engine(2)
        return engine(1, breaks_after)(seen)

    for server in servers:
        server.custom = first


async def streamed(host: GatewayHost, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of an answer, which must end as it should."""
    answer = await host.http.post(GENERATE, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    *events, end, nothing = answer.text.split("\n\n")
    assert (end, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


async def test_samples_that_were_interrupted_are_finished_elsewhere(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id) as (host, servers):
        only_first_breaks(servers, lambda index: (4, EVERY, 0)[index])
        answer = (await host.http.post(GENERATE, json=call(10, n=3, request_id="mine"))).json()
        assert [each["token_ids"] for each in answer["choices"]] == [list(range(10))] * 3
        assert [each["index"] for each in answer["choices"]] == [0, 1, 2]
        assert [each["finish_reason"] for each in answer["choices"]] == ["length"] * 3
        assert [each["policy_versions"] for each in answer["choices"]] == [[[1, 0], [2, 4]], [[1, 0]], [[2, 0]]]
        assert answer["choices"][0]["weight_versions"] == [
            {"version": "1", "start": 0, "end": 4},
            {"version": "2", "start": 4, "end": 10},
        ]
        for each in answer["choices"]:
            assert [entry["token_id"] for entry in each["logprobs"]["content"]] == list(range(10))
        assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 30, "total_tokens": 33}
        assert answer["request_id"] == "r1"

        (first,) = [seen for server in servers for seen in server.seen if "resumed" not in seen.json()]
        rests = [seen for server in servers for seen in server.seen if "resumed" in seen.json()]
        assert len({seen.headers[CALL_HEADER] for seen in (first, *rests)}) == 3, "they are calls of their own"
        broken = next(server for server in servers if first in server.seen)
        assert all(seen not in broken.seen for seen in rests)
        asked = sorted((seen.json() for seen in rests), key=lambda body: int(body["first_index"]))
        assert [body["token_ids"] for body in asked] == [[*PROMPT, 0, 1, 2, 3], PROMPT]
        assert [body["sampling_params"]["max_tokens"] for body in asked] == [6, 10]
        assert [(body["resumed"], body["first_index"]) for body in asked] == [(4, 0), (0, 2)]
        assert all("request_id" not in body for body in asked)


async def test_a_lone_server_that_interrupts_again_and_again_is_asked_until_it_is_done(
    redis_url: str, run_id: str
) -> None:
    async with mesh(redis_url, run_id, "a") as (host, (server,)):
        server.custom = engine(7, lambda _: 3)
        answer = (await host.http.post(GENERATE, json=call(10))).json()
        assert answer["choices"][0]["token_ids"] == list(range(10))
        assert answer["choices"][0]["policy_versions"] == [[7, 0]]
        events = await streamed(host, call(10))
        assert [token for event in events for token in event["choices"][0]["token_ids"]] == list(range(10))


async def test_one_that_never_samples_a_token_fails_in_the_end(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id, "a", failover_timeout_s=0.3) as (host, (server,)):
        server.custom = engine(1, lambda _: 0)
        for stream in (False, True):
            answer = await host.http.post(GENERATE, json=call(10, stream=stream))
            assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline")


@pytest.mark.parametrize("after", range(0, 9))
@pytest.mark.parametrize("how", ["abort", "death"])
async def test_a_stream_goes_on_where_it_broke_off(redis_url: str, run_id: str, after: int, how: str) -> None:
    async with mesh(redis_url, run_id) as (host, servers):
        if how == "abort":
            only_first_breaks(servers, lambda _: after)
        else:
            only_first_breaks(servers, lambda _: EVERY)
            for server in servers:
                server.die_at = after
                server.on_death = lambda: [setattr(each, "die_at", None) for each in servers]
        events = await streamed(host, call(8, stream_options={"include_usage": True}))
        *chunks, last, spent = events
        pieces = [event["choices"][0] for event in (*chunks, last)]
        assert [token for piece in pieces for token in piece["token_ids"]] == list(range(8))
        logprobs = [entry for piece in pieces for entry in piece["logprobs"]["content"]]
        assert [entry["token_id"] for entry in logprobs] == list(range(8))
        assert [piece["finish_reason"] for piece in pieces] == [None] * len(chunks) + ["length"]
        whole = [[1, 0]] if after == 8 else [[2, 0]] if after == 0 else [[1, 0], [2, after]]
        assert last["choices"][0]["policy_versions"] == whole
        assert last["choices"][0]["weight_versions"][-1]["end"] == 8
        assert spent["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
        assert len({event["request_id"] for event in events}) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("code", ["context_length_exceeded", "usage"])
async def test_a_rest_that_does_not_fit_the_model_is_no_rest(
    redis_url: str, run_id: str, stream: bool, code: str
) -> None:
    refusal = json.dumps({"error": {"code": code, "message": "as it is"}}).encode()
    async with mesh(redis_url, run_id) as (host, servers):

        def first(seen: Seen) -> Any:
            for server in servers:
                server.custom = lambda _: (400, [refusal])
            return engine(1, lambda _: 4)(seen)

        for server in servers:
            server.custom = first
        if code == "usage":
            answer = await host.http.post(GENERATE, json=call(10, stream=stream))
            assert "the rest of the answer was refused with 400 (as it is)" in answer.text
            return
        if stream:
            events = await streamed(host, call(10))
            pieces = [event["choices"][0] for event in events]
        else:
            pieces = (await host.http.post(GENERATE, json=call(10))).json()["choices"]
        assert [token for piece in pieces for token in piece["token_ids"]] == [0, 1, 2, 3]
        assert pieces[-1]["finish_reason"] == "length"
        assert pieces[-1]["policy_versions"] == [[1, 0]]


async def test_a_session_id_that_names_nothing_makes_no_difference_and_one_that_does_does(
    redis_url: str, run_id: str
) -> None:
    """A generation in a session is its server's to continue: the gateway passes on what it says."""
    redis = connect(redis_url)
    try:
        await redis.set(RunKeys(run_id).group_of("real"), "group")
        async with mesh(redis_url, run_id) as (host, servers):
            for session, reason in (("made-up", "length"), ("real", "abort")):
                only_first_breaks(servers, lambda _: 4)
                answer = await host.http.post(GENERATE, json=call(10), headers={"X-Session-ID": session})
                assert answer.json()["choices"][0]["finish_reason"] == reason
    finally:
        await redis.aclose()


async def test_calls_that_are_not_well_formed_are_the_servers_to_refuse(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id, "a") as (host, (server,)):
        server.custom = lambda _: (422, [b'{"error": {"code": "schema"}}'])
        huge = b'{"token_ids": [%s]}' % b",".join([b"1" * 18] * 32 + [b"1" * 40] * 32)
        for body in (b"", huge, b"[1]", b'{"stream": true}', b'{"stream": true, "token_ids": 1, "sampling_params": 2}'):
            answer = await host.http.post(GENERATE, content=body)
            assert (answer.status_code, server.seen[-1].body) == (422, body)


async def test_a_stream_of_several_samples_is_never_put_together_of_two(redis_url: str, run_id: str) -> None:
    async with mesh(redis_url, run_id) as (host, servers):
        for server in servers:
            server.custom = engine(1)
            server.die_at = 3
        body = call(8, n=2, stream=True, stream_options={"version_spans": True})
        answer = await host.http.post(GENERATE, json=body)
        *events, last, _ = answer.text.split("\n\n")
        assert len(events) == 3
        assert "broke" in json.loads(last.removeprefix("data: "))["error"]["message"]
        assert sum(len(server.seen) for server in servers) == 1

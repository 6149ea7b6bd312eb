"""`POST /inference/v1/generate` and `GET /v1/models` over a real socket: vLLM's names, shapes and manners."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from rollout_server.engines.base import NonFiniteLogitsError
from tests.support.rollout_host import Host, hosting, small_batch, until
from tests.support.scripted_engine import ScriptedEngine

GENERATE = "/inference/v1/generate"
PROMPT = [3, 4, 5]
"""Its sum is 12: sample i answers 5 + i, 6 + i, …"""


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(answer_length=3)


@pytest.fixture
async def host(engine: ScriptedEngine, redis_url: str, run_id: str, tiny_policy: Path) -> AsyncIterator[Host]:
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tiny_policy, settings=small_batch()) as host:
        yield host


def call(**changes: Any) -> dict[str, Any]:
    sampling = {"max_tokens": 8} | changes.pop("sampling_params", {})
    return {"token_ids": PROMPT, "sampling_params": sampling} | changes


async def events(host: Host, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of a streamed answer, which must end as it should."""
    async with host.http.stream("POST", GENERATE, json=body | {"stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line async for line in answer.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


async def test_an_answer_has_vllms_fields_and_our_versions(host: Host, engine: ScriptedEngine) -> None:
    engine.set_version(4)
    answer = await host.http.post(GENERATE, json=call(request_id="mine", return_token_ids=True))
    assert answer.status_code == 200
    body = answer.json()
    assert body.pop("created") > 1_700_000_000
    assert body == {
        "request_id": "mine",
        "model": "model",
        "output_mode": "tokens",
        "prompt_token_ids": PROMPT,
        "prompt_logprobs": None,
        "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7},
        "choices": [
            {
                "index": 0,
                "token_ids": [5, 6, 7, 1],
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "weight_versions": [{"version": "4", "start": 0, "end": 4}],
                "policy_versions": [[4, 0]],
            }
        ],
    }


async def test_what_was_left_out_is_made_up_or_not_answered(host: Host, engine: ScriptedEngine) -> None:
    body = {"token_ids": PROMPT, "sampling_params": {}}
    first, second = [(await host.http.post(GENERATE, json=body)).json() for _ in range(2)]
    assert first["request_id"] != second["request_id"]
    assert first["prompt_token_ids"] is None
    assert engine.requests[0].sampling.max_tokens == engine.max_model_len - len(PROMPT)


async def test_sampling_parameters_reach_the_engine_as_they_are(host: Host, engine: ScriptedEngine) -> None:
    wanted = {
        "max_tokens": 5,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "min_tokens": 2,
        "seed": 11,
        "ignore_eos": True,
    }
    extra = {"stop_token_ids": [8, 9], "n": 2, "skip_special_tokens": False, "detokenize": False}
    await host.http.post(
        GENERATE, json=call(sampling_params=wanted | extra, cache_salt="salt", model="any", priority=3, unknown=[1])
    )
    (request,) = engine.requests
    assert {name: getattr(request.sampling, name) for name in wanted} == wanted
    assert request.sampling.stop_token_ids == (8, 9)
    assert (request.n, request.cache_salt, request.top_logprobs) == (2, "salt", 0)


async def test_logprobs_are_written_as_clients_of_vllm_read_them(host: Host, engine: ScriptedEngine) -> None:
    answer = await host.http.post(GENERATE, json=call(sampling_params={"logprobs": 1}))
    (choice,) = answer.json()["choices"]
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    first = choice["logprobs"]["content"][0]
    own = {"token": "token_id:5", "token_id": 5, "logprob": -0.125, "rank": None}
    assert first == own | {"top_logprobs": [own]}
    assert engine.requests[-1].top_logprobs == 0  # one alternative is the sampled token itself: nothing to compute

    answer = await host.http.post(GENERATE, json=call(sampling_params={"logprobs": 3}))
    first = answer.json()["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["rank"]) == ("token_id:5", 1)
    assert [(each["token_id"], each["rank"]) for each in first["top_logprobs"]] == [(5, 1), (20, 2), (21, 3)]


async def test_logprobs_of_the_prompt_are_written_as_vllm_does(host: Host) -> None:
    answer = await host.http.post(GENERATE, json=call(sampling_params={"prompt_logprobs": 0, "max_tokens": 1}))
    body = answer.json()
    assert body["prompt_logprobs"] == [
        None,
        {"4": {"logprob": -1 / 16, "rank": 4, "decoded_token": None}},
        {"5": {"logprob": -2 / 16, "rank": 5, "decoded_token": None}},
    ]
    assert body["choices"][0]["token_ids"] == [5]


async def test_a_stream_adds_up_to_the_whole_answer(host: Host) -> None:
    body = call(sampling_params={"n": 2, "logprobs": 2}, return_token_ids=True, request_id="again")
    whole = (await host.http.post(GENERATE, json=body)).json()
    chunks = await events(host, body | {"stream_options": {"include_usage": True}})
    assert chunks[0]["prompt_token_ids"] == PROMPT
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    assert {chunk["request_id"] for chunk in chunks} == {"again"}
    *chunks, last = chunks
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert len(chunks) > 4
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        *early, final = parts
        assert [token for part in parts for token in part["token_ids"]] == choice["token_ids"]
        assert [entry for part in parts for entry in part["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert all(part["finish_reason"] is None and part["policy_versions"] is None for part in early)
        for name in ("finish_reason", "stop_reason", "weight_versions", "policy_versions"):
            assert final[name] == choice[name]


async def test_a_version_committed_in_mid_stream_shows_on_the_final_chunk(
    redis_url: str, run_id: str, tiny_policy: Path
) -> None:
    engine = ScriptedEngine(answer_length=20, step_s=0.005)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tiny_policy) as host:
        reading = asyncio.create_task(events(host, call(sampling_params={"max_tokens": 21})))
        await until(lambda: engine.status().tokens_generated > 3)
        engine.set_version(7)
        (final,) = (await reading)[-1]["choices"]
    (zero, start), (seven, offset) = final["policy_versions"]
    assert (zero, start, seven) == (0, 0, 7)
    assert final["weight_versions"] == [
        {"version": "0", "start": 0, "end": offset},
        {"version": "7", "start": offset, "end": 21},
    ]


async def test_version_spans_come_with_every_chunk_for_who_asks(redis_url: str, run_id: str, tiny_policy: Path) -> None:
    engine = ScriptedEngine(answer_length=20, step_s=0.005)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tiny_policy) as host:
        asked = call(sampling_params={"max_tokens": 21}, stream_options={"version_spans": True})
        reading = asyncio.create_task(events(host, asked))
        await until(lambda: engine.status().tokens_generated > 3)
        engine.set_version(7)
        parts = [part for chunk in await reading for part in chunk["choices"]]
        plain = await events(host, call())
    assert not any("version_spans" in part for chunk in plain for part in chunk["choices"])
    told = []
    for part in parts:
        for start, length, version, *_ in part["version_spans"]:
            assert start == 0 and length == len(part["token_ids"])
            told += [version] * length
    (_, (seven, offset)) = parts[-1]["policy_versions"]
    assert told == [0] * offset + [seven] * (21 - offset)


async def test_a_call_may_go_on_from_tokens_that_were_sampled_before(host: Host, engine: ScriptedEngine) -> None:
    await host.http.post(GENERATE, json=call(resumed=2, first_index=3))
    (request,) = engine.requests
    assert (request.resumed, request.first_index) == (2, 3)


async def test_usage_comes_with_every_chunk_for_who_asks(host: Host) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await events(host, call(stream_options=options))
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3, 4, 4]
    assert all(chunk["usage"] is None for chunk in await events(host, call()))


async def test_a_prompt_without_room_says_so_in_the_words_that_clients_look_for(host: Host) -> None:
    for stream in (False, True):
        answer = await host.http.post(GENERATE, json=call(token_ids=[5] * 256, stream=stream))
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length" in error["message"]


UNSUPPORTED: list[dict[str, Any]] = [
    {"sampling_params": {"stop": ["\n"]}},
    {"sampling_params": {"structured_outputs": {"json": {}}}},
    {"sampling_params": {"logit_bias": {"5": 1.0}}},
    {"sampling_params": {"allowed_token_ids": [1]}},
    {"sampling_params": {"bad_words": ["no"]}},
    {"sampling_params": {"prompt_logprobs": 1}},
    {"sampling_params": {"prompt_logprobs": -1}},
    {"sampling_params": {"prompt_logprobs": 0}, "stream": True},
    {"sampling_params": {"prompt_logprobs": 0, "n": 2}},
    {"sampling_params": {"thinking_token_budget": 5}},
    {"features": {"mm_hashes": {}}},
    {"content_parts": []},
    {"output_mode": "text"},
]


async def test_what_would_change_the_sampling_and_is_not_supported_is_never_ignored(
    host: Host, engine: ScriptedEngine
) -> None:
    for changes in UNSUPPORTED:
        answer = await host.http.post(GENERATE, json=call(**copy.deepcopy(changes)))
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter"), changes
    assert not engine.requests


async def test_neutral_values_of_unsupported_parameters_are_fine(host: Host) -> None:
    neutral = {"stop": [], "logit_bias": {}, "bad_words": None, "structured_outputs": None, "watermarking": False}
    assert (await host.http.post(GENERATE, json=call(sampling_params=neutral))).status_code == 200


NONSENSE = [
    b"{",
    b'{"token_ids": [], "sampling_params": {}}',
    b'{"token_ids": [-1], "sampling_params": {}}',
    b'{"token_ids": [2147483648], "sampling_params": {}}',
    b'{"token_ids": [1.5], "sampling_params": {}}',
    b'{"token_ids": [1]}',
    b'{"token_ids": [1], "sampling_params": {"temperature": NaN}}',
    b'{"token_ids": [1], "sampling_params": {"top_p": Infinity}}',
    b'{"token_ids": [1], "sampling_params": {"n": 0}}',
    b'{"token_ids": [1], "sampling_params": {"max_tokens": -1}}',
    b'{"token_ids": [1], "sampling_params": {"seed": 99999999999999999999}}',
    b'{"token_ids": [1], "sampling_params": {"logprobs": 21}}',
    b'{"token_ids": [1], "sampling_params": {}, "cache_salt": ""}',
    b'{"token_ids": [1], "sampling_params": {}, "request_id": "\\ud800"}',
]


async def test_bodies_that_are_nonsense_are_refused_before_the_engine(host: Host, engine: ScriptedEngine) -> None:
    for body in NONSENSE:
        answer = await host.http.post(GENERATE, content=body, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "schema"), body
    assert not engine.requests


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("paused", [False, True], ids=["drawing", "paused"])
async def test_hanging_up_frees_the_engine(
    redis_url: str, run_id: str, tiny_policy: Path, stream: bool, paused: bool
) -> None:
    engine = ScriptedEngine(answer_length=10_000, step_s=0.001, max_model_len=20_000)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tiny_policy) as host:
        body = call(sampling_params={"max_tokens": 10_001}, stream=stream)
        reading = asyncio.create_task(host.http.post(GENERATE, json=body))
        await until(lambda: engine.status().tokens_generated > 3)
        if paused:
            await engine.pause("keep")
        reading.cancel()
        await asyncio.wait({reading})
        await until(lambda: engine.status().running == 0)
        assert engine.aborted_early == 1
        await engine.resume()
        assert (await host.http.get("/v1/models")).status_code == 200


async def test_hanging_up_before_the_first_token_frees_the_engine(host: Host, engine: ScriptedEngine) -> None:
    await engine.pause("keep")
    for stream in (False, True):
        reading = asyncio.create_task(host.http.post(GENERATE, json=call(stream=stream)))
        await until(lambda: engine.status().running == 1)
        reading.cancel()
        await asyncio.wait({reading})
        await until(lambda: engine.status().running == 0)
    assert engine.aborted_early == 2


async def test_an_error_before_the_stream_has_its_status_and_one_inside_it_is_an_event(
    redis_url: str, run_id: str, tiny_policy: Path
) -> None:
    engine = ScriptedEngine(answer_length=1000, step_s=0.002, max_model_len=2000)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tiny_policy) as host:
        reading = asyncio.create_task(events(host, call(sampling_params={"max_tokens": 1001})))
        await until(lambda: engine.status().tokens_generated > 3)
        engine.crash = NonFiniteLogitsError(3)
        last = (await reading)[-1]
        assert last["error"]["code"] == "non_finite_logits"
        for stream in (False, True):
            answer = await host.http.post(GENERATE, json=call(stream=stream))
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "non_finite_logits")


async def test_the_model_is_listed_with_its_length(host: Host, tiny_policy: Path) -> None:
    body = (await host.http.get("/v1/models")).json()
    (card,) = body.pop("data")
    assert body == {"object": "list"}
    assert card.pop("created") > 1_700_000_000
    assert card == {
        "id": "model",
        "object": "model",
        "owned_by": "rollmesh",
        "root": str(tiny_policy),
        "max_model_len": 256,
    }


async def test_the_openapi_document_says_what_an_answer_holds(host: Host) -> None:
    document = (await host.http.get("/openapi.json")).json()
    operation = document["paths"][GENERATE]["post"]
    content = operation["responses"]["200"]["content"]
    assert set(content) == {"application/json", "text/event-stream"}
    schema = content["application/json"]["schema"]
    answer = (await host.http.post(GENERATE, json=call(sampling_params={"logprobs": 2}))).json()
    assert set(answer) == set(schema["properties"])
    choice = schema["properties"]["choices"]["items"]
    assert set(answer["choices"][0]) == set(choice["properties"])
    assert "$ref" not in json.dumps(schema)
    assert {"400", "409", "422", "503"} <= set(operation["responses"])

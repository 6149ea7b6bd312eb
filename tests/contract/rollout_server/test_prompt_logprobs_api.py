"""`prompt_logprobs` over HTTP: a server as a teacher, in vLLM's shape, outside sessions, for those who may."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rollout_server.completions.scoring import TRIES
from rollout_server.engines.factory import make_engine
from services.security.permissions import Keys
from tests.contract.rollout_server import engine_harness as harness
from tests.support.gateway_host import gateway
from tests.support.rollout_host import Host, hosting, small_batch, until
from tests.support.scripted_engine import ScriptedEngine

COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"
PROMPT = [3, 4, 5]


def call(prompt: Any = PROMPT, **changes: Any) -> dict[str, Any]:
    """As a trainer's client sends it."""
    return {"model": "teacher", "prompt": prompt, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0} | changes


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(answer_length=3)


@pytest.fixture
async def host(engine: ScriptedEngine, redis_url: str, run_id: str, tiny_policy: Path) -> AsyncIterator[Host]:
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tiny_policy, settings=small_batch()) as host:
        yield host


async def test_an_answer_has_vllms_fields_and_our_version(host: Host, engine: ScriptedEngine) -> None:
    engine.set_version(4)
    answer = await host.http.post(COMPLETIONS, json=call(return_token_ids=True, logprobs=0))
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    body = answer.json()
    assert body.pop("id").startswith("cmpl-") and body.pop("created") > 1_700_000_000
    assert body.pop("usage") == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    (choice,) = body.pop("choices")
    assert body == {"object": "text_completion", "model": "model"}
    first, *told = choice.pop("prompt_logprobs")
    assert first is None
    assert [list(entry) for entry in told] == [["4"], ["5"]]
    assert [entry[token] for entry, token in zip(told, ("4", "5"), strict=True)] == [
        {"logprob": -1 / 16, "rank": 4, "decoded_token": told[0]["4"]["decoded_token"]},
        {"logprob": -2 / 16, "rank": 5, "decoded_token": told[1]["5"]["decoded_token"]},
    ]
    assert all(isinstance(entry["decoded_token"], str) for each in told for entry in each.values())
    assert choice.pop("logprobs")["token_logprobs"] == [-0.125]
    assert isinstance(choice.pop("text"), str)
    assert choice == {
        "index": 0,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": [5],
        "prompt_token_ids": PROMPT,
        "policy_versions": [[4, 0]],
    }
    assert (engine.requests[0].sampling.max_tokens, engine.requests[0].sampling.temperature) == (1, 0.0)
    bare = (await host.http.post(COMPLETIONS, json=call())).json()["choices"][0]
    assert not {"token_ids", "prompt_token_ids"} & set(bare)


async def test_of_several_prompts_each_has_its_own(host: Host) -> None:
    prompts = [[3, 4, 5], [7], [9, 8]]
    choices = (await host.http.post(COMPLETIONS, json=call(prompts))).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    told = [[entry and list(entry) for entry in choice["prompt_logprobs"]] for choice in choices]
    assert told == [[None, ["4"], ["5"]], [None], [None, ["8"]]]


async def test_a_text_is_scored_token_by_token(host: Host, engine: ScriptedEngine) -> None:
    (choice,) = (await host.http.post(COMPLETIONS, json=call("12+3="))).json()["choices"]
    tokens = engine.requests[0].prompt_token_ids
    assert [entry and list(entry) for entry in choice["prompt_logprobs"]] == [None, *([str(t)] for t in tokens[1:])]
    said = "".join(entry["decoded_token"] for each in choice["prompt_logprobs"][1:] for entry in each.values())
    assert said == "2+3="


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"prompt_logprobs": 5}, "prompt_logprobs is 5"),
    ({"prompt_logprobs": -1}, "prompt_logprobs is -1"),
    ({"stream": True}, "prompt_logprobs in a stream"),
    ({"n": 2}, "prompt_logprobs with n = 2"),
    ({"echo": True}, "echo"),
]


@pytest.mark.parametrize(("changes", "what"), REFUSED, ids=str)
async def test_what_is_not_told_is_refused_by_name(
    host: Host, engine: ScriptedEngine, changes: dict[str, Any], what: str
) -> None:
    answer = await host.http.post(COMPLETIONS, json=call(**changes))
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter")
    assert what in answer.json()["error"]["message"]
    assert engine.requests == []


@pytest.mark.parametrize("wrong", [True, False, "0", 0.5], ids=str)
async def test_only_a_number_is_one(host: Host, wrong: Any) -> None:
    assert (await host.http.post(COMPLETIONS, json=call(prompt_logprobs=wrong))).status_code == 422


async def test_prompts_are_bounded_as_in_any_other_call(host: Host, engine: ScriptedEngine) -> None:
    many = await host.http.post(COMPLETIONS, json=call([[5]] * 257))
    assert (many.status_code, many.json()["error"]["code"]) == (422, "usage")
    large = json.dumps(call([5] * 200_000)).encode()
    long = await host.http.post(COMPLETIONS, content=large, headers={"Content-Type": "application/json"})
    assert (long.status_code, long.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert engine.requests == []


async def test_in_a_session_they_are_refused_and_nothing_is_captured(host: Host, engine: ScriptedEngine) -> None:
    session = (await host.http.post("/sessions", json={})).json()
    own = {"Authorization": f"Bearer {session['api_key']}"}
    named = {"X-Session-ID": session["session_id"]}
    tokens = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
    for path, body, headers in (
        (COMPLETIONS, call(), own),
        (COMPLETIONS, call(), named),
        (f"/sessions/{session['session_id']}{COMPLETIONS}", call(), {}),
        (GENERATE, tokens, own),
        (f"/sessions/{session['session_id']}{GENERATE}", tokens, {}),
    ):
        answer = await host.http.post(path, json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_parameter"), path
        assert "in a session" in answer.json()["error"]["message"]
    assert engine.requests == []
    status = (await host.http.get(f"/sessions/{session['session_id']}")).json()
    assert (status["calls"], status["segments"]) == (0, 0)


async def test_a_call_outside_sessions_leaves_no_trace_in_the_run(host: Host) -> None:
    before = await host.report()
    assert (await host.http.post(COMPLETIONS, json=call())).status_code == 200
    assert (await host.http.post(COMPLETIONS, json=call(), headers={"X-Session-ID": "mine"})).status_code == 200
    after = await host.report()
    assert {name for name in after if after[name] != before[name]} <= {
        "tokens_generated",
        "sampled_tokens",
        "http_cpu_s",
    }
    assert (await host.http.get("/trajectories")).json()["trajectories"] == []
    assert await host.published() == []


async def test_only_keys_that_generate_outside_sessions_open_it(
    engine: ScriptedEngine, redis_url: str, run_id: str, tiny_policy: Path
) -> None:
    keys = Keys(agent="agents", admin="admins", metrics="figures")
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tiny_policy, keys=keys) as host:
        bearer = {"Authorization": "Bearer agents"}
        session = (await host.http.post("/sessions", json={}, headers=bearer)).json()
        statuses = {}
        for shown in ("agents", "admins", "figures", "wrong", session["api_key"], ""):
            headers = {"Authorization": f"Bearer {shown}"} if shown else {}
            for path, body in (
                (COMPLETIONS, call()),
                (GENERATE, {"token_ids": PROMPT, "sampling_params": {"prompt_logprobs": 0}}),
                (COMPLETIONS, {"prompt": PROMPT}),
            ):
                answer = await host.http.post(path, json=body, headers=headers)
                statuses.setdefault("session" if shown == session["api_key"] else shown, []).append(answer.status_code)
    # Scored on either route; the last is a call that names no session, as before.
    assert statuses == {
        "agents": [200, 200, 401],
        "admins": [200, 200, 403],
        "figures": [403, 403, 403],
        "wrong": [401, 401, 401],
        "session": [400, 400, 200],
        "": [401, 401, 401],
    }


async def test_a_gateway_passes_them_on(host: Host, redis_url: str, run_id: str) -> None:
    tokens = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
    async with gateway(redis_url, run_id) as front:
        await front.until_known(s0="serving")
        by_text = (await front.http.post(COMPLETIONS, json=call())).json()["choices"][0]["prompt_logprobs"]
        by_token = (await front.http.post(GENERATE, json=tokens)).json()["prompt_logprobs"]
    for told in (by_text, by_token):
        assert [entry and {token: each["logprob"] for token, each in entry.items()} for entry in told] == [
            None,
            {"4": -1 / 16},
            {"5": -2 / 16},
        ]


async def test_many_at_once_wait_for_their_turn_and_all_are_answered(host: Host) -> None:
    bodies = [call([2, 2 + number % 50, 5]) for number in range(60)]
    answers = await asyncio.gather(*(host.http.post(COMPLETIONS, json=body) for body in bodies))
    for body, answer in zip(bodies, answers, strict=True):
        told = answer.json()["choices"][0]["prompt_logprobs"]
        assert [entry and list(entry) for entry in told] == [None, *([str(token)] for token in body["prompt"][1:])]


async def test_an_abort_is_asked_for_again_and_nobody_sees_it(host: Host, engine: ScriptedEngine) -> None:
    for path, body in (
        (COMPLETIONS, call()),
        (GENERATE, {"token_ids": PROMPT, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}),
    ):
        await engine.pause("keep")
        asking = asyncio.create_task(host.http.post(path, json=body))
        await until(lambda: engine.status().running == 1)
        # It ends at its next step, and is asked for once the engine takes requests.
        await host.http.post("/abort_requests", json={})
        await engine.resume()
        answer = await asking
        assert answer.status_code == 200
        assert '"abort"' not in answer.text
        assert engine.requests[-1].request_id.endswith("~1")


async def test_what_is_aborted_time_and_again_is_given_up(redis_url: str, run_id: str, tiny_policy: Path) -> None:
    engine = ScriptedEngine(step_s=0.01)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=tiny_policy) as host:
        asking = asyncio.create_task(host.http.post(COMPLETIONS, json=call(max_tokens=4)))
        while not asking.done():
            await engine.abort()
            await asyncio.sleep(0)
        answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
    assert f"interrupted {TRIES} times" in answer.json()["error"]["message"]
    assert len(engine.requests) == TRIES


@pytest.mark.parametrize("path", [COMPLETIONS, GENERATE])
async def test_hanging_up_frees_the_engine(host: Host, engine: ScriptedEngine, path: str) -> None:
    body = call() if path == COMPLETIONS else {"token_ids": PROMPT, "sampling_params": {"prompt_logprobs": 0}}
    await engine.pause("keep")
    asking = asyncio.create_task(host.http.post(path, json=body))
    await until(lambda: engine.status().running == 1)
    asking.cancel()
    await asyncio.wait({asking})
    await until(lambda: engine.status().running == 0)
    assert engine.aborted_early == 1


async def test_a_real_model_is_a_teacher(redis_url: str, run_id: str, tmp_path: Path) -> None:
    """Both routes; the answers are those of transformers' forward pass."""
    folder = harness.save_sharp_policy(tmp_path / "model", seed=11)
    engine = make_engine("torch", folder, run_id, small_batch())
    prompts = harness.prompts(8, seed=91, shortest=2, longest=250)
    async with hosting(engine, redis_url=redis_url, run_id=run_id, model=folder) as host:
        by_text = (await host.http.post(COMPLETIONS, json=call(prompts))).json()["choices"]
        told = [choice["prompt_logprobs"] for choice in by_text]
        for prompt in prompts:
            body = {"token_ids": prompt, "sampling_params": {"max_tokens": 1, "prompt_logprobs": 0}}
            told.append((await host.http.post(GENERATE, json=body)).json()["prompt_logprobs"])
        one = (await host.http.post(COMPLETIONS, json=call(prompts[0]))).json()["choices"][0]
    for prompt, entries in zip([*prompts, *prompts], told, strict=True):
        found = [entry[str(token)]["logprob"] for token, entry in zip(prompt[1:], entries[1:], strict=True)]
        expected = harness.teacher_forced(folder, prompt[:1], prompt[1:])
        assert entries[0] is None
        assert float((torch.tensor(found) - expected).abs().max()) <= 1e-4
    assert [choice["policy_versions"] for choice in by_text] == [[[0, 0]]] * len(prompts)
    assert one["text"] == by_text[0]["text"]

"""The pure parts of the engine behind a URL: events out of pieces, steps of deltas, what is known of the weights."""

from __future__ import annotations

import random
import subprocess
import sys
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from rollout_server.engines.base import GenerationRequest, PromptLogprobs
from rollout_server.engines.http.client import EngineLostError, EventReader, engine_error, stream_error
from rollout_server.engines.http.health import EngineHealth
from rollout_server.engines.http.wire import (
    EngineChoice,
    EngineChunk,
    EngineLogprob,
    EngineLogprobs,
    EngineSampled,
    Flow,
    OtherWeightsError,
    generate_body,
    read_answer,
)
from services.wire.errors import ContextLengthError, NotFoundError, RollmeshError, WireError
from services.wire.sampling import SamplingParams
from services.wire.trajectory import VersionSpan
from weight_bus.errors import StageError

STREAM = b'data: {"a": 1}\n\n: still here\n\ndata: {"b":\r\ndata: 2}\r\n\r\ndata: [DONE]\n\n'


@pytest.mark.parametrize("seed", range(20))
def test_events_are_the_same_however_the_bytes_are_cut(seed: int) -> None:
    chance, reader, found, position = random.Random(seed), EventReader(), [], 0
    while position < len(STREAM):
        size = chance.randint(1, 9)
        found += reader.feed(STREAM[position : position + size])
        position += size
    assert [msgspec.json.decode(event) for event in found] == [{"a": 1}, {"b": 2}]
    assert reader.ended


def asked(**changes: Any) -> GenerationRequest:
    return replace(GenerationRequest("r", [5, 6], SamplingParams(max_tokens=20), stream=True), **changes)


def chunk(
    *tokens: int, index: int = 0, reason: str | None = None, spans: list[VersionSpan] | None = None
) -> EngineChunk:
    content = [EngineSampled(logprob=-0.5, token=f"token_id:{token}") for token in tokens]
    choice = EngineChoice(index, list(tokens), EngineLogprobs(content), finish_reason=reason, version_spans=spans)
    return EngineChunk([choice])


def test_deltas_come_in_steps_and_an_abort_hands_out_what_was_held_back() -> None:
    flow = Flow(asked(delta_every=3, n=2), 4, {4})
    assert flow.take(chunk(7, 8)) == []
    (delta,) = flow.take(chunk(9, 10))
    assert (delta.token_ids, [(span.start, span.length, span.version) for span in delta.versions]) == (
        [7, 8, 9, 10],
        [(0, 4, 4)],
    )
    assert flow.take(chunk(11)) == []
    (other,) = flow.take(chunk(1, index=1, reason="stop"))
    assert (other.index, other.finish_reason, flow.ended, flow.begun) == (1, "stop", False, 1)
    (rest,) = flow.abort()
    assert (rest.index, rest.token_ids, rest.finish_reason, flow.ended) == (0, [11], "abort", True)


def test_versions_must_be_among_those_committed_since_the_request_was_sent() -> None:
    flow = Flow(asked(), 4, known := {3, 4})
    for strange in (3, 5):
        with pytest.raises(OtherWeightsError, match=f"version {strange} where 4"):
            flow.take(chunk(7, spans=[VersionSpan(0, 1, strange)]))
    known.add(5)
    (delta,) = flow.take(chunk(7, 8, spans=[VersionSpan(0, 1, 4), VersionSpan(1, 1, 5, kv="recompute")]))
    assert [(span.version, span.kv) for span in delta.versions] == [(4, "keep"), (5, "recompute")]
    for gapped in ([VersionSpan(1, 1, 4)], [VersionSpan(0, 1, 4), VersionSpan(1, 2, 4)], []):
        with pytest.raises(WireError):
            flow.take(chunk(7, 8, spans=gapped))


def test_alternatives_are_the_likeliest_whatever_was_sampled() -> None:
    entry = EngineSampled(
        -3.0, 9, top_logprobs=[EngineLogprob(-3.0, 9), EngineLogprob(-0.1, 4), EngineLogprob(-9999.0, 2)]
    )
    (delta,) = Flow(asked(top_logprobs=2), 0, {0}).take(EngineChunk([EngineChoice(0, [9], EngineLogprobs([entry]))]))
    assert delta.top_logprobs == [[(4, -0.1), (9, -3.0)]]


def test_an_engine_that_cannot_resume_gets_a_lower_min_tokens() -> None:
    sampling = SamplingParams(max_tokens=20, min_tokens=8, stop_token_ids=(3, 999))
    request = asked(sampling=sampling, resumed=1)
    bodies = [
        msgspec.json.decode(
            generate_body(request, name="r", limit=20, ours=ours, vocabulary=64, eos_token_ids=(1,)), type=dict
        )
        for ours in (True, False)
    ]
    assert [body["sampling_params"]["min_tokens"] for body in bodies] == [8, 7]
    assert [body.get("resumed") for body in bodies] == [1, None]
    assert bodies[0]["sampling_params"]["stop_token_ids"] == [1, 3]


def answer(*, told: Any, version: str, tokens: tuple[int, ...] = (7,)) -> bytes:
    """A whole answer of one token, as vLLM and rollout servers write it."""
    content = [{"token": f"token_id:{token}", "token_id": token, "logprob": -0.5} for token in tokens]
    choice = {
        "index": 0,
        "token_ids": list(tokens),
        "logprobs": {"content": content},
        "finish_reason": "length",
        "weight_versions": [{"version": version, "start": 0, "end": len(tokens)}],
    }
    return msgspec.json.encode({"request_id": "r", "choices": [choice], "prompt_logprobs": told})


SCORED = [None, {"6": {"logprob": -0.25, "rank": 3, "decoded_token": None}}]


def test_logprobs_of_the_prompt_are_asked_for_and_read_in_a_whole_answer() -> None:
    request = asked(prompt_logprobs=True, stream=False)
    body = generate_body(request, name="r", limit=1, ours=True, vocabulary=64, eos_token_ids=())
    call = msgspec.json.decode(body, type=dict)
    assert (call["stream"], call["sampling_params"]["prompt_logprobs"], call.get("stream_options")) == (False, 0, None)
    (delta,) = Flow(request, 4, {4}).take(read_answer(answer(told=SCORED, version="4"), ours=False))
    assert delta.prompt_logprobs == PromptLogprobs([-0.25], [3])
    assert (delta.token_ids, [span.version for span in delta.versions]) == ([7], [4])
    # A rollout server goes on through a commit: the version that it says is the one that read the prompt.
    (delta,) = Flow(request, 4, {4, 5}).take(read_answer(answer(told=SCORED, version="5"), ours=True))
    assert [span.version for span in delta.versions] == [5]
    for ours in (True, False):
        with pytest.raises(OtherWeightsError, match="version 6 where 4"):
            Flow(request, 4, {4, 5}).take(read_answer(answer(told=SCORED, version="6"), ours=ours))


@pytest.mark.parametrize(
    "told",
    [
        None,
        [None],
        [None, None],
        [None, {}],
        [None, {"5": {"logprob": -0.25}}],
        [None, {"6": {"logprob": 3.5}}],
        [None, {"6": {"logprob": -0.25}}, {"7": {"logprob": -0.25}}],
    ],
    ids=str,
)
def test_logprobs_of_another_prompt_or_none_are_an_error(told: Any) -> None:
    with pytest.raises(WireError, match="request r"):
        Flow(asked(prompt_logprobs=True), 4, {4}).take(read_answer(answer(told=told, version="4"), ours=False))


def test_weights_are_known_from_the_first_look_or_a_commit_and_from_nothing_else() -> None:
    health = EngineHealth("http://engine")
    with pytest.raises(EngineLostError):
        health.check()
    health.find("default")
    health.check()
    health.committing(4)
    assert health.serves("0") and health.serves("4")
    health.committed(4)
    assert health.version == 4 and not health.serves("0")
    health.lose("it ended")
    health.find("4")
    health.check()
    health.lose("it ended")
    health.find("default")
    # What it says is told to the weight bus, which then brings it up to date; until then it generates nothing.
    assert health.version == 0
    with pytest.raises(OtherWeightsError, match="version default where 4 was committed"):
        health.check()
    health.committing(5)
    health.committed(5)
    health.check()
    health.find("step-12")
    with pytest.raises(OtherWeightsError, match="which is no version"):
        health.check()


@pytest.mark.parametrize(
    ("status", "content", "kind"),
    [
        (409, b'{"error": {"message": "bad hash", "type": "conflict_error", "code": "stage_failed"}}', StageError),
        (404, b'{"detail": "Not Found"}', NotFoundError),
        (400, b'{"error": {"message": "maximum context length is 9", "code": 400}}', ContextLengthError),
        (502, b"<html>", RollmeshError),
    ],
)
def test_error_answers_of_any_server_are_typed(status: int, content: bytes, kind: type[RollmeshError]) -> None:
    error = engine_error("http://engine/x", status, None, content)
    assert isinstance(error, kind)
    assert "http://engine/x" in str(error)


def test_an_error_inside_a_stream_keeps_its_meaning() -> None:
    vllm = stream_error("call", b'{"message": "maximum context length is 9", "type": "BadRequest", "code": 400}')
    ours = stream_error("call", b'{"message": "gone", "type": "not_found_error", "code": "not_found"}')
    assert isinstance(vllm, ContextLengthError)
    assert isinstance(ours, NotFoundError)


@pytest.mark.parametrize(
    "options",
    [
        ["--engine", "http"],
        ["--engine", "http", "--url", "127.0.0.1:8000"],
        ["--engine", "torch", "--url", "http://127.0.0.1:8000"],
        ["--engine", "torch", "--engine-key-file", "key"],
        ["--engine", "https"],
    ],
    ids=" ".join,
)
def test_an_engine_and_options_that_are_not_its_own_are_misuse(options: list[str]) -> None:
    command = [sys.executable, "-m", "services", "rollout-server", "--run-id", "r", "--port", "8199", "--model", "m"]
    command += ["--redis-url", "redis://127.0.0.1:1/0", *options]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert answer.returncode == 2
    assert "--engine http" in answer.stderr or "known: torch, vllm, http" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_the_engine_is_imported_without_torch_or_vllm() -> None:
    program = (
        "import sys, rollout_server.engines.http.engine; sys.exit('torch' in sys.modules or 'vllm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60, check=False).returncode == 0

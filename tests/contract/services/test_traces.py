"""What a rollout server makes of contexts that callers send, and of callers that send none; and a dead collector."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from clients.rollout.client import RolloutClient
from services.config.traces import TraceSettings
from services.observability.otel import CLOSE_WITHIN_S, QUEUED_SPANS
from services.observability.setup import open_tracing
from services.observability.tracing import ServiceKind, Tracing
from services.wire.rollout_api import FinishGroup, OpenGroup, SamplingBody, SessionReward, TakeTurns, Turn
from tests.support.rollout_host import Host, hosting, small_batch
from tests.support.scripted_engine import ScriptedEngine
from tests.support.trace_receiver import TraceReceiver, receiving_traces

CALLER = "11112222333344445555666677778888"
RECORDED, NOT_RECORDED = f"00-{CALLER}-aaaabbbbccccdddd-01", f"00-{CALLER}-aaaabbbbccccdddd-00"


@pytest.fixture
def receiver() -> Iterator[TraceReceiver]:
    with receiving_traces() as receiver:
        yield receiver


@asynccontextmanager
async def traced_host(
    receiver: TraceReceiver, redis_url: str, run_id: str, model: Path, ratio: float = 1.0
) -> AsyncIterator[Host]:
    """A server with traces; when the block ends, the receiver has them all."""
    settings = TraceSettings(traces="otlp", traces_endpoint=receiver.endpoint, traces_ratio=ratio)
    engine = ScriptedEngine(answer_length=3, max_model_len=2048)
    with open_tracing(settings, "rollout-server", run_id, "s0") as tracing:
        async with hosting(
            engine, redis_url=redis_url, run_id=run_id, model=model, settings=small_batch(), tracing=tracing
        ) as host:
            yield host


async def play(host: Host, **headers: str) -> None:
    """A session as an agent plays it, with headers at the opening alone."""
    opened = (await host.http.post("/sessions", json={}, headers=headers)).json()
    said = await host.http.post(
        f"/sessions/{opened['session_id']}/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "What is 2 + 3?"}]},
        headers={"authorization": f"Bearer {opened['api_key']}"},
    )
    assert said.status_code == 200, said.text
    finished = await host.http.post(f"/sessions/{opened['session_id']}/finish", json={"reward": 1.0})
    assert finished.status_code == 200, finished.text


async def test_an_agent_that_knows_nothing_of_traces_is_in_one(
    receiver: TraceReceiver, redis_url: str, run_id: str, chat_policy: Path
) -> None:
    async with traced_host(receiver, redis_url, run_id, chat_policy) as host:
        await play(host)
        (trajectory,) = await host.published()
    (opened,) = receiver.spans("POST /sessions")
    assert opened.parent == ""
    assert trajectory.trace == f"00-{opened.trace}-{opened.span}-{trajectory.trace[-2:]}"
    (sampled,) = receiver.spans("rollout.generate")
    assert (sampled.trace, sampled.parent) == (opened.trace, opened.span)
    assert sampled.facts["rollmesh.session"] == trajectory.trajectory_id
    assert sampled.facts["rollmesh.tokens"] == trajectory.sampled_tokens() > 0
    assert sampled.facts["rollmesh.version"] == sampled.facts["rollmesh.oldest_version"] == 0
    assert len(receiver.spans()) == 2


async def test_a_callers_context_is_gone_on_with(
    receiver: TraceReceiver, redis_url: str, run_id: str, chat_policy: Path
) -> None:
    async with traced_host(receiver, redis_url, run_id, chat_policy, ratio=0.0) as host:
        await play(host, traceparent=RECORDED)
        (trajectory,) = await host.published()
    (opened,) = receiver.spans("POST /sessions")
    assert (opened.trace, opened.parent) == (CALLER, "aaaabbbbccccdddd")
    assert opened.facts["http.response.status_code"] == 201
    assert trajectory.trace.split("-")[1:3] == [CALLER, opened.span]


@pytest.mark.parametrize("context", [NOT_RECORDED, "nonsense", f"00-{'0' * 32}-{'0' * 16}-01"])
async def test_what_its_caller_does_not_record_is_recorded_nowhere(
    context: str, receiver: TraceReceiver, redis_url: str, run_id: str, chat_policy: Path
) -> None:
    async with traced_host(receiver, redis_url, run_id, chat_policy) as host:
        await play(host, traceparent=context)
        (trajectory,) = await host.published()
    assert trajectory.trace == ""
    assert receiver.spans() == []


async def test_calls_of_a_client_belong_to_its_current_span(
    receiver: TraceReceiver, redis_url: str, run_id: str, chat_policy: Path
) -> None:
    settings = TraceSettings(traces="otlp", traces_endpoint=receiver.endpoint)
    with open_tracing(settings, "environment", run_id, "environment") as tracing:
        async with (
            traced_host(receiver, redis_url, run_id, chat_policy) as host,
            RolloutClient(host.url, tracing=tracing) as client,
        ):
            with tracing.begin("my.episode"):
                sampling = SamplingBody(max_tokens=3)
                group = await client.open_group(OpenGroup(task="demo", group_size=2, sampling=sampling))
                turns = [Turn(session_id=name, text="12=") for name in group.session_ids]
                await client.take_turns(group.group_id, TakeTurns(turns=turns))
            # Outside of any span: of no trace, and traced nowhere.
            rewards = [SessionReward(session_id=name, reward=1.0) for name in group.session_ids]
            await client.finish_group(group.group_id, FinishGroup(rewards=rewards))
    (root,) = receiver.spans("my.episode")
    calls = [span.name for span in receiver.trace(root.trace) if span.parent == root.span]
    assert sorted(calls) == ["POST /groups", "POST /groups/{group_id}/turns"]
    (sampled,) = receiver.spans("rollout.generate")
    assert sampled.facts["rollmesh.samples"] == 2
    assert {span.trace for span in receiver.spans()} == {root.trace}


@pytest.mark.parametrize("kind", ["environment", "gateway", "rollout-server", "weight-bus", "trainer"])
def test_only_the_share_of_the_groups_that_was_asked_for_is_traced(receiver: TraceReceiver, kind: ServiceKind) -> None:
    """A trace begins where a group does, so the ratio is the groups'; a trainer's own are its steps, always recorded."""
    for ratio, traces in ((0.0, 0), (1.0, 50)):
        settings = TraceSettings(traces="otlp", traces_endpoint=receiver.endpoint, traces_ratio=ratio)
        with open_tracing(settings, kind, f"r-{ratio}", "i") as tracing:
            spans_into(tracing, 50)
        spans = [span for span in receiver.spans("work") if span.run == f"r-{ratio}"]
        assert len(spans) == (50 if kind == "trainer" else traces)


def spans_into(tracing: Tracing, count: int) -> None:
    for _ in range(count):
        with tracing.begin("work") as span:
            span.note(number=1)


@pytest.mark.parametrize("listening", [False, True], ids=["nobody listens", "it never answers"])
def test_a_dead_collector_costs_neither_memory_nor_the_end_of_the_process(listening: bool) -> None:
    with socket.socket() as dead:
        dead.bind(("127.0.0.1", 0))
        if listening:
            dead.listen()
        endpoint = f"http://127.0.0.1:{dead.getsockname()[1]}/v1/traces"
        tracing = open_tracing(TraceSettings(traces="otlp", traces_endpoint=endpoint), "gateway", "r", "g")
        with tracing:
            began = time.monotonic()
            spans_into(tracing, QUEUED_SPANS + 1000)
            recording_s = time.monotonic() - began
            ending = time.monotonic()
        assert time.monotonic() - ending < CLOSE_WITHIN_S + 1.0
        # Whoever records never waits for the collector, whose first answer is waited for 5 s.
        assert recording_s < 4.0

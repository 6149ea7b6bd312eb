"""Prefill computes what a plain forward computes, and shared prefixes once."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from rollout_server.engines.base import GenerationDelta, GenerationRequest
from rollout_server.engines.torch.forward import PolicyForward
from rollout_server.engines.torch.kv_cache import KvCache
from rollout_server.engines.torch.prefill import Newcomer, Prefill, PrefixCache, as_tokens
from rollout_server.engines.torch.sampler import Sampler
from rollout_server.engines.torch.scheduler import Scheduler
from services.wire.sampling import KvPolicy, SamplingParams
from trainer.sft.tiny_model import build_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    yield build_model(5).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def forward(model: Any) -> PolicyForward:
    return PolicyForward(model)


def slots_for(forward: PolicyForward) -> KvCache:
    return KvCache(forward.shape, max_rows=32, dtype=torch.float32, device=CPU)


def tokens(count: int, seed: int) -> list[int]:
    choice = random.Random(seed)
    return [choice.randrange(2, 60) for _ in range(count)]


def started(prefill: Prefill, newcomers: Sequence[Newcomer]) -> tuple[list[int], torch.Tensor]:
    """The newcomers in the order of their rows, and the rows' logits."""
    prefilled = prefill.start(newcomers)
    assert prefilled.scores == {}
    return prefilled.order, prefilled.logits


@torch.no_grad()
def check_logits(model: Any, logits: torch.Tensor, sequences: Sequence[Sequence[int]]) -> None:
    expected = torch.stack([model(torch.tensor([list(each)])).logits[0, -1] for each in sequences])
    assert float((logits - expected).abs().max()) < 1e-4


@torch.inference_mode()
def test_newcomers_share_what_they_begin_with(model: Any, forward: PolicyForward) -> None:
    slots = slots_for(forward)
    prefill = Prefill(forward, slots, CPU, PrefixCache())
    stem, other = tokens(100, 1), tokens(30, 2)
    prompts = [[*stem, 5], other, [*stem, 6, 7, 8], [*stem[:70], 9]]
    order, logits = started(prefill, [Newcomer(as_tokens(prompt), None, 2) for prompt in prompts])
    rows = [prompts[number] for number in order for _ in range(2)]
    check_logits(model, logits, rows)
    assert sorted(order) == [0, 1, 2, 3]
    # The first two whole, then the others as far as they are new: together, so as many tokens for each.
    assert prefill.computed == 101 + 30 + 3 + 3
    assert slots.rows == 8
    # And what the rows hold is right: a step of all of them.
    step = forward(torch.full((8, 1), 11), slots.window())
    check_logits(model, step, [[*row, 11] for row in rows])


@torch.inference_mode()
def test_siblings_that_ask_the_same_at_once_are_computed_once(model: Any, forward: PolicyForward) -> None:
    slots = slots_for(forward)
    prefill = Prefill(forward, slots, CPU, PrefixCache())
    question, other = tokens(80, 7), tokens(50, 8)
    prompts, copies = [question, other, question, question], [1, 2, 3, 1]
    newcomers = [Newcomer(as_tokens(prompt), None, count) for prompt, count in zip(prompts, copies, strict=True)]
    order, logits = started(prefill, newcomers)
    assert sorted(order) == [0, 1, 2, 3]
    rows = [prompts[number] for number in order for _ in range(copies[number])]
    check_logits(model, logits, rows)
    assert prefill.computed == 80 + 50
    step = forward(torch.full((7, 1), 11), slots.window())
    check_logits(model, step, [[*row, 11] for row in rows])
    # Under other salts nothing is shared.
    prefill.start([Newcomer(as_tokens(tokens(70, 9)), salt, 1) for salt in ("a", "b")])
    assert prefill.computed == 80 + 50 + 70 + 70


@torch.inference_mode()
def test_a_cached_prefix_costs_nothing_and_changes_nothing(model: Any, forward: PolicyForward) -> None:
    slots = slots_for(forward)
    prefill = Prefill(forward, slots, CPU, PrefixCache())
    stem = tokens(90, 3)
    prefill.start([Newcomer(as_tokens(stem), None, 1)])
    for prompts, computed in (
        ([[*stem, 5, 6]], 2),
        ([stem], 1),
        ([[*stem, 9], [*stem[:60], 9], tokens(40, 4)], 1 + 1 + 40),
        # One forward more would cost more than to compute some tokens twice.
        ([[*stem, 7], tokens(20, 5)], 20 + 20),
    ):
        before = prefill.computed
        order, logits = started(prefill, [Newcomer(as_tokens(prompt), None, 1) for prompt in prompts])
        check_logits(model, logits, [prompts[number] for number in order])
        assert prefill.computed - before == computed
    prefill.forget()
    before = prefill.computed
    prefill.start([Newcomer(as_tokens(stem), None, 1)])
    assert prefill.computed - before == 90


@torch.inference_mode()
@pytest.mark.parametrize("most", [16384, 40])
def test_rows_are_computed_anew_under_other_weights(
    forward: PolicyForward, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollout_server.engines.torch.prefill.PREFILL_TOKENS", most)
    other = build_model(6).eval().requires_grad_(False)
    slots = slots_for(forward)
    prefill = Prefill(forward, slots, CPU)
    prompts = [tokens(length, length) for length in (3, 40, 17)]
    order, _ = started(prefill, [Newcomer(as_tokens(prompt), None, 1) for prompt in prompts])
    prompts = [prompts[number] for number in order]
    forward(torch.tensor([[7], [8], [9]]), slots.window())
    slots.tick()
    held = [[*prompt, token] for prompt, token in zip(prompts, (7, 8, 9), strict=True)]
    theirs = Prefill(PolicyForward(other), slots, CPU)
    theirs.again(held)
    assert theirs.computed == 63
    step = PolicyForward(other)(torch.full((3, 1), 11), slots.window())
    check_logits(other, step, [[*row, 11] for row in held])


def batch_of(forward: PolicyForward, policy: KvPolicy) -> Scheduler:
    return Scheduler(
        forward,
        slots_for(forward),
        Sampler(0, 64, CPU),
        max_running=32,
        max_model_len=256,
        eos_token_ids=(),
        vocabulary=64,
        device=CPU,
        kv_policy=policy,
    )


@torch.inference_mode()
@pytest.mark.parametrize("policy", ["keep", "salt", "recompute"])
def test_siblings_that_come_as_requests_of_their_own_are_prefilled_once(
    forward: PolicyForward, policy: KvPolicy
) -> None:
    batch = batch_of(forward, policy)
    prompt, greedy = tokens(50, 8), SamplingParams(max_tokens=6, temperature=0.0)
    for number in range(5):
        batch.add(GenerationRequest(f"r{number}", list(prompt), greedy, n=1 + number % 2))
    batch.add(GenerationRequest("other", tokens(9, 9), greedy))
    batch.add(GenerationRequest("salted", list(prompt), greedy, cache_salt="mine"))
    for _ in range(6):
        batch.step(0, admit=True)
    assert batch.prefill_tokens == 50 + 9 + 50
    answers = [outcome for outcome in batch.take_outbox() if isinstance(outcome, GenerationDelta)]
    assert len(answers) == 9
    alike = [answer for answer in answers if answer.request_id != "other"]
    assert len({tuple(answer.token_ids) for answer in alike}) == 1
    assert {span.kv for answer in answers for span in answer.versions} == {policy}


@torch.inference_mode()
def test_running_samples_do_not_wait_for_all_of_many_long_prompts(forward: PolicyForward) -> None:
    batch, greedy = batch_of(forward, "keep"), SamplingParams(max_tokens=9, temperature=0.0)
    batch.add(GenerationRequest("runs", tokens(9, 1), greedy, stream=True))
    batch.step(0, admit=True)
    for number in range(25):
        batch.add(GenerationRequest(f"r{number}", tokens(200, number), greedy))
    running = []
    for _ in range(4):
        batch.step(0, admit=True)
        running.append(batch.running)
    assert running == [11, 21, 26, 26]  # ten of them are 2,000 tokens
    told = [outcome for outcome in batch.take_outbox() if isinstance(outcome, GenerationDelta)]
    assert [delta.request_id for delta in told] == ["runs"] * 5


@torch.inference_mode()
def test_requests_in_the_background_begin_after_all_others(forward: PolicyForward) -> None:
    batch = Scheduler(
        forward,
        slots_for(forward),
        Sampler(0, 64, CPU),
        max_running=1,
        max_model_len=256,
        eos_token_ids=(),
        vocabulary=64,
        device=CPU,
    )
    one = SamplingParams(max_tokens=1, temperature=0.0)
    for name in ("b1", "b2", "f1", "b3", "f2"):
        batch.add(GenerationRequest(name, tokens(3, 1), one, background=name.startswith("b")))
    for _ in range(5):
        batch.step(0, admit=True)
    assert [outcome.request_id for outcome in batch.take_outbox()] == ["f1", "f2", "b1", "b2", "b3"]


def several(stream: bool) -> GenerationRequest:
    """Six samples that end at different steps."""
    sampling = SamplingParams(max_tokens=40, seed=3, stop_token_ids=list(range(2, 8)))
    return GenerationRequest("several", tokens(9, 4), sampling, n=6, stream=stream)


def ends_by_step(batch: Scheduler, steps: int) -> list[list[str]]:
    """How samples ended at each of these steps that ended any."""
    found = []
    for _ in range(steps):
        batch.step(0, admit=True)
        ends = [
            outcome.finish_reason
            for outcome in batch.take_outbox()
            if isinstance(outcome, GenerationDelta) and outcome.finish_reason is not None
        ]
        found += [[str(end) for end in ends]] if ends else []
    return found


@torch.inference_mode()
def test_a_request_that_is_not_streamed_is_told_of_its_samples_in_one_go(forward: PolicyForward) -> None:
    streamed, whole = batch_of(forward, "keep"), batch_of(forward, "keep")
    streamed.add(several(stream=True))
    whole.add(several(stream=False))
    one_by_one = ends_by_step(streamed, 40)
    assert len(one_by_one) > 1
    assert ends_by_step(whole, 40) == [[end for step in one_by_one for end in step]]


@torch.inference_mode()
def test_samples_that_have_ended_are_told_of_when_the_rest_is_aborted(forward: PolicyForward) -> None:
    streamed, whole = batch_of(forward, "keep"), batch_of(forward, "keep")
    streamed.add(several(stream=True))
    steps = 0
    while not (before := ends_by_step(streamed, 1)):
        steps += 1
    whole.add(several(stream=False))
    assert ends_by_step(whole, steps + 1) == []
    assert whole.abort(["several"]) == 1
    told = [outcome for outcome in whole.take_outbox() if isinstance(outcome, GenerationDelta)]
    assert sorted(delta.index for delta in told) == list(range(6))
    assert [delta.finish_reason for delta in told] == [*before[0], *["abort"] * (6 - len(before[0]))]

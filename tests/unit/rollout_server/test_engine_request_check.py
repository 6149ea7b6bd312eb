"""The check before the queue: pure, and the same for every engine."""

from __future__ import annotations

import pytest

from rollout_server.engines.base import GenerationDelta, GenerationRequest, collect
from rollout_server.engines.request_check import check_request, reachable_stops
from services.wire.errors import ContextLengthError, UsageError
from services.wire.sampling import SamplingParams
from services.wire.trajectory import VersionSpan

WHOLE = SamplingParams(max_tokens=4)


def check(prompt: list[int], sampling: SamplingParams = WHOLE, **changes: int) -> None:
    request = GenerationRequest("r", prompt, sampling, **changes)  # type: ignore[arg-type]
    check_request(request, max_model_len=8, vocabulary=10, eos_token_ids=(1,))


def test_what_fits_passes() -> None:
    check(
        [0, 9, 5, 5, 5, 5, 5], SamplingParams(max_tokens=4, temperature=0.0, min_tokens=4, top_k=100), top_logprobs=20
    )


def test_a_prompt_that_fills_the_model_leaves_no_room() -> None:
    with pytest.raises(ContextLengthError, match="maximum context length is 8 tokens, and the prompt has 8"):
        check([5] * 8)


def test_a_refusal_names_the_value_and_what_would_do() -> None:
    with pytest.raises(UsageError, match=r"temperature is 3\.0: give 0\.01 to 2\.0, or 0 for greedy decoding"):
        check([5], SamplingParams(max_tokens=4, temperature=3.0))


def test_stops_that_cannot_be_sampled_are_left_out() -> None:
    sampling = SamplingParams(max_tokens=4, stop_token_ids=(3, 10, -1, 3))
    assert reachable_stops(sampling, 10, (1, 99)) == {1, 3}
    without_eos = SamplingParams(max_tokens=4, stop_token_ids=(3,), ignore_eos=True)
    assert reachable_stops(without_eos, 10, (1,)) == {3}


@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": 0.0},
        {"top_p": 0.99},
        {"top_k": 5},
        {"min_p": 0.01},
        {"presence_penalty": 0.1},
        {"frequency_penalty": -0.1},
        {"repetition_penalty": 1.1},
        {"min_tokens": 1},
    ],
    ids=str,
)
def test_only_the_plain_softmax_is_whole(changes: dict[str, float]) -> None:
    assert not SamplingParams(max_tokens=4, **changes).whole  # type: ignore[arg-type]


def test_a_whole_distribution_may_have_a_temperature_a_seed_and_stop_tokens() -> None:
    assert SamplingParams(max_tokens=4, temperature=0.7, top_k=0, seed=3, stop_token_ids=(5,), ignore_eos=True).whole
    assert SamplingParams(max_tokens=4, top_k=-1).whole


async def test_alternatives_of_streamed_deltas_are_joined_in_order() -> None:
    async def deltas():  # type: ignore[no-untyped-def]
        yield GenerationDelta("r", 0, [5], [-0.1], [VersionSpan(0, 1, 0)], None, [[(5, -0.1)]])
        yield GenerationDelta("r", 1, [4], [-0.1], [VersionSpan(0, 1, 0)], "stop")
        yield GenerationDelta("r", 0, [6], [-0.2], [VersionSpan(0, 1, 0)], "stop", [[(7, -0.1), (6, -0.2)]])

    first, second = await collect(deltas())
    assert first.top_logprobs == [[(5, -0.1)], [(7, -0.1), (6, -0.2)]]
    assert second.top_logprobs is None

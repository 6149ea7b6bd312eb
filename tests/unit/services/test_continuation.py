"""A sample that was sampled in parts is, joined, the sample that would have been sampled in one go."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rollout_server.completions.resumable import resume
from rollout_server.engines.base import GenerationDelta, GenerationRequest
from services.gateway.stateless_generate import asks_for_one, ended, join, known_versions, rest_call, usage
from services.wire.sampling import SamplingParams
from services.wire.trajectory import VersionSpan
from services.wire.vllm_api import Choice, Logprobs, SampledLogprob, weight_spans


def part(tokens: list[int], versions: list[int], finish: str | None) -> Choice:
    """A sample of one try. `versions`: one a token."""
    starts = [(version, at) for at, version in enumerate(versions) if at == 0 or versions[at - 1] != version]
    entries = [SampledLogprob(f"token_id:{token}", token, -0.5, None, []) for token in tokens]
    reason = "abort" if finish is None else "length"
    return Choice(
        index=2,
        token_ids=tokens,
        logprobs=Logprobs(entries),
        finish_reason=reason,
        policy_versions=starts,
        weight_versions=weight_spans(starts, len(tokens)),
    )


@given(versions=st.lists(st.integers(0, 3), max_size=12).map(sorted), cuts=st.lists(st.integers(0, 12), max_size=5))
def test_parts_join_to_the_whole(versions: list[int], cuts: list[int]) -> None:
    tokens = list(range(len(versions)))
    ends = [0, *sorted(min(cut, len(tokens)) for cut in cuts), len(tokens)]
    call = {"token_ids": [7, 8], "sampling_params": {"max_tokens": len(tokens) + 1, "n": 4, "seed": 5}, "model": "m"}
    sampled = Choice(index=2, token_ids=[], logprobs=Logprobs([]), finish_reason="abort", policy_versions=[])
    for begin, end in pairwise(ends):
        left = rest_call(call, sampled)
        assert left is not None
        # The engine sees each time what it would have seen, and is asked for what is missing.
        assert left["token_ids"] == [7, 8, *tokens[:begin]]
        assert left["sampling_params"] == {"max_tokens": len(tokens) + 1 - begin, "n": 1, "seed": 5}
        assert (left["resumed"], left["first_index"], left["model"]) == (begin, 2, "m")
        sampled = join(sampled, part(tokens[begin:end], versions[begin:end], "length" if end == ends[-1] else None))
    assert sampled == part(tokens, versions, "length")
    assert usage(2, [sampled, sampled]).total_tokens == 2 + 2 * len(tokens)


def test_nothing_is_left_of_a_sample_that_has_all_its_tokens() -> None:
    sampled = part([1, 2], [0, 0], None)
    assert rest_call({"token_ids": [5], "sampling_params": {"max_tokens": 2}}, sampled) is None
    assert rest_call({"token_ids": [5], "sampling_params": {}}, sampled) is not None
    assert ended(sampled, "length") == part([1, 2], [0, 0], "length")


def test_versions_that_one_part_does_not_tell_are_not_made_up() -> None:
    assert known_versions([(1, 0)], 2, None) is None
    assert known_versions(None, 2, [(1, 0)]) is None
    assert known_versions(None, 0, [(1, 0)]) == [(1, 0)]
    assert weight_spans(None, 3) is None


class AbortingEngine:
    """Ends every request by `abort` after three tokens; the tokens are their places in the sequence."""

    def __init__(self) -> None:
        self.asked: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> AsyncIterator[GenerationDelta]:
        self.asked.append(request)
        begin, count = len(request.prompt_token_ids), min(3, request.sampling.max_tokens)
        for index in range(request.n):
            tokens, span = list(range(begin, begin + count)), VersionSpan(0, count, len(self.asked))
            yield GenerationDelta(request.request_id, index, tokens, [-0.5] * count, [span], "abort")


def test_a_server_resumes_what_was_aborted_until_all_tokens_have_come() -> None:
    """Also where the last abort came with the last token: nothing is left to ask for then."""
    engine = AbortingEngine()
    request = GenerationRequest("r", [0, 1], SamplingParams(max_tokens=6), n=2)

    async def clear() -> None:
        """The engine takes requests at once."""

    async def run() -> list[GenerationDelta]:
        return [delta async for delta in resume(engine, request, clear)]  # type: ignore[arg-type]

    deltas = asyncio.run(run())
    for index in range(2):
        own = [delta for delta in deltas if delta.index == index]
        assert [token for delta in own for token in delta.token_ids] == [2, 3, 4, 5, 6, 7]
        assert [delta.finish_reason for delta in own] == [None, None, "length"]
    rests = sorted(engine.asked[1:], key=lambda rest: rest.first_index)
    assert [(rest.resumed, rest.first_index, rest.sampling.max_tokens) for rest in rests] == [(3, 0, 3), (3, 1, 3)]


def test_only_well_formed_calls_for_one_sample_ask_for_one() -> None:
    assert asks_for_one({"token_ids": [1], "sampling_params": {}})
    assert not asks_for_one({"token_ids": [1], "sampling_params": {"n": 2}})
    assert not asks_for_one({"token_ids": [1]})
    assert not asks_for_one({})

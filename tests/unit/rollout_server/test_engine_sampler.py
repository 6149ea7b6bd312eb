"""The sampler samples from the distribution it reports."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from rollout_server.engines.torch.sampler import RowParameters, Sampler, seeded_source
from services.wire.sampling import SamplingParams

CPU = torch.device("cpu")
VOCABULARY = 12


def params(**changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=1, **changes)  # type: ignore[arg-type]


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 2.0 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def sample(sampler: Sampler, values: torch.Tensor, rows: list[SamplingParams]) -> tuple[list[int], list[float]]:
    sampled = sampler.sample(values, RowParameters(rows, VOCABULARY, CPU), [])
    return sampled.tokens, sampled.logprobs


@pytest.mark.parametrize(
    "wanted",
    [
        params(),
        params(temperature=0.5),
        params(top_k=4),
        params(top_p=0.7),
        params(min_p=0.2),
        params(top_k=6, top_p=0.8, min_p=0.01, temperature=2.0),
    ],
    ids=["plain", "cold", "top-k", "top-p", "min-p", "all"],
)
def test_frequencies_are_the_reported_probabilities(wanted: SamplingParams) -> None:
    samples = 4000
    values = logits(1).expand(samples, -1)
    tokens, logprobs = sample(Sampler(1, VOCABULARY, CPU), values, [wanted] * samples)
    reported = {token: math.exp(logprob) for token, logprob in zip(tokens, logprobs, strict=True)}
    for token, count in Counter(tokens).items():
        deviation = math.sqrt(samples * reported[token] * (1 - reported[token])) + 1.0
        assert abs(count - samples * reported[token]) < 5 * deviation
    assert sum(reported.values()) == pytest.approx(1.0, abs=0.01)


def test_top_k_and_top_p_keep_the_likeliest() -> None:
    values = logits(1).expand(500, -1)
    order = values[0].argsort(descending=True).tolist()
    share = values[0].softmax(0).sort(descending=True).values.cumsum(0)
    nucleus = int((share < 0.5).sum()) + 1
    for wanted, kept in ((params(top_k=3), 3), (params(top_p=0.5), nucleus), (params(top_p=1e-9), 1)):
        tokens, _ = sample(Sampler(2, VOCABULARY, CPU), values, [wanted] * 500)
        assert set(tokens) == set(order[:kept])


def test_rows_of_one_batch_each_follow_their_own_parameters() -> None:
    values = logits(1).expand(400, -1)
    rows = [params(temperature=0.0), params(top_k=1), params(), params(temperature=0.7)] * 100
    tokens, logprobs = sample(Sampler(3, VOCABULARY, CPU), values, rows)
    best = int(values[0].argmax())
    assert set(tokens[0::4]) == set(tokens[1::4]) == {best}
    assert len(set(tokens[2::4])) > 3
    plain, cold = values[0].log_softmax(0), (values[0] / 0.7).log_softmax(0)
    assert logprobs[0] == pytest.approx(float(plain[best]), abs=1e-6)
    assert logprobs[1] == pytest.approx(0.0, abs=1e-6)
    for row in (2, 3):
        expected = (plain if row == 2 else cold)[tokens[row]]
        assert logprobs[row] == pytest.approx(float(expected), abs=1e-6)


def test_all_greedy_rows_report_the_plain_softmax() -> None:
    values = logits(5)
    tokens, logprobs = sample(Sampler(4, VOCABULARY, CPU), values, [params(temperature=0.0)] * 5)
    assert tokens == values.argmax(1).tolist()
    assert logprobs == pytest.approx(values.log_softmax(1).max(1).values.tolist(), abs=1e-6)


def test_an_impossible_token_is_never_sampled() -> None:
    values = torch.full((3000, VOCABULARY), float("-inf"))
    values[:, 5] = 0.0
    values[:, 7] = -20.0
    tokens, logprobs = sample(Sampler(5, VOCABULARY, CPU), values, [params()] * 3000)
    assert set(tokens) <= {5, 7}
    assert all(math.isfinite(logprob) for logprob in logprobs)


def test_a_seeded_row_is_its_own_whatever_is_beside_it() -> None:
    values = logits(1)
    alone = [
        sample_seeded(Sampler(6, VOCABULARY, CPU), values, 0, source)
        for source in [seeded_source(9, 0)]
        for _ in range(20)
    ]
    crowd = Sampler(7, VOCABULARY, CPU)
    source = seeded_source(9, 0)
    beside = [
        sample_seeded(crowd, logits(8, seed=step).index_copy(0, torch.tensor([3]), values), 3, source)
        for step in range(20)
    ]
    assert alone == beside
    other = seeded_source(9, 1)
    assert alone != [sample_seeded(crowd, values, 0, other) for _ in range(20)]


def sample_seeded(sampler: Sampler, values: torch.Tensor, row: int, source: object) -> int:
    rows = RowParameters([params(seed=9)] * values.shape[0], VOCABULARY, CPU)
    return sampler.sample(values, rows, [(row, source)]).tokens[row]  # type: ignore[list-item]


def test_a_neighbours_cuts_and_alternatives_do_not_shift_a_seeded_row() -> None:
    values = logits(3, seed=4)
    alone, beside, told = [], [], []
    for batch, found in (([params()] * 3, alone), ([params(), params(top_k=2), params(temperature=0.0)], beside)):
        source, sampler = seeded_source(11, 0), Sampler(8, VOCABULARY, CPU)
        for _ in range(200):
            sampled = sampler.sample(values, RowParameters(batch, VOCABULARY, CPU), [(0, source)])
            found.append((sampled.tokens[0], sampled.logprobs[0]))
    source, sampler = seeded_source(11, 0), Sampler(8, VOCABULARY, CPU)
    for _ in range(200):
        sampled = sampler.sample(values, RowParameters([params()] * 3, VOCABULARY, CPU, [0, 4, 0]), [(0, source)])
        told.append((sampled.tokens[0], sampled.logprobs[0]))
    assert alone == beside == told


def test_alternatives_are_the_likeliest_of_each_rows_own_distribution() -> None:
    values = logits(1).expand(3, -1)
    rows = [params(top_k=2, temperature=0.5), params(temperature=0.0), params()]
    sampled = Sampler(9, VOCABULARY, CPU).sample(values, RowParameters(rows, VOCABULARY, CPU, [5, 3, 0]), [])
    assert sampled.likeliest is not None
    cut, greedy, none = sampled.likeliest
    order = values[0].argsort(descending=True).tolist()
    assert [token for token, _ in cut] == order[:2]
    assert sum(math.exp(logprob) for _, logprob in cut) == pytest.approx(1.0, abs=1e-5)
    assert [token for token, _ in greedy] == order[:3]
    assert greedy[0] == (sampled.tokens[1], pytest.approx(sampled.logprobs[1], abs=1e-6))
    assert none == []


def test_the_engines_seed_decides_the_unseeded_samples() -> None:
    values = logits(50)
    first, again, other = (sample(Sampler(seed, VOCABULARY, CPU), values, [params()] * 50)[0] for seed in (1, 1, 2))
    assert first == again
    assert first != other

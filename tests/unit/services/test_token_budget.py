"""Micro-batches by tokens: nothing lost, nothing twice, within the budget, balanced over ranks, the same each time."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policies.token_budget import fill_sharing, smaller_budget, split_rows, work

LENGTHS = st.lists(st.integers(1, 9), max_size=40) | st.lists(st.integers(1, 300), max_size=60)
BUDGET = st.integers(1, 20) | st.integers(1, 700)
RANKS = st.integers(1, 9)


@given(LENGTHS, BUDGET, RANKS)
def test_each_row_stands_in_exactly_one_micro_batch_within_the_budget(
    lengths: list[int], budget: int, ranks: int
) -> None:
    split = split_rows(lengths, budget, ranks=ranks)
    assert len(split) == ranks
    assert len({len(micro_batches) for micro_batches in split}) == 1, "each pass is a collective"
    every = [micro_batch for micro_batches in split for micro_batch in micro_batches]
    assert sorted(index for micro_batch in every for index in micro_batch) == list(range(len(lengths)))
    for micro_batch in every:
        tokens = [lengths[index] for index in micro_batch]
        assert sum(tokens) <= budget or len(tokens) == 1
        assert tokens == sorted(tokens)


@given(LENGTHS, BUDGET, RANKS, st.integers(1, 64))
def test_ranks_differ_by_the_costliest_row_at_most(lengths: list[int], budget: int, ranks: int, width: int) -> None:
    split = split_rows(lengths, budget, ranks=ranks, width=width)
    loads = [sum(work(lengths[i], width) for micro_batch in rank for i in micro_batch) for rank in split]
    assert max(loads) - min(loads) <= max((work(length, width) for length in lengths), default=0)


@given(LENGTHS, BUDGET)
def test_one_rank_needs_no_more_passes_than_half_full_ones(lengths: list[int], budget: int) -> None:
    """Two neighbouring micro-batches never fit into one."""
    (micro_batches,) = split_rows(lengths, budget)
    tokens = [sum(lengths[index] for index in micro_batch) for micro_batch in micro_batches]
    assert all(first + second > budget for first, second in pairwise(tokens))
    assert all(micro_batches)


@given(LENGTHS, BUDGET, RANKS)
def test_the_same_lengths_give_the_same_split(lengths: list[int], budget: int, ranks: int) -> None:
    assert split_rows(lengths, budget, ranks=ranks) == split_rows(tuple(lengths), budget, ranks=ranks)


def test_attention_weighs_a_long_row_more_than_its_tokens() -> None:
    """Where attention dominates, a row of 1000 tokens outweighs six of 250; in a wide model it takes one of them on."""
    lengths = [1000, *[250] * 6]
    for width, rows_of_each in ((1, [1, 6]), (1024, [2, 5])):
        split = split_rows(lengths, 10_000, ranks=2, width=width)
        assert [sum(map(len, micro_batches)) for micro_batches in split] == rows_of_each


@given(LENGTHS, BUDGET)
def test_smaller_passes_end_at_one_row(lengths: list[int], budget: int) -> None:
    for _ in range(40):
        smaller = smaller_budget(lengths, budget)
        if smaller is None:
            break
        assert 1 <= smaller < budget and smaller <= sum(lengths) / 2
        budget = smaller
    assert all(len(micro_batch) <= 1 for micro_batch in split_rows(lengths, budget)[0])


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 30), st.integers(1, 400))
def test_smaller_passes_end_at_one_row_where_prefixes_are_shared(rests: list[int], stem: int, budget: int) -> None:
    """Siblings with one prompt, of which a pass takes several for little more than one."""
    lengths = [stem + rest for rest in rests]
    order, common = [*range(len(rests))], [0, *[stem] * (len(rests) - 1)]
    for _ in range(40):
        smaller = smaller_budget(lengths, budget, sharing=True)
        if smaller is None:
            break
        assert 1 <= smaller < budget
        budget = smaller
    assert all(len(rows) <= 1 for rows in fill_sharing(order, common, lengths, budget, 64)[0])


@pytest.mark.parametrize(("budget", "ranks"), [(0, 1), (1, 0)])
def test_bounds_that_admit_nothing_are_refused(budget: int, ranks: int) -> None:
    with pytest.raises(ValueError, match="≥ 1"):
        split_rows([1], budget, ranks=ranks)


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=8),
    BUDGET,
    RANKS,
)
def test_rows_that_begin_alike_are_given_out_evenly(
    families: list[tuple[int, int, int]], budget: int, ranks: int
) -> None:
    """`families`: of a stem, so many rows that go on from it, with so many tokens."""
    lengths = [stem + rest for stem, count, rest in families for _ in range(count)]
    common = [stem * (place > 0) for stem, count, _ in families for place in range(count)]
    split = fill_sharing([*range(len(lengths))], common, lengths, budget, 64, ranks=ranks)
    assert len(split) == ranks
    assert len({len(passes) for passes in split}) == 1, "each pass is a collective"
    assert sorted(row for passes in split for rows in passes for row in rows) == [*range(len(lengths))]


def test_siblings_stay_on_one_rank_unless_it_would_do_more_than_the_others() -> None:
    def shares(groups: int, ranks: int) -> list[set[int]]:
        lengths, common = [120] * 8 * groups, ([0] + [100] * 7) * groups
        split = fill_sharing([*range(8 * groups)], common, lengths, 10_000, 64, ranks=ranks)
        return [{row for rows in passes for row in rows} for passes in split]

    assert all(len({row // 8 for row in share}) == 2 and len(share) == 16 for share in shares(4, 2))
    assert all(len(share) == 4 for share in shares(1, 2)), "one group, and neither rank is idle"

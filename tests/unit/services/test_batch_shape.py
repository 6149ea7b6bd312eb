"""Minibatches and epochs: each minibatch once an epoch, and admission that lets no token be too old in its last step."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.policies.admission import Account, AdmissionRules, places
from services.policies.training.batch_shape import BatchShape

SHAPES = st.builds(BatchShape, st.integers(1, 4), st.integers(1, 4))


@given(SHAPES)
def test_each_epoch_is_each_minibatch_once_in_order(shape: BatchShape) -> None:
    assert shape.places() == [
        (1 + step // shape.minibatches, step % shape.minibatches) for step in range(shape.updates)
    ]
    assert set(Counter(place for _, place in shape.places()).values()) == {shape.epochs}


@given(SHAPES, st.integers(0, 60))
def test_a_minibatch_is_finished_by_its_last_epoch(shape: BatchShape, steps: int) -> None:
    """Step by step: the last of M · E steps on a minibatch is in epoch E."""
    batches = steps // shape.updates + 1
    done = [epoch == shape.epochs for _ in range(batches) for epoch, _ in shape.places()]
    assert shape.finished(steps) == sum(done[:steps])


def test_the_last_batch_has_fewer_minibatches_and_all_epochs() -> None:
    assert BatchShape(4, 2).of(6) == BatchShape(3, 2)
    for updates in (0, 1, 5):
        with pytest.raises(ValueError, match=f"{updates} optimizer steps do not make 2 whole epochs"):
            BatchShape(4, 2).of(updates)
    for nonsense in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="≥ 1 minibatch and ≥ 1 epoch"):
            BatchShape(*nonsense)


@given(SHAPES, st.integers(0, 20), st.integers(1, 3), st.binary(max_size=40))
def test_no_token_is_older_than_k_in_the_last_epoch_and_nobody_starves(
    shape: BatchShape, more: int, batch: int, schedule: bytes
) -> None:
    """Engines serve the version after each whole batch; groups end in order, as many at a time as the schedule says, and
    all of them once it has nothing more to say."""
    k = shape.updates - 1 + more
    rules = AdmissionRules(base_version=0, k=k, batch=batch, lookahead=8, shape=shape)
    size, ending = shape.minibatches * batch, iter(schedule)
    opened: list[int] = []
    version = trained = finished = 0
    while trained < 4 * size:
        account = Account(len(opened), 0, len(opened) - finished, finished)
        while (left := places(account, rules, version)).admit(0):
            opened.append(version)
            account = Account(len(opened), 0, len(opened) - finished, finished)
        assert left.free == 0
        assert len(opened) - finished <= rules.most_open
        finished = min(len(opened), finished + next(ending, len(opened)) % (len(opened) + 1))
        if finished == len(opened):
            assert finished - trained >= size, "nobody else is let in, and the batch is not whole"
        if finished - trained < size:
            continue
        for step, (_, place) in enumerate(shape.places()):
            groups = range(trained + place * batch, trained + (place + 1) * batch)
            assert max(version + step - opened[group] for group in groups) <= k
        version, trained = version + shape.updates, trained + size
        assert shape.finished(version) * batch == trained


@given(shape=SHAPES, steps=st.integers(0, 40), skipped=st.integers(0, 10))
def test_batches_that_a_restart_skipped_let_nobody_in(shape: BatchShape, steps: int, skipped: int) -> None:
    versions = skipped * shape.updates
    assert shape.finished(steps + versions) - shape.finished(versions) == shape.finished(steps)


@pytest.mark.parametrize(("k", "admitted"), [(3, 4), (4, 4), (5, 4), (6, 6), (7, 8), (11, 12)])
def test_two_minibatches_of_two_groups_in_two_epochs(k: int, admitted: int) -> None:
    rules = AdmissionRules(base_version=0, k=k, batch=2, shape=BatchShape(2, 2))
    assert rules.limit(0) == rules.most_open == admitted
    assert rules.limit(4) == admitted + 4
    assert [rules.steps_for(groups) for groups in (1, 2, 3, 4)] == [2, 2, 4, 4]


def test_a_k_that_lets_no_group_into_its_last_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match="let a group into its last epoch"):
        AdmissionRules(base_version=0, k=1, batch=2, shape=BatchShape(2, 2))

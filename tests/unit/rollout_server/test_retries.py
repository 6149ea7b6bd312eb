"""Which call repeats which: by key, by the SDK's count, and never by the body alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout_server.sessions.responses import IdempotencyIndex, KeyReusedError, RequestKey


def known(*request_key: RequestKey) -> IdempotencyIndex[int]:
    retries: IdempotencyIndex[int] = IdempotencyIndex()
    for number, each in enumerate(request_key):
        retries.add(each, number)
    return retries


def test_the_same_body_without_a_mark_is_a_new_sample() -> None:
    assert known(RequestKey(b"a")).find(RequestKey(b"a")) is None


def test_a_key_finds_its_call_and_refuses_another_body() -> None:
    retries = known(RequestKey(b"a", "k"), RequestKey(b"a", "l"))
    assert retries.find(RequestKey(b"a", "l")) == 1
    assert retries.find(RequestKey(b"a", "m")) is None
    with pytest.raises(KeyReusedError):
        retries.find(RequestKey(b"b", "k"))


def test_a_retry_of_a_call_that_never_arrived_is_a_new_call() -> None:
    assert known(RequestKey(b"a")).find(RequestKey(b"b", retry=1)) is None


def test_siblings_that_all_try_again_each_get_an_answer_of_their_own() -> None:
    retries = known(*[RequestKey(b"a")] * 3)
    assert [retries.find(RequestKey(b"a", retry=1)) for _ in range(4)] == [0, 1, 2, None]
    assert [retries.find(RequestKey(b"a", retry=2)) for _ in range(3)] == [0, 1, 2]


def test_a_retry_does_not_claim_a_call_that_has_a_key() -> None:
    assert known(RequestKey(b"a", "k")).find(RequestKey(b"a", retry=1)) is None


def test_what_was_forgotten_is_not_found() -> None:
    retries = known(RequestKey(b"a"), RequestKey(b"a"))
    retries.forget(0)
    assert retries.find(RequestKey(b"a", retry=1)) == 1
    assert len(retries) == 1


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b"]), st.integers(0, 3)), max_size=30))
def test_no_call_is_claimed_twice_by_retries_of_one_count(calls: list[tuple[bytes, int]]) -> None:
    retries: IdempotencyIndex[int] = IdempotencyIndex()
    bodies: list[bytes] = []
    claims: set[tuple[int, int]] = set()
    for body, count in calls:
        request_key = RequestKey(body, retry=count)
        found = retries.find(request_key)
        if found is None:
            retries.add(request_key, len(bodies))
            bodies.append(body)
            continue
        assert count > 0
        assert bodies[found] == body
        assert (found, count) not in claims
        claims.add((found, count))

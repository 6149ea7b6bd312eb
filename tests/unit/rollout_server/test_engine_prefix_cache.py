"""Sequences found again by their longest common prefix, within a bound of memory."""

from __future__ import annotations

import pytest
import torch

from rollout_server.engines.torch.prefill import BLOCK, KeysAndValues, PrefixCache, as_tokens

SIZE = 2 * 4 * 3
"""Bytes that a token takes: keys and values, float32, `[1, 1, tokens, 3]`."""


def numbered(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def add(cache: PrefixCache, tokens: list[int], salt: str | None = None) -> None:
    def copy() -> KeysAndValues:
        keys = torch.tensor(tokens, dtype=torch.float32).repeat(3, 1).t().reshape(1, 1, len(tokens), 3)
        return keys, -keys

    cache.add(as_tokens(tokens), salt, copy)


def found(cache: PrefixCache, tokens: list[int], salt: str | None = None) -> int:
    """For how many tokens something is found; it must be theirs."""
    hit = cache.longest(as_tokens(tokens), salt)
    if hit is None:
        return 0
    sequence, length = hit
    assert sequence.tokens[:length].tolist() == tokens[:length]
    assert sequence.keys[0, 0, :length, 0].tolist() == tokens[:length]
    assert sequence.values[0, 0, :length, 0].tolist() == [-token for token in tokens[:length]]
    return length


def test_the_longest_common_prefix_is_found_to_the_token() -> None:
    cache = PrefixCache()
    add(cache, numbered(0, 56))
    add(cache, [*numbered(0, 32), *numbered(100, 40)])
    assert found(cache, [*numbered(0, 51), 99, 99]) == 51
    assert found(cache, [*numbered(0, 32), *numbered(100, 20), 7]) == 52
    assert found(cache, [*numbered(0, 20), 99, 99]) == 20
    assert found(cache, numbered(1, 40)) == 0
    assert found(cache, []) == 0


def test_the_last_token_is_always_left_to_compute() -> None:
    cache = PrefixCache()
    add(cache, numbered(0, 40))
    assert found(cache, numbered(0, 40)) == 39
    assert found(cache, numbered(0, BLOCK)) == 0
    assert found(cache, numbered(0, BLOCK + 1)) == BLOCK


def test_less_than_a_block_is_neither_held_nor_found() -> None:
    cache = PrefixCache()
    add(cache, numbered(0, BLOCK - 1))
    assert cache.nbytes == 0
    add(cache, numbered(0, BLOCK))
    assert found(cache, [*numbered(0, BLOCK - 1), 99, 99]) == 0


def test_salts_do_not_see_each_other() -> None:
    cache = PrefixCache()
    add(cache, numbered(0, 40), "a")
    assert found(cache, numbered(0, 40), "a") == 39
    assert found(cache, numbered(0, 40), "b") == found(cache, numbered(0, 40)) == 0


def test_hashes_that_meet_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_server.engines.torch.prefill.hash", lambda _: 1, raising=False)
    cache = PrefixCache()
    add(cache, numbered(0, BLOCK), "a")
    assert found(cache, numbered(500, 2 * BLOCK), "a") == 0
    assert found(cache, numbered(0, 2 * BLOCK), "b") == 0


def test_what_a_longer_sequence_holds_is_held_once() -> None:
    cache = PrefixCache()
    add(cache, numbered(0, 32))
    assert cache.nbytes == 32 * SIZE
    add(cache, numbered(0, 32))
    assert cache.nbytes == 32 * SIZE
    add(cache, numbered(0, 48))
    assert cache.nbytes == 48 * SIZE
    assert found(cache, numbered(0, 60)) == 48
    add(cache, [*numbered(0, 32), *numbered(200, 16)])
    assert found(cache, numbered(0, 60)) == 48


def test_the_bound_holds_and_what_was_used_last_stays() -> None:
    cache = PrefixCache(most_bytes=100 * SIZE)
    for start in (0, 1000, 2000):
        add(cache, numbered(start, 32))
    assert found(cache, numbered(0, 33)) == 32
    add(cache, numbered(3000, 32))
    assert cache.nbytes <= 100 * SIZE
    assert found(cache, numbered(0, 33)) == found(cache, numbered(3000, 33)) == 32
    assert found(cache, numbered(1000, 33)) == 0
    add(cache, numbered(5000, 160))
    assert cache.nbytes == 0
    add(cache, numbered(0, 32))
    cache.clear()
    assert (cache.nbytes, found(cache, numbered(0, 33))) == (0, 0)

"""The fewest tokens that a fleet must prefill: every distinct prefix of all prompts once, wherever it is asked for. Pure.

a b c d          the trie of the prompts has one node a distinct prefix
a b c e f   ──►  a─b─c─d
a b c d              └─e─f      6 nodes: 6 tokens, though the prompts have 13
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise


def distinct_prefixes(prompts: Iterable[Sequence[int]]) -> int:
    """Nodes of the trie of `prompts`; an empty prompt has none."""
    ordered = sorted([list(prompt) for prompt in prompts])
    # In order, a prompt shares with none before it more than with the one just before it.
    return sum(len(now) - _shared(before, now) for before, now in pairwise([[], *ordered]))


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))

"""Continuing a generation that was broken off: what is left to ask for, and the policy versions over the joined sample.

    asked   token_ids, max_tokens ──► k tokens sampled, then `abort`, or the server died
    rest    token_ids + sampled, max_tokens − k, resumed + k ──► more tokens
    joined  sampled + more; where a version begins in `more` is k tokens further on in the whole

`resumed` tells the engine that the last k tokens of the prompt are output: penalties, `min_tokens` (which stays as it was
asked) and a seed go on as in an unbroken generation. `first_index` does the same for one of several samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Versions = Sequence[tuple[int, int]]
"""(policy version, the first output token that it sampled), in order."""


@dataclass(frozen=True, slots=True)
class Rest:
    """What to ask for to complete one sample; `max_tokens`: None where the caller set no limit."""

    token_ids: list[int]
    max_tokens: int | None
    resumed: int
    first_index: int


def rest_of(
    prompt: Sequence[int],
    sampled: Sequence[int],
    *,
    max_tokens: int | None,
    resumed: int = 0,
    first_index: int = 0,
    index: int = 0,
) -> Rest | None:
    """The rest of sample `index`, of which `sampled` has come; None where those are all the tokens that were asked for.

    `max_tokens`, `resumed`, `first_index`: of the request that was broken off.
    """
    left = None if max_tokens is None else max_tokens - len(sampled)
    if left is not None and left <= 0:
        return None
    return Rest([*prompt, *sampled], left, resumed + len(sampled), first_index + index)


def joined_versions(earlier: Versions, count: int, more: Versions) -> list[tuple[int, int]]:
    """Versions of a whole sample: `earlier` of its first `count` tokens, `more` of the part that follows them.

    Neighbours of one version become one.
    """
    joined = list(earlier)
    for version, start in more:
        if not joined or joined[-1][0] != version:
            joined.append((version, start + count))
    return joined

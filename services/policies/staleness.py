"""Staleness: how old a token is when a step consumes it, and what K does about it.

    staleness(token) = v − version(token)

where `v` is the policy version (optimizer steps so far) that the step starts from. A token whose staleness exceeds K
leaves the loss (its context stays); a token from the future (`version > v`) is an error of the sender.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class FutureVersionError(ValueError):
    """A token claims a policy version that the trainer has not reached."""


def staleness(policy_version: int, token_version: int) -> int:
    """`policy_version − token_version`. Raises FutureVersionError when negative."""
    if token_version > policy_version:
        raise FutureVersionError(f"a token of version {token_version} reached a trainer at version {policy_version}")
    return policy_version - token_version


@dataclass(frozen=True)
class WindowedSpan:
    """A run of sampled tokens of one version, judged: positions, how stale, and whether it may enter the loss."""

    start: int
    length: int
    staleness: int
    fresh: bool


def window(spans: Iterable[Sequence[int]], policy_version: int, k: int) -> list[WindowedSpan]:
    """Judge `(start, length, version)` spans for a step that starts from `policy_version` under the bound `k`.

    Raises FutureVersionError if any version lies beyond `policy_version`, ValueError for a negative `k`.
    """
    if k < 0:
        raise ValueError(f"K must be ≥ 0, got {k}")
    judged = []
    for start, length, version in spans:
        age = staleness(policy_version, version)
        judged.append(WindowedSpan(start=start, length=length, staleness=age, fresh=age <= k))
    return judged

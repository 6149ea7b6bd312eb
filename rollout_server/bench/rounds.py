"""Arms in turns: in rounds of random order, or pairwise one request at a time, so that a drift touches all."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Mapping

from rollout_server.bench.rate import Rate
from rollout_server.bench.ratios import Speeds

Arms = Mapping[str, Callable[[], Awaitable[Rate]]]
SingleArms = Mapping[str, Callable[[int], Awaitable[float]]]
"""By name: seconds of one request, which is numbered."""
_UNCOUNTED = 10


async def warm_up(arms: Arms) -> None:
    """Run each once, uncounted."""
    for run in arms.values():
        await run()


async def in_rounds(
    arms: Arms, rounds: int, rng: random.Random, after_round: Callable[[int, Speeds], None]
) -> dict[str, list[float]]:
    """Tokens a second by arm, one figure a round. `after_round` hears of each round, from 1."""
    speeds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(rounds):
        for name in _shuffled(arms, rng):
            speeds[name].append((await arms[name]()).tokens_per_s)
        after_round(number + 1, speeds)
    return speeds


async def one_at_a_time(arms: SingleArms, requests: int, rng: random.Random) -> dict[str, list[float]]:
    """Seconds by arm of `requests` requests, each put to all arms one after another; some go before as a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(-_UNCOUNTED, requests):
        for name in _shuffled(arms, rng):
            took = await arms[name](number)
            if number >= 0:
                seconds[name].append(took)
    return seconds


def _shuffled(arms: Mapping[str, object], rng: random.Random) -> list[str]:
    return rng.sample(list(arms), len(arms))

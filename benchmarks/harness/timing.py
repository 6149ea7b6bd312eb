"""Interleaved measurements: rounds in random order, or pairs of single requests, so that drift affects all arms alike."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import msgspec

from services.host.aio import first_failure

Item = TypeVar("Item")


class Rate(msgspec.Struct, frozen=True):
    """`tokens` sampled in `seconds`."""

    tokens: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


async def in_parallel(items: Sequence[Item], concurrency: int, answer: Callable[[Item], Awaitable[int]]) -> Rate:
    """Keep `concurrency` of the items in flight until all are answered; timed from the first sent to the last answered.

    `answer` returns its number of tokens.

    Raises the first RollmeshError of an answer.
    """
    waiting = iter(items)
    tokens = 0

    async def work() -> None:
        nonlocal tokens
        for item in waiting:
            sampled = await answer(item)  # awaited before the sum is read: others add to it meanwhile
            tokens += sampled

    started = time.perf_counter()
    with first_failure():
        async with asyncio.TaskGroup() as workers:
            for _ in range(min(concurrency, len(items))):
                workers.create_task(work())
    return Rate(tokens, time.perf_counter() - started)


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


Speeds = Mapping[str, Sequence[float]]
"""Tokens a second by arm, one figure a round; all arms have as many."""
Ratios = Mapping[str, tuple[str, str]]
"""By name: which arm is divided by which, round by round."""


def by_round(speeds: Speeds, ours: str, theirs: str) -> list[float]:
    """One arm ÷ another in each round; empty where one of them was not run."""
    return [round(a / b, 4) for a, b in zip(speeds.get(ours, ()), speeds.get(theirs, ()), strict=True)]


def medians(by_name: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    """The median of each; None for one without figures."""
    return {name: round(statistics.median(values), 3) if values else None for name, values in by_name.items()}


def said(speeds: Speeds, named: Ratios) -> str:
    """The last round's ratios in a line."""
    last = {name: by_round(speeds, *arms)[-1:] for name, arms in named.items()}
    return ", ".join(f"{name} {figure:.3f}" for name, figures in last.items() for figure in figures)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least so many percent do not exceed (nearest rank). Raises ValueError without any."""
    if not values:
        raise ValueError("no percentile without values")
    ordered = sorted(values)
    rank = -int(-len(ordered) * percent // 100)
    return ordered[max(rank, 1) - 1]

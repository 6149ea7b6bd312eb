"""`./dev bench NAME … --against REV`: a benchmark in two checkouts, run in turns, its figures side by side.

    pair 1   here, REV       pair 2   REV, here       …       ratio = here ÷ REV, of each pair

Each run is the benchmark's own command with `--json`, in a process of its own; every number of its result that both
report is compared.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import statistics
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich.table import Table

from benchmarks.harness.command import Say, progress, show
from benchmarks.harness.revision import HERE, Checkout, checkout, here
from services.wire.errors import RollmeshError, UsageError

PAIRS = 7
_TAIL = 2000


class Ratio(msgspec.Struct, frozen=True):
    """A figure in both checkouts: medians, and the median of here ÷ there over pairs with its standard error."""

    here: float
    there: float
    ratio: float
    error: float


class Comparison(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    benchmark: str
    against: str
    pairs: int
    load_before: tuple[float, float, float]
    figures: dict[str, Ratio]


@dataclass(frozen=True)
class Wish:
    """What of the command line is not the benchmark's own. `revision` None: nothing is compared."""

    revision: str | None
    pairs: int
    as_json: bool
    rest: list[str]


def read_wish(arguments: Sequence[str]) -> Wish:
    """Raises UsageError for an option without its value."""
    rest, found = list[str](), dict[str, str]()
    waiting = iter(arguments)
    for argument in waiting:
        name, given, value = argument.partition("=")
        if name not in ("--against", "--pairs"):
            rest.append(argument)
            continue
        value = value if given else next(waiting, "")
        if not value:
            raise UsageError(
                f"{name} without a value", "such as ./dev bench loop --rounds 1 --against HEAD~1 --pairs 7"
            )
        found[name] = value
    pairs = found.get("--pairs", str(PAIRS))
    if not pairs.isdigit() or int(pairs) < 1:
        raise UsageError(f"--pairs {pairs}", "give how many runs each checkout is to have, at least 1")
    return Wish(found.get("--against"), int(pairs), "--json" in rest, [each for each in rest if each != "--json"])


def compare(name: str, wish: Wish) -> None:
    """Run the benchmark in both checkouts and show the figures. Raises RollmeshError for a run that fails."""
    assert wish.revision is not None
    say, load = progress(), os.getloadavg()
    there = checkout(wish.revision, say)
    arms = {each.name: each for each in (here(), there)}

    async def run(arm: str) -> dict[str, float]:
        return await asyncio.to_thread(_run, arms[arm], name, wish.rest)

    runs = asyncio.run(in_turns(HERE, there.name, wish.pairs, run, say))
    result = Comparison(name, there.name, wish.pairs, load, compared(runs[HERE], runs[there.name]))
    show(result, wish.as_json, table_of(result))


async def in_turns(
    ours: str, theirs: str, pairs: int, run: Callable[[str], Awaitable[dict[str, float]]], say: Say
) -> dict[str, list[dict[str, float]]]:
    """The figures of both, by name, in pairs: the machine's speed changes, so the two of a pair follow each other."""
    chance = random.Random(0)
    runs: dict[str, list[dict[str, float]]] = {ours: [], theirs: []}
    for pair in range(pairs):
        for arm in chance.sample((ours, theirs), 2):
            say(f"pair {pair + 1} of {pairs}: {arm}")
            runs[arm].append(await run(arm))
    return runs


def compared(here: Sequence[dict[str, float]], there: Sequence[dict[str, float]]) -> dict[str, Ratio]:
    """The figures that all runs of both report."""
    shared = [name for name in here[0] if all(name in run for run in [*here, *there])]
    return {name: ratio_of([run[name] for run in here], [run[name] for run in there]) for name in shared}


def ratio_of(here: Sequence[float], there: Sequence[float]) -> Ratio:
    """Of one figure over pairs; a ratio of two zeros is 1."""
    ratios = [1.0 if a == b else math.inf if b == 0.0 else a / b for a, b in zip(here, there, strict=True)]
    middle = statistics.median(ratios)
    return Ratio(statistics.median(here), statistics.median(there), middle, standard_error(ratios))


def standard_error(values: Sequence[float]) -> float:
    """Of their median, by the median distance from it, which one wild value does not move.

    1.4826 · MAD estimates a normal deviation; the median's standard error is 1.2533 of the mean's (Huber, Robust
    Statistics, 1981). 0 for a single value.
    """
    middle = statistics.median(values)
    deviation = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return 1.2533 * deviation / math.sqrt(len(values))


def numbers(result: Any, name: str = "") -> dict[str, float]:
    """The numbers of a JSON object by their path; lists, which hold single rounds, are left out."""
    if isinstance(result, bool | list):
        return {}
    if isinstance(result, int | float):
        return {name: float(result)}
    if isinstance(result, Mapping):
        found: dict[str, float] = {}
        for key, value in result.items():
            found |= numbers(value, f"{name}.{key}" if name else str(key))
        return found
    return {}


def table_of(result: Comparison) -> Table:
    """For people."""
    table = Table(title=f"{result.benchmark}: here beside {result.against}, {result.pairs} pairs")
    for column in ("figure", "here", result.against, "ratio", "±"):
        table.add_column(column)
    for figure, ratio in result.figures.items():
        table.add_row(figure, f"{ratio.here:.4g}", f"{ratio.there:.4g}", f"{ratio.ratio:.3f}", f"{ratio.error:.3f}")
    load = ", ".join(f"{each:.2f}" for each in result.load_before)
    table.caption = f"ratio: median over pairs of here ÷ {result.against}; ±: its standard error; load before {load}"
    return table


def _run(arm: Checkout, name: str, arguments: Sequence[str]) -> dict[str, float]:
    command = arm.command("benchmarks", name, *arguments, "--json")
    # Where the user stands: the peer's environment is found from there.
    ended = subprocess.run(command, env=arm.environ, stdout=subprocess.PIPE, check=False)
    if ended.returncode != 0:
        raise RollmeshError(
            f"`bench {name}` of {arm.name} ended with exit code {ended.returncode}",
            f"see above, or run it alone: {' '.join(command)}",
        )
    try:
        return numbers(msgspec.json.decode(ended.stdout))
    except msgspec.DecodeError as error:
        shown = ended.stdout[-_TAIL:].decode(errors="replace")
        raise RollmeshError(f"`bench {name}` of {arm.name} printed no JSON ({error})", shown) from error

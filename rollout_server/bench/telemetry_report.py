"""What the benchmark of telemetry says: what each part costs, beside how far two runs without it are apart. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import msgspec
from rich.table import Table

from rollout_server.bench.ratios import Speeds, by_round

Arm = Literal["off", "control", "scraped", "traced", "all"]
ARMS: tuple[Arm, ...] = get_args(Arm)
BASE: Arm = "off"
_WORDS: Mapping[Arm, str] = {
    "control": "the same again: the noise",
    "scraped": "/metrics read every second",
    "traced": "every call traced, OTLP to a collector",
    "all": "both",
}


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What an arm costs beside `off`, in percent; below 0 it was better. Medians over rounds.

    `throughput`: of tokens a second that are lost; `cpu`: of CPU time a call, in all threads, on top.
    `spread`: quartiles of the same, round by round.
    """

    throughput: float
    throughput_spread: tuple[float, float]
    cpu: float
    cpu_spread: tuple[float, float]


class TelemetryBench(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. Lists are round by round, by arm."""

    cost_percent: dict[str, Cost]
    tokens_per_s: dict[str, list[float]]
    cpu_ms_per_call: dict[str, list[float]]
    servers: int
    requests: int
    concurrency: int
    max_tokens: int
    parameters: int
    load_before: tuple[float, float, float]
    cores: int
    versions: dict[str, str]


def costs(speeds: Speeds, cpu_ms: Speeds) -> dict[str, Cost]:
    """Of each arm, but the one without telemetry."""
    found: dict[str, Cost] = {}
    for arm in speeds:
        if arm != BASE:
            lost = [100.0 * (1.0 - ratio) for ratio in by_round(speeds, arm, BASE)]
            more = [100.0 * (ratio - 1.0) for ratio in by_round(cpu_ms, arm, BASE)]
            found[arm] = Cost(
                throughput=round(statistics.median(lost), 2),
                throughput_spread=quartiles(lost),
                cpu=round(statistics.median(more), 2),
                cpu_spread=quartiles(more),
            )
    return found


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The first and the third; of a single value, that value."""
    if len(values) < 2:
        return round(values[0], 2), round(values[0], 2)
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return round(first, 2), round(third, 2)


def as_table(bench: TelemetryBench) -> Table:
    """For people."""
    table = Table(title=f"What telemetry costs a rollout server, {bench.concurrency} requests at once")
    for column in ("beside calls without", "tokens/s lost", "quartiles", "CPU a call more", "quartiles"):
        table.add_column(column)
    for arm, cost in bench.cost_percent.items():
        table.add_row(
            _WORDS[arm],  # type: ignore[index]
            *(f"{cost.throughput:.2f} %", _range(cost.throughput_spread)),
            *(f"{cost.cpu:.2f} %", _range(cost.cpu_spread)),
        )
    for arm, speeds in bench.tokens_per_s.items():
        cpu = statistics.median(bench.cpu_ms_per_call[arm])
        table.add_row(f"tokens/s, {arm}", f"{statistics.median(speeds):.0f}", "", f"{cpu:.2f} ms", "")
    load = ", ".join(f"{figure:.2f}" for figure in bench.load_before)
    versions = ", ".join(f"{name} {number}" for name, number in bench.versions.items())
    table.caption = (
        f"{bench.parameters:,} parameters, {bench.requests} requests of about {bench.max_tokens} tokens a round, "
        f"{len(bench.tokens_per_s[BASE])} rounds of {bench.servers} servers; {bench.cores} cores, "
        f"load before {load}; {versions}"
    )
    return table


def _range(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.2f} … {pair[1]:.2f}"

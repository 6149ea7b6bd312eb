"""Report of the telemetry benchmark: the cost of each part, and the difference of two runs without it. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import msgspec
from rich.table import Table

from benchmarks.harness.timing import Speeds, by_round

Arm = Literal["off", "control", "scraped", "traced", "all"]
ARMS: tuple[Arm, ...] = get_args(Arm)
BASE: Arm = "off"
SCRAPE_EVERY_S = 1.0
SPANS_A_CALL = 3
"""Of a request: its session is opened, it is asked, tokens are sampled."""
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


@dataclass
class AloneFigures:
    """CPU time of a server, all its threads, a figure a round."""

    span_us: list[float] = field(default_factory=list)
    scrape_ms: list[float] = field(default_factory=list)


class Alone(msgspec.Struct, frozen=True, kw_only=True):
    """Telemetry's own CPU time, seen beside calls that generate nothing, and what share it comes to.

    `span_us`: of recording a span and handing it in; `scrape_ms`: of answering `/metrics`; each the median of its rounds,
    with quartiles. `traced_percent`: of `SPANS_A_CALL` spans in the CPU time of a call; `scraped_percent`: of a scrape
    every `SCRAPE_EVERY_S` in what the server spends in that time under load.
    """

    span_us: float
    span_us_spread: tuple[float, float]
    scrape_ms: float
    scrape_ms_spread: tuple[float, float]
    traced_percent: float
    scraped_percent: float


class TelemetryBench(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. Lists are round by round, by arm."""

    cost_percent: dict[str, Cost]
    alone: Alone
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


def share_alone(figures: AloneFigures, *, cpu_ms_per_call: float, calls_per_s: float) -> Alone:
    """`cpu_ms_per_call`, `calls_per_s`: of a server under load, without telemetry."""
    span_us, scrape_ms = statistics.median(figures.span_us), statistics.median(figures.scrape_ms)
    busy_ms = cpu_ms_per_call * calls_per_s * SCRAPE_EVERY_S
    return Alone(
        span_us=round(span_us, 1),
        span_us_spread=quartiles(figures.span_us),
        scrape_ms=round(scrape_ms, 3),
        scrape_ms_spread=quartiles(figures.scrape_ms),
        traced_percent=round(100.0 * SPANS_A_CALL * span_us / 1e3 / cpu_ms_per_call, 2),
        scraped_percent=round(100.0 * scrape_ms / busy_ms, 2),
    )


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
            f"{cost.throughput:.2f} %",
            _range(cost.throughput_spread),
            f"{cost.cpu:.2f} %",
            _range(cost.cpu_spread),
        )
    for arm, speeds in bench.tokens_per_s.items():
        cpu = statistics.median(bench.cpu_ms_per_call[arm])
        table.add_row(f"tokens/s, {arm}", f"{statistics.median(speeds):.0f}", "", f"{cpu:.2f} ms", "")
    alone = bench.alone
    spans = f"{alone.span_us:.0f} µs a span, {SPANS_A_CALL} a call"
    table.add_row("traces alone, on calls without tokens", "", spans, f"{alone.traced_percent:.2f} %", "")
    scrape = f"{alone.scrape_ms:.2f} ms a scrape"
    table.add_row("/metrics alone", "", scrape, f"{alone.scraped_percent:.2f} %", "")
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

"""Report of the gateway benchmark: medians over rounds, as JSON and as a table. Pure but for the table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec
from rich.table import Table

from benchmarks.gateway.failover import Killed
from benchmarks.harness.timing import Speeds, by_round, medians, percentile


class Prefilled(msgspec.Struct, frozen=True):
    """Prefilled tokens. `computed`: prefilled in all servers; `optimum`: the fewest possible; `asked`: of all prompts."""

    computed: int
    optimum: int
    asked: int

    @property
    def ratio(self) -> float:
        return round(self.computed / self.optimum, 4)


RATIOS = {
    "gateway_vs_engine": ("gateway", "engines"),
    "streamed_vs_engine": ("gateway_streamed", "engines_streamed"),
    "gateway_vs_servers": ("gateway", "servers"),
    "streamed_vs_servers": ("gateway_streamed", "servers_streamed"),
    "servers_vs_engine": ("servers", "engines"),
}
"""Which arm is divided by which, round by round."""
_WORDS = {
    "gateway_vs_engine": "chat completions through the gateway ÷ bare engines, tokens/s",
    "streamed_vs_engine": "the same, streamed ÷ bare engines with a delta a token",
    "gateway_vs_servers": "chat completions through the gateway ÷ sent to the servers themselves",
    "streamed_vs_servers": "the same, streamed",
    "servers_vs_engine": "sent to the servers themselves ÷ bare engines",
    "prefill_vs_optimum": "tokens prefilled for groups ÷ the fewest that would do",
    "ungrouped_vs_optimum": "the same of sessions that do not name their group",
}
_NO_FAILOVER = "failover: no streamed call was in flight at a killed server; ask for more kills"


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked of every arm."""

    engine: str
    servers: int
    parameters: int
    concurrency: int
    """In flight in all arms: at the gateway, or evenly at the servers and engines."""
    requests: int
    max_tokens: int
    """Of an answer, on average."""
    prompt_tokens: tuple[int, int]
    """Shortest and longest prompt of the speed's part."""
    latency_max_tokens: int
    groups: int
    siblings: int
    group_prompt_tokens: tuple[int, int]
    group_max_tokens: int
    kv_policy: dict[str, str]
    """By part. What is timed shares nothing between calls: rounds ask the same again."""
    agents: int
    kills: int
    turn_max_tokens: int
    """Of an answer in the part that kills servers, on average."""


class GatewayBench(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. Ratios are medians over rounds."""

    gateway_vs_engine: float
    added_latency_ms_p50: float
    prefill_vs_optimum: float
    failover_s_p95: float | None
    """None where no streamed call was in flight at any killed server."""
    streamed_vs_engine: float
    gateway_vs_servers: float
    streamed_vs_servers: float
    servers_vs_engine: float
    ungrouped_vs_optimum: float
    prefill_tokens: dict[str, list[Prefilled]]
    """What the two ratios to the optimum were made of."""
    latency_over_server_ms_p50: float
    """Of one request alone, through the gateway less sent to a server itself."""
    latency_ms_p50: dict[str, float]
    """Of one request alone, by way: gateway, server, engine."""
    failover_s: dict[str, float]
    """p50, p95 and max of the figure's calls; `whole_p50` and `whole_p95`: to the end of answers that were not streamed."""
    failover_calls: dict[str, int]
    """Calls at killed servers, streamed and whole; and all answers that agents got in that part, none of them an error."""
    cpu_ms_per_call: dict[str, dict[str, float]]
    """CPU of a call, by arm and by what spent it. `client`: this process, which bare engines hardly need."""
    spread: dict[str, list[float]]
    """Each ratio round by round, added latency by quartiles, failover's p95 kill by kill."""
    tokens_per_s: dict[str, list[float]]
    setting: Setting
    notes: list[str]
    load_before: tuple[float, float, float]
    cores: int
    versions: dict[str, str]


def judge(
    speeds: Speeds,
    latencies: Mapping[str, Sequence[float]],
    prefills: Mapping[str, Sequence[Prefilled]],
    killed: Killed,
    *,
    cpu_ms: Mapping[str, Mapping[str, float]],
    setting: Setting,
    load_before: tuple[float, float, float],
    cores: int,
    versions: Mapping[str, str],
) -> GatewayBench:
    """Put the figures together.

    `latencies`: seconds of single requests, pairwise, of `gateway`, `server` and `engine`. `prefills`: by
    round, of `prefill_vs_optimum` and `ungrouped_vs_optimum`. `cpu_ms`: of a call, by arm and by what spent it.
    """
    by_name = {name: by_round(speeds, *arms) for name, arms in RATIOS.items()} | {
        name: [each.ratio for each in rounds] for name, rounds in prefills.items()
    }
    median = {name: value or 0.0 for name, value in medians(by_name).items()}
    added = _less(latencies["gateway"], latencies["engine"])
    failover = _failover(killed)
    return GatewayBench(
        gateway_vs_engine=median["gateway_vs_engine"],
        added_latency_ms_p50=round(statistics.median(added), 3),
        prefill_vs_optimum=median["prefill_vs_optimum"],
        failover_s_p95=failover.get("p95"),
        streamed_vs_engine=median["streamed_vs_engine"],
        gateway_vs_servers=median["gateway_vs_servers"],
        streamed_vs_servers=median["streamed_vs_servers"],
        servers_vs_engine=median["servers_vs_engine"],
        ungrouped_vs_optimum=median["ungrouped_vs_optimum"],
        prefill_tokens={name: list(rounds) for name, rounds in prefills.items()},
        latency_over_server_ms_p50=round(statistics.median(_less(latencies["gateway"], latencies["server"])), 3),
        latency_ms_p50={way: round(1e3 * statistics.median(seconds), 3) for way, seconds in latencies.items()},
        failover_s=failover,
        failover_calls={
            "streamed": len(killed.streamed_s),
            "whole": len(killed.whole_s),
            "all_answers": killed.answers,
        },
        cpu_ms_per_call={arm: {who: round(ms, 3) for who, ms in spent.items()} for arm, spent in cpu_ms.items()},
        spread={
            **by_name,
            "added_latency_ms_quartiles": [round(value, 3) for value in statistics.quantiles(added, n=4)],
            "failover_s_p95": [round(percentile(kill.streamed, 95), 3) for kill in killed.kills if kill.streamed],
        },
        tokens_per_s={name: [round(value, 1) for value in values] for name, values in speeds.items()},
        setting=setting,
        notes=[] if killed.streamed_s else [_NO_FAILOVER],
        load_before=load_before,
        cores=cores,
        versions=dict(versions),
    )


def _less(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Milliseconds, pair by pair."""
    return [1e3 * (one - other) for one, other in zip(ours, theirs, strict=True)]


def _failover(killed: Killed) -> dict[str, float]:
    streamed, whole = killed.streamed_s, killed.whole_s
    figures = {f"p{percent}": percentile(streamed, percent) for percent in (50, 95) if streamed}
    if streamed:
        figures["max"] = max(streamed)
    figures |= {f"whole_p{percent}": percentile(whole, percent) for percent in (50, 95) if whole}
    return {name: round(value, 3) for name, value in figures.items()}


def as_table(bench: GatewayBench) -> Table:
    """For people."""
    setting = bench.setting
    table = Table(
        title=f"The gateway before {setting.servers} rollout servers, {setting.engine} engine, "
        f"{setting.concurrency} requests at once"
    )
    for column in ("figure", "median", "rounds"):
        table.add_column(column)
    for name, words in _WORDS.items():
        rounds = ", ".join(f"{figure:.3f}" for figure in bench.spread[name])
        table.add_row(words, f"{getattr(bench, name):.3f}", rounds)
    alone, quartiles = bench.latency_ms_p50, bench.spread["added_latency_ms_quartiles"]
    table.add_row(
        f"added latency of a call of {setting.latency_max_tokens} tokens",
        f"{bench.added_latency_ms_p50:.2f} ms",
        ", ".join(f"{way} {figure:.2f}" for way, figure in alone.items())
        + " ms; quartiles "
        + ", ".join(f"{figure:.2f}" for figure in quartiles),
    )
    table.add_row("of which the gateway's own", f"{bench.latency_over_server_ms_p50:.2f} ms", "")
    calls = bench.failover_calls
    table.add_row(
        f"a server killed: until {calls['streamed']} streamed answers went on, p95",
        "not measured" if bench.failover_s_p95 is None else f"{bench.failover_s_p95:.2f} s",
        ", ".join(f"{name.replace('_', ' ')} {figure:.2f}" for name, figure in bench.failover_s.items())
        + f" s; {calls['all_answers']} answers, no error",
    )
    for arm, spent in bench.cpu_ms_per_call.items():
        by_whom = ", ".join(f"{who} {milliseconds:.2f}" for who, milliseconds in spent.items())
        table.add_row(f"CPU a call, {arm}", f"{sum(spent.values()):.2f} ms", by_whom)
    for arm, speeds in bench.tokens_per_s.items():
        table.add_row(f"tokens/s, {arm}", "", ", ".join(f"{figure:.0f}" for figure in speeds))
    load = ", ".join(f"{figure:.2f}" for figure in bench.load_before)
    versions = ", ".join(f"{name} {number}" for name, number in bench.versions.items())
    notes = "".join(f"\n{note}" for note in bench.notes)
    table.caption = f"{setting.parameters:,} parameters; {bench.cores} cores, load before {load}; {versions}{notes}"
    return table

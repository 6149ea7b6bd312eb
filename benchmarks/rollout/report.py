"""Report of the rollout server benchmark: medians over rounds, as JSON and as a table. Pure but for the table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import msgspec
from rich.table import Table

from benchmarks.harness.timing import Speeds, by_round, medians

RATIOS = {
    "server_vs_engine": ("plain", "engine"),
    "streamed_vs_engine": ("streamed", "engine_streamed"),
    "tokens_vs_engine": ("tokens", "engine"),
    "vs_vllm_serve": ("vllm_plain", "vllm_serve"),
    "streamed_vs_vllm_serve": ("vllm_streamed", "vllm_serve_streamed"),
}
"""Which arm is divided by which, round by round."""
_WORDS = {
    "server_vs_engine": "chat completions through the server ÷ bare engine, tokens/s",
    "streamed_vs_engine": "the same, streamed ÷ bare engine with a delta a token",
    "tokens_vs_engine": "the token route in sessions ÷ bare engine",
    "vs_vllm_serve": "chat completions, our server with vLLM ÷ `vllm serve`",
    "streamed_vs_vllm_serve": "the same, streamed",
}


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked of every arm."""

    engine: str
    parameters: int
    concurrency: int
    requests: int
    max_tokens: int
    prompt_tokens: tuple[int, int]
    """Shortest and longest prompt."""
    latency_max_tokens: int
    sessions: int


class RolloutBench(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. Ratios are medians over rounds; None where an arm could not be had (`notes` says why)."""

    server_vs_engine: float
    added_latency_ms_p50: float
    idle_session_bytes: int
    vs_vllm_serve: float | None
    streamed_vs_engine: float
    tokens_vs_engine: float
    streamed_vs_vllm_serve: float | None
    http_cpu_ms_per_call: dict[str, float]
    """CPU of the server's event loop, by way of asking."""
    latency_ms_p50: dict[str, float]
    """Of one request alone, through the server and in the bare engine."""
    spread: dict[str, list[float]]
    """Each ratio round by round, added latency by quartiles, and the growth of each further thousand of sessions."""
    tokens_per_s: dict[str, list[float]]
    setting: Setting
    notes: list[str]
    load_before: tuple[float, float, float]
    cores: int
    versions: dict[str, str]


class Latencies(msgspec.Struct, frozen=True):
    """Seconds of single requests, pairwise."""

    server: list[float]
    engine: list[float]

    def added_ms(self) -> list[float]:
        return [1e3 * (ours - bare) for ours, bare in zip(self.server, self.engine, strict=True)]


def judge(
    speeds: Speeds,
    latencies: Latencies,
    idle_bytes: Sequence[int],
    http_cpu_ms: Mapping[str, float],
    *,
    setting: Setting,
    notes: Sequence[str],
    load_before: tuple[float, float, float],
    cores: int,
    versions: Mapping[str, str],
) -> RolloutBench:
    """Put the figures together. `idle_bytes`: growth a session, of each batch of sessions that was opened."""
    by_name = {name: by_round(speeds, *arms) for name, arms in RATIOS.items()}
    median = medians(by_name)
    added = latencies.added_ms()
    return RolloutBench(
        server_vs_engine=median["server_vs_engine"] or 0.0,
        added_latency_ms_p50=round(statistics.median(added), 3),
        idle_session_bytes=idle_bytes[0],
        vs_vllm_serve=median["vs_vllm_serve"],
        streamed_vs_engine=median["streamed_vs_engine"] or 0.0,
        tokens_vs_engine=median["tokens_vs_engine"] or 0.0,
        streamed_vs_vllm_serve=median["streamed_vs_vllm_serve"],
        http_cpu_ms_per_call={name: round(value, 3) for name, value in http_cpu_ms.items()},
        latency_ms_p50={
            "server": round(1e3 * statistics.median(latencies.server), 3),
            "engine": round(1e3 * statistics.median(latencies.engine), 3),
        },
        spread={
            **{name: values for name, values in by_name.items() if values},
            "added_latency_ms_quartiles": [round(value, 3) for value in statistics.quantiles(added, n=4)],
            "idle_session_bytes": list(idle_bytes),
        },
        tokens_per_s={name: [round(value, 1) for value in values] for name, values in speeds.items()},
        setting=setting,
        notes=list(notes),
        load_before=load_before,
        cores=cores,
        versions=dict(versions),
    )


def as_table(bench: RolloutBench) -> Table:
    """For people."""
    setting = bench.setting
    table = Table(title=f"The rollout server, {setting.engine} engine, {setting.concurrency} requests at once")
    for column in ("figure", "median", "rounds"):
        table.add_column(column)
    for name, words in _WORDS.items():
        value = getattr(bench, name)
        rounds = ", ".join(f"{figure:.3f}" for figure in bench.spread.get(name, []))
        table.add_row(words, "not measured" if value is None else f"{value:.3f}", rounds)
    alone, quartiles = bench.latency_ms_p50, bench.spread["added_latency_ms_quartiles"]
    table.add_row(
        f"added latency of a call of {setting.latency_max_tokens} tokens",
        f"{bench.added_latency_ms_p50:.2f} ms",
        f"server {alone['server']:.2f}, engine {alone['engine']:.2f} ms; quartiles "
        + ", ".join(f"{figure:.2f}" for figure in quartiles),
    )
    table.add_row(
        f"an idle session of {setting.sessions}",
        f"{bench.idle_session_bytes / 1000:.1f} KB",
        ", ".join(f"{figure / 1000:.1f}" for figure in bench.spread["idle_session_bytes"]),
    )
    for way, milliseconds in bench.http_cpu_ms_per_call.items():
        table.add_row(f"event loop's CPU a call, {way}", f"{milliseconds:.2f} ms", "")
    for arm, speeds in bench.tokens_per_s.items():
        table.add_row(f"tokens/s, {arm}", "", ", ".join(f"{figure:.0f}" for figure in speeds))
    load = ", ".join(f"{figure:.2f}" for figure in bench.load_before)
    versions = ", ".join(f"{name} {number}" for name, number in bench.versions.items())
    notes = "".join(f"\n{note}" for note in bench.notes)
    table.caption = f"{setting.parameters:,} parameters; {bench.cores} cores, load before {load}; {versions}{notes}"
    return table

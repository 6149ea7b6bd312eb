"""Report of the weights benchmark: figures from episodes, as JSON and as tables, and the plot of gaps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median

import msgspec
from rich.table import Table

from benchmarks.weights.arms import NOTHING, PAUSED_WAYS, Episode

CROWDED = "crowded"
"""The first of our transports once more, while every other core is busy."""
STALL_BAR_MS = 2.0
OVER_STEP_BAR_MS = 5.0
SHORTER_BAR = 20.0
PACE_BAR = 0.9
WIRE_BAR = 0.9
PUBLISH_BAR = 1.3
TP_READ_BAR = 0.55
LOGPROB_BAR = 1e-5
MEMORY_BARS = {"device": 1.05, "pinned": 0.05}
"""Of the weights, above vLLM alone, by where versions are staged."""


class Exactness(msgspec.Struct, frozen=True, kw_only=True):
    """An engine after so many updates beside a freshly loaded one: greedy tokens and their logprobs."""

    updates: int
    tokens: int
    tokens_equal: bool
    max_logprob_error: float

    @property
    def exact(self) -> bool:
        return self.tokens_equal and self.max_logprob_error <= LOGPROB_BAR


class ArmFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One arm on one engine. Medians, with what was measured update by update beside them; `decode_step_ms` by round."""

    stall_ms: float
    stalls_ms: list[float]
    own_gap_ms: float
    """As the stall, but of the one gap in which the update ended: for a commit, the cost of the flip."""
    own_gaps_ms: list[float]
    still_ms: float
    """From the pause to the end of the resume, or of the commit's call: how long nothing may have been sampled."""
    update_ms: float
    """From the first byte that moves until the new version is served."""
    tokens_lost: float
    tokens_lost_each: list[float]
    decode_step_ms: float
    decode_steps_ms: list[float]
    pace_while_staging: float | None
    paces: list[float]


class EngineFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. `stall_ms`: the worse of our transports; `times_shorter`: the shortest paused arm's stall ÷ it."""

    stall_ms: float
    longest_stall_ms: float
    """The longest single stall of any commit of ours, over either transport."""
    decode_step_ms: float
    nothing_stall_ms: float
    """The same figure without an update: the machine's noise."""
    paused_arms_stall_ms: dict[str, float]
    times_shorter: float
    tokens_lost: dict[str, float]
    decode_while_staging: float
    decode_while_staging_crowded: float | None
    exact: Exactness | None
    others_cores: float
    """Cores that other processes, and the host of a virtual machine, kept busy meanwhile."""
    arms: dict[str, ArmFigures]


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked of every arm."""

    weight_bytes: int
    hidden_size: int
    layers: int
    streams: int
    prompt_tokens: int
    rounds: int
    updates_per_round: int
    quiet_s: float


class WeightsBench(msgspec.Struct, frozen=True, kw_only=True):
    """What `--json` prints. At the top the worst engine's figures; None: not measured (`notes` say why)."""

    stall_ms: float
    longest_stall_ms: float
    decode_step_ms: float
    paused_arms_stall_ms: dict[str, float]
    nixl_vs_readv: float | None
    shm_vs_memcpy: float | None
    publish_vs_memcpy: float
    publish_apart_vs_memcpy: float
    """The same of weights that lie wherever the allocator put them; our trainer's are contiguous."""
    tp_read_share: float | None
    """Of a version's bytes those that the one of two tensor parallel ranks reads which reads more."""
    tp_delta_read_share: float | None
    """The same of a delta's."""
    decode_while_staging: float
    exact: bool | None
    times_shorter: float
    nothing_stall_ms: float
    engines: dict[str, EngineFigures]
    plain_serve: Exactness | None
    """Of a plain `vllm serve` with the plug-in; None where it was not checked."""
    shadow_peak: dict[str, float]
    """Memory of a vLLM engine above that of vLLM alone ÷ bytes of the weights, by where versions are staged, what lies in
    the host's memory beside a device not counted; `packed`: with the packed copies that there are on a CPU by default."""
    spread: dict[str, list[float]]
    """Round by round: what `publish` and the wire come to of a copy of the same bytes."""
    setting: Setting
    bars: dict[str, bool]
    """Which of the promised figures were reached."""
    notes: list[str]
    load_before: tuple[float, float, float]
    cores: int
    machine: str
    versions: dict[str, str]


def judge_arm(episodes: Sequence[Episode]) -> ArmFigures:
    """One arm's rounds."""
    seen = [(episode, update) for episode in episodes for update in episode.updates]
    stalls = [episode.stall_ms(update) for episode, update in seen]
    own = [episode.own_gap_ms(update) for episode, update in seen]
    lost = [episode.tokens_lost(update) for episode, update in seen]
    paces = [episode.pace(update) for episode, update in seen if update.staging is not None]
    steps = [episode.usual_s * 1e3 for episode in episodes]
    return ArmFigures(
        stall_ms=_ms(median(stalls)),
        stalls_ms=[_ms(stall) for stall in stalls],
        own_gap_ms=_ms(median(own)),
        own_gaps_ms=[_ms(gap) for gap in own],
        still_ms=_ms(median(update.still.seconds * 1e3 for _, update in seen)),
        update_ms=_ms(median(update.whole.seconds * 1e3 for _, update in seen)),
        tokens_lost=round(median(lost), 2),
        tokens_lost_each=[round(tokens, 2) for tokens in lost],
        decode_step_ms=_ms(median(steps)),
        decode_steps_ms=[_ms(step) for step in steps],
        pace_while_staging=round(median(paces), 3) if paces else None,
        paces=[round(pace, 3) for pace in paces],
    )


def judge_engine(
    episodes: Mapping[str, Sequence[Episode]], exact: Exactness | None, *, others_cores: float
) -> EngineFigures:
    """All arms of one engine, by name."""
    arms = {name: judge_arm(rounds) for name, rounds in episodes.items()}
    ours = [arm for name, arm in arms.items() if name not in (*PAUSED_WAYS, NOTHING, CROWDED)]
    paused: dict[str, float] = {way: arms[way].stall_ms for way in PAUSED_WAYS}
    stall = max(arm.stall_ms for arm in ours)
    return EngineFigures(
        stall_ms=stall,
        longest_stall_ms=max(max(arm.stalls_ms) for arm in ours),
        decode_step_ms=_ms(fmean(arm.decode_step_ms for arm in ours)),
        nothing_stall_ms=arms[NOTHING].stall_ms,
        paused_arms_stall_ms=paused,
        times_shorter=_times(min(paused.values()), stall),
        tokens_lost={name: arm.tokens_lost for name, arm in arms.items()},
        decode_while_staging=min(arm.pace_while_staging or 0.0 for arm in ours),
        decode_while_staging_crowded=arms[CROWDED].pace_while_staging if CROWDED in arms else None,
        exact=exact,
        others_cores=round(others_cores, 3),
        arms=arms,
    )


def judge(
    engines: Mapping[str, EngineFigures],
    ratios: Mapping[str, Sequence[float]],
    plain_serve: Exactness | None,
    shadow_peak: Mapping[str, float],
    *,
    setting: Setting,
    notes: Sequence[str],
    load_before: tuple[float, float, float],
    cores: int,
    machine: str,
    versions: Mapping[str, str],
) -> WeightsBench:
    """Put the figures together. `ratios`: what publishing and the wire come to, by name and round."""
    each = list(engines.values())
    checked = [found for found in (*(engine.exact for engine in each), plain_serve) if found is not None]
    exact = all(found.exact for found in checked) if checked else None
    nixl, shm = (_median_of(ratios.get(name, ())) for name in ("nixl_vs_readv", "shm_vs_memcpy"))
    reads = {name: _median_of(ratios.get(name, ())) for name in ("tp_read_share", "tp_delta_read_share")}
    stall, shorter = max(e.stall_ms for e in each), min(e.times_shorter for e in each)
    published, apart = (round(median(ratios[name]), 3) for name in ("publish_vs_memcpy", "publish_apart_vs_memcpy"))
    pace = min(e.decode_while_staging for e in each)
    bars = {
        f"stall ≤ {STALL_BAR_MS:g} ms": stall <= STALL_BAR_MS,
        f"no stall over a step + {OVER_STEP_BAR_MS:g} ms": all(
            e.longest_stall_ms <= e.decode_step_ms + OVER_STEP_BAR_MS for e in each
        ),
        f"{SHORTER_BAR:g} times shorter than every paused arm": shorter >= SHORTER_BAR,
        f"publish ≤ {PUBLISH_BAR:g} memcpy": published <= PUBLISH_BAR,
        f"pace while staging ≥ {PACE_BAR:g}": pace >= PACE_BAR,
    }
    bars |= {f"{name} ≥ {WIRE_BAR:g}": v >= WIRE_BAR for name, v in (("nixl", nixl), ("shm", shm)) if v is not None}
    bars |= {
        f"shadow_peak, {place} ≤ {bar:g}": shadow_peak[place] <= bar
        for place, bar in MEMORY_BARS.items()
        if place in shadow_peak
    }
    bars |= {f"{name} ≤ {TP_READ_BAR:g}": v <= TP_READ_BAR for name, v in reads.items() if v is not None}
    bars |= {} if exact is None else {"exact": exact}
    return WeightsBench(
        stall_ms=stall,
        longest_stall_ms=max(e.longest_stall_ms for e in each),
        decode_step_ms=max(e.decode_step_ms for e in each),
        paused_arms_stall_ms={way: min(e.paused_arms_stall_ms[way] for e in each) for way in PAUSED_WAYS},
        nixl_vs_readv=nixl,
        shm_vs_memcpy=shm,
        publish_vs_memcpy=published,
        publish_apart_vs_memcpy=apart,
        tp_read_share=reads["tp_read_share"],
        tp_delta_read_share=reads["tp_delta_read_share"],
        decode_while_staging=pace,
        exact=exact,
        times_shorter=shorter,
        nothing_stall_ms=max(e.nothing_stall_ms for e in each),
        engines=dict(engines),
        plain_serve=plain_serve,
        shadow_peak=dict(shadow_peak),
        spread={name: [round(value, 3) for value in values] for name, values in ratios.items()},
        setting=setting,
        bars=bars,
        notes=list(notes),
        load_before=load_before,
        cores=cores,
        machine=machine,
        versions=dict(versions),
    )


def _ms(value: float) -> float:
    return round(value, 3)


def _times(theirs: float, ours: float) -> float:
    """How many times shorter ours is. A stall below a hundredth of a millisecond is not told from none."""
    return round(theirs / max(ours, 0.01), 1)


def _median_of(values: Sequence[float]) -> float | None:
    return round(median(values), 3) if values else None


def as_tables(bench: WeightsBench) -> Iterator[Table]:
    """A table for each engine, then a summary."""
    for name, engine in bench.engines.items():
        yield _engine_table(name, engine, bench)
    yield _summary(bench)


def _engine_table(name: str, engine: EngineFigures, bench: WeightsBench) -> Table:
    setting = bench.setting
    table = Table(
        title=f"Weight updates of the {name} engine: {setting.weight_bytes / 1e6:.0f} MB, {setting.streams} streams"
    )
    for column in (
        "arm",
        "stall ms",
        "least … most",
        "own gap ms",
        "step ms",
        "update ms",
        "tokens lost",
        "pace while staging",
    ):
        table.add_column(column, justify="left" if column == "arm" else "right")
    for arm, figures in engine.arms.items():
        table.add_row(arm, *_cells(figures))
    table.caption = f"{_exactness(engine.exact)}; others kept {engine.others_cores:.2f} cores busy"
    return table


def _exactness(exact: Exactness | None) -> str:
    if exact is None:
        return "exactness: not measured"
    same = "the same" if exact.tokens_equal else "OTHER"
    return (
        f"after {exact.updates} updates {same} {exact.tokens} greedy tokens as when freshly loaded, "
        f"logprobs within {exact.max_logprob_error:.1e}"
    )


def _cells(arm: ArmFigures) -> list[str]:
    pace = "" if arm.pace_while_staging is None else f"{arm.pace_while_staging:.2f}"
    return [
        f"{arm.stall_ms:.2f}",
        f"{min(arm.stalls_ms):.1f} … {max(arm.stalls_ms):.1f}",
        f"{arm.own_gap_ms:.2f}",
        f"{arm.decode_step_ms:.1f}",
        f"{arm.update_ms:.0f}",
        f"{arm.tokens_lost:.1f}",
        pace,
    ]


def _summary(bench: WeightsBench) -> Table:
    table = Table(title="The weight bus, worst of the engines")
    for column in ("figure", "median", "rounds"):
        table.add_column(column)
    table.add_row(
        "stall of a commit", f"{bench.stall_ms:.2f} ms", f"{bench.nothing_stall_ms:.2f} ms where nothing happens"
    )
    table.add_row(
        "longest stall of any commit", f"{bench.longest_stall_ms:.2f} ms", f"a step: {bench.decode_step_ms:.2f} ms"
    )
    table.add_row("shorter than the shortest paused arm", f"{bench.times_shorter:.1f} times", "")
    table.add_row("decode speed while staging", f"{bench.decode_while_staging:.2f}", "")
    of_bytes = ("tp_read_share", "tp_delta_read_share")
    for name in ("publish_vs_memcpy", "publish_apart_vs_memcpy", "nixl_vs_readv", "shm_vs_memcpy", *of_bytes):
        value = getattr(bench, name)
        rounds = ", ".join(f"{figure:.2f}" for figure in bench.spread.get(name, []))
        table.add_row(name, "not measured" if value is None else f"{value:.2f}", rounds)
    if bench.plain_serve is not None:
        table.add_row(
            "plain vllm serve", "exact" if bench.plain_serve.exact else "NOT exact", _exactness(bench.plain_serve)
        )
    for place, share in bench.shadow_peak.items():
        table.add_row(f"shadow_peak, {place}", f"{share:.2f} of the weights", "")
    for bar, reached in bench.bars.items():
        table.add_row(bar, "yes" if reached else "NO", "")
    load = ", ".join(f"{figure:.2f}" for figure in bench.load_before)
    versions = ", ".join(f"{name} {number}" for name, number in bench.versions.items())
    notes = "".join(f"\n{note}" for note in bench.notes)
    table.caption = f"{bench.setting.rounds} rounds; {bench.cores} cores, load before {load}; {versions}{notes}"
    return table


_REACH_S = 0.7


def plot_gaps(engines: Mapping[str, Mapping[str, Sequence[Episode]]], path: Path) -> None:
    """weights-stall.png: token gaps around an update, a panel for each engine and arm. Imports matplotlib (a second)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    rows = len(engines)
    columns = max(len(arms) for arms in engines.values())
    figure, axes = pyplot.subplots(
        rows,
        columns,
        figsize=(2.2 * columns, 2.6 * rows),
        sharex=True,
        sharey="row",
        squeeze=False,
        layout="constrained",
    )
    for row, (engine, arms) in zip(axes, engines.items(), strict=True):
        for panel, (arm, episodes) in zip(row, arms.items(), strict=False):
            for episode in episodes:
                for update in episode.updates:
                    gaps = episode.gaps_around(update, _REACH_S)
                    panel.plot(*zip(*gaps, strict=True), ".", markersize=3, alpha=0.4, color="tab:blue")
            panel.axvline(0.0, color="tab:red", linewidth=0.8)
            panel.set_title(f"{engine}: {arm}", fontsize=9)
            panel.set_yscale("log")
            panel.yaxis.set_major_formatter(ticker.ScalarFormatter())
            panel.yaxis.set_minor_formatter(ticker.NullFormatter())
            panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    figure.supxlabel("seconds from the commit, or the middle of the pause")
    figure.supylabel("gap between tokens, ms")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)

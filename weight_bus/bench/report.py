"""What the benchmark of the weight bus says: figures out of episodes, as JSON and as a table. Pure but for the table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

import msgspec

from weight_bus.bench.arms import NOTHING
from weight_bus.bench.gaps import Episode
from weight_bus.bench.messages import PAUSED_WAYS

CROWDED = "crowded"
"""The first of our transports once more, while every other core is busy with something else."""
STALL_BAR_MS = 2.0
OVER_STEP_BAR_MS = 5.0
SHORTER_BAR = 20.0
PACE_BAR = 0.9
WIRE_BAR = 0.9
PUBLISH_BAR = 1.3
LOGPROB_BAR = 1e-5


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
    """As the stall, but of that one gap alone in which the update was over: of a commit it says what the flip costs."""
    own_gaps_ms: list[float]
    still_ms: float
    """From the pause to the end of the resume, or of the commit's call: how long nothing may have been drawn."""
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
    """The same figure at moments at which nothing happens: how much of a stall is the machine's own unrest."""
    paused_arms_stall_ms: dict[str, float]
    times_shorter: float
    tokens_lost: dict[str, float]
    decode_while_staging: float
    decode_while_staging_crowded: float | None
    exact: Exactness | None
    others_cores: float
    """Cores that processes which are none of the benchmark's, and the host of a virtual machine, kept busy meanwhile."""
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
    """What `--json` prints. Of several engines the worse figure stands at the top; None: not measured (`notes` say why)."""

    stall_ms: float
    longest_stall_ms: float
    decode_step_ms: float
    paused_arms_stall_ms: dict[str, float]
    nixl_vs_readv: float | None
    shm_vs_memcpy: float | None
    publish_vs_memcpy: float
    publish_apart_vs_memcpy: float
    """The same of weights that lie wherever the allocator put them; our trainer's lie in one piece."""
    decode_while_staging: float
    exact: bool | None
    times_shorter: float
    nothing_stall_ms: float
    engines: dict[str, EngineFigures]
    plain_serve: Exactness | None
    """Of a plain `vllm serve` with the plug-in; None where it was not checked."""
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
        decode_while_staging=pace,
        exact=exact,
        times_shorter=shorter,
        nothing_stall_ms=max(e.nothing_stall_ms for e in each),
        engines=dict(engines),
        plain_serve=plain_serve,
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

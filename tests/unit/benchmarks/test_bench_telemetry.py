"""`./dev bench telemetry`: costs are of one arm beside the one without, in the same round; and nothing stays behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.telemetry.report import ARMS, AloneFigures, costs, quartiles, share_alone


def test_a_cost_is_the_median_of_what_each_round_took() -> None:
    speeds = {"off": [100.0, 200.0, 400.0], "traced": [99.0, 190.0, 400.0]}
    cpu_ms = {"off": [10.0, 20.0, 10.0], "traced": [10.2, 20.0, 10.1]}
    cost = costs(speeds, cpu_ms)["traced"]
    assert (cost.throughput, cost.throughput_spread) == (1.0, (0.5, 3.0))
    assert (cost.cpu, cost.cpu_spread) == (1.0, (0.5, 1.5))


def test_what_is_seen_alone_is_reckoned_as_a_share_of_a_busy_servers_time() -> None:
    figures = AloneFigures(span_us=[90.0, 100.0, 120.0], scrape_ms=[2.0, 5.0, 6.0])
    # A call takes 60 ms of a core, 20 calls a second: 1.2 cores are busy.
    alone = share_alone(figures, cpu_ms_per_call=60.0, calls_per_s=20.0)
    assert (alone.span_us, alone.span_us_spread) == (100.0, (95.0, 110.0))
    assert alone.traced_percent == pytest.approx(0.5)
    assert alone.scraped_percent == pytest.approx(100 * 5 / 1200, abs=0.01)


def test_one_round_has_no_spread() -> None:
    assert quartiles([1.234]) == (1.23, 1.23)


@pytest.mark.slow
@pytest.mark.e2e
def test_a_small_benchmark_says_what_traces_cost_and_leaves_no_process(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    sizes = {
        "servers": 1,
        "rounds": 2,
        # CPU time is told in ticks of 10 ms: of few requests a server may be said to have used none.
        "requests": 16,
        "concurrency": 4,
        "max-tokens": 4,
        "hidden-size": 32,
        "layers": 1,
        # Likewise.
        "alone": 80,
    }
    options = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "benchmarks", "telemetry", "--json", *options],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout)
    assert figures["cost_percent"].keys() == {"control", "scraped", "traced", "all"}
    assert {arm: len(rounds) for arm, rounds in figures["tokens_per_s"].items()} == dict.fromkeys(ARMS, 2)
    assert all(min(rounds) > 0.0 for rounds in figures["cpu_ms_per_call"].values())
    assert figures["alone"]["scrape_ms"] > 0.0
    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in commands if str(tmp_path) in line]
    assert not list(tmp_path.glob("rollmesh-*"))

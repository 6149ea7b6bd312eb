"""`./dev bench loop`: the whole loop beside what a user would pick instead, TRL's GRPOTrainer, in one run.

Each round runs the mesh (`rollmesh up`, a run like any other) and then TRL on the model folder that the mesh started from:
same task, problems, batch, steps and learning rate, both on all cores, one after the other. Rounds interleave the arms, so
that a drift of the machine's speed touches both; medians and spread are over rounds.

Time counts from an arm's first generation, when both trainers have done their imports: every round of ours makes its own
warm start, for the trainer does them meanwhile. With one from the user's cache it would still be importing.

`time_to_0.9_vs_trl`: seconds from the first generation to 0.9 success (trailing mean of three batches), ours ÷ TRL's.
`steps_per_s_vs_trl`: optimizer steps a second, ours ÷ TRL's.
`overhead_ms_per_step`: what the mesh itself costs a step: `publish` (training thread blocked), `stream` (reading, decoding
and settling entries), `http` (CPU of the servers' event loops), `commit` (engines standing still between two steps).
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from benchmarks.harness.command import progress, show
from services.supervisor.summary import Summary
from services.wire.errors import RollmeshError, UsageError
from trainer.metrics.files import read_metrics

app = typer.Typer(add_completion=False, rich_markup_mode=None)

ARM_DEADLINE_S = 600.0
TRL_PYTHON = Path(".venv-trl/bin/python")
GROUPS, GROUP_SIZE, MAX_TOKENS = 16, 8, 24


class Overhead(msgspec.Struct, frozen=True):
    publish: float
    stream: float
    http: float
    commit: float


class Arm(msgspec.Struct, frozen=True, kw_only=True):
    """One arm of one round. Times in seconds."""

    time_to_bar_s: float | None
    steps_per_s: float
    final_success: float


class LoopBench(msgspec.Struct, frozen=True, kw_only=True, rename={"time_to_09_vs_trl": "time_to_0.9_vs_trl"}):
    """What `--json` prints. Ratios are medians over rounds; `None` where an arm never reached 0.9."""

    time_to_09_vs_trl: float | None
    steps_per_s_vs_trl: float
    overhead_ms_per_step: Overhead
    spread: dict[str, list[float]]
    """`time_to_0.9_vs_trl` and `steps_per_s_vs_trl` of each round."""
    ours: list[Arm]
    trl: list[Arm]
    load_before: tuple[float, float, float]
    cores: int
    versions: dict[str, str]


class _TrlLine(msgspec.Struct, frozen=True):
    step: int
    time: float
    success: float | None = None


@app.command(epilog="Example: ./dev bench loop --rounds 3 --json")
def loop(
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each arm, interleaved")] = 3,
    steps: Annotated[int, typer.Option(min=5, help="Optimizer steps a run")] = 60,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first round; the next ones count up")] = 1,
    engine: Annotated[str, typer.Option(help="torch or vllm")] = "torch",
    trl_python: Annotated[Path, typer.Option(help="Python of the environment that holds TRL")] = TRL_PYTHON,
    as_json: Annotated[bool, typer.Option("--json", help="JSON on standard output instead of a table")] = False,
) -> None:
    """The whole loop beside TRL's GRPOTrainer: same model, task, batch and steps."""
    if not trl_python.exists():
        raise UsageError(f"no Python at {trl_python}", "run `./dev bench loop`, which makes the environment with TRL")
    say = progress()
    load = os.getloadavg()
    ours: list[Arm] = []
    trl: list[Arm] = []
    overheads: list[Overhead] = []
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as scratch:
        for index in range(rounds):
            folder = Path(scratch) / f"round-{index}"
            arm, overhead = _run_mesh(folder, seed + index, steps, engine)
            say(f"round {index + 1}: mesh {_words(arm)}")
            ours.append(arm)
            overheads.append(overhead)
            trl.append(_run_trl(folder, seed + index, steps, trl_python))
            say(f"round {index + 1}: TRL  {_words(trl[-1])}")
    bench = _judge(ours, trl, overheads, load, trl_python)
    show(bench, as_json, _table(bench))


def _run_mesh(folder: Path, seed: int, steps: int, engine: str) -> tuple[Arm, Overhead]:
    command = [sys.executable, "-P", "-m", "services", "up", "--plain", "--engine", engine]
    command += ["--seed", str(seed), "--steps", str(steps), "--run-dir", str(folder)]
    command += [f"rollout.groups_per_step={GROUPS}", f"rollout.group_size={GROUP_SIZE}"]
    command += [f"warm_start.cache_dir={folder}-warm-start"]
    _run("the mesh", [*command, f"rollout.max_tokens={MAX_TOKENS}"])
    lines = read_metrics(folder / "metrics.jsonl")
    summary = msgspec.json.decode((folder / "summary.json").read_bytes(), type=Summary)
    overhead = Overhead(
        publish=statistics.median(line.publish_ms for line in lines),
        stream=statistics.median(line.stream_ms for line in lines),
        http=summary.http_ms_per_step,
        commit=statistics.median(line.flip_ms for line in lines),
    )
    return _arm(lines[0].first_opened_at, [StepMark(line.time, line.success) for line in lines]), overhead


def _run_trl(folder: Path, seed: int, steps: int, python: Path) -> Arm:
    problems = folder / "trl-problems"
    command = [sys.executable, "-P", "-m", "services", "demonstrations", "--task", "running-sums", "--seed", str(seed)]
    _run("the problems", [*command, "--out", str(problems), "--problems", str(steps * GROUPS)])
    out = folder / "trl.jsonl"
    # The arm is run as a file: its environment need not hold rollmesh.
    arm = Path(__file__).parents[1] / "trainer" / "trl_arms.py"
    shape = ["--steps", str(steps), "--groups", str(GROUPS), "--group-size", str(GROUP_SIZE)]
    shape += ["--max-tokens", str(MAX_TOKENS), "--seed", str(seed), "--threads", str(os.cpu_count() or 1)]
    files = ["--model", str(folder / "model"), "--problems", str(problems / "problems.jsonl"), "--out", str(out)]
    _run("TRL", [str(python), str(arm), "train", *files, *shape])
    lines = [msgspec.json.decode(line, type=_TrlLine) for line in out.read_bytes().splitlines()]
    marks = [StepMark(line.time, line.success) for line in lines if line.success is not None and line.step]
    return _arm(lines[0].time, marks)


def _arm(started: float, marks: list[StepMark]) -> Arm:
    timing: LoopTiming = time_loop(started, marks)
    last = [mark.success for mark in marks[-3:]]
    return Arm(time_to_bar_s=timing.time_to_bar_s, steps_per_s=timing.steps_per_s, final_success=sum(last) / len(last))


def _run(what: str, command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ARM_DEADLINE_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise RollmeshError(f"{what} took longer than {ARM_DEADLINE_S:.0f} s", "look at the machine's load") from error
    if done.returncode != 0:
        raise RollmeshError(
            f"{what} ended with exit code {done.returncode}", done.stderr[-2000:] or done.stdout[-2000:]
        )


def _judge(
    ours: list[Arm], trl: list[Arm], overheads: list[Overhead], load: tuple[float, float, float], trl_python: Path
) -> LoopBench:
    pairs = list(zip(ours, trl, strict=True))
    times = [a.time_to_bar_s / b.time_to_bar_s for a, b in pairs if a.time_to_bar_s and b.time_to_bar_s]
    speeds = [a.steps_per_s / b.steps_per_s for a, b in pairs]
    return LoopBench(
        time_to_09_vs_trl=round(statistics.median(times), 3) if len(times) == len(pairs) else None,
        steps_per_s_vs_trl=round(statistics.median(speeds), 3),
        overhead_ms_per_step=Overhead(
            **{
                name: round(statistics.median(getattr(overhead, name) for overhead in overheads), 3)
                for name in Overhead.__struct_fields__
            }
        ),
        spread={
            "time_to_0.9_vs_trl": [round(value, 3) for value in times],
            "steps_per_s_vs_trl": [round(value, 3) for value in speeds],
        },
        ours=ours,
        trl=trl,
        load_before=load,
        cores=os.cpu_count() or 1,
        versions={name: version(name) for name in ("rollmesh", "torch", "transformers")} | _trl_version(trl_python),
    )


def _trl_version(python: Path) -> dict[str, str]:
    program = "from importlib.metadata import version; print(version('trl'))"
    return {
        "trl": subprocess.run([str(python), "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    }


def _words(arm: Arm) -> str:
    reached = "never reached 0.9" if arm.time_to_bar_s is None else f"0.9 after {arm.time_to_bar_s:.2f} s"
    return f"{reached}, {arm.steps_per_s:.2f} steps/s, final success {arm.final_success:.2f}"


def _table(bench: LoopBench) -> Table:
    table = Table(title="The whole loop, ours ÷ TRL's GRPOTrainer")
    for column in ("figure", "median", "rounds"):
        table.add_column(column)
    for name, value in (
        ("time_to_0.9_vs_trl", bench.time_to_09_vs_trl),
        ("steps_per_s_vs_trl", bench.steps_per_s_vs_trl),
    ):
        table.add_row(name, str(value), ", ".join(str(figure) for figure in bench.spread[name]))
    for name in Overhead.__struct_fields__:
        table.add_row(f"overhead: {name}", f"{getattr(bench.overhead_ms_per_step, name)} ms a step", "")
    for label, arms in (("mesh", bench.ours), ("TRL", bench.trl)):
        for index, arm in enumerate(arms):
            table.add_row(f"{label}, round {index + 1}", _words(arm), "")
    load = ", ".join(f"{figure:.2f}" for figure in bench.load_before)
    table.caption = f"{bench.cores} cores, load before {load}; " + ", ".join(
        f"{name} {number}" for name, number in bench.versions.items()
    )
    return table


WINDOW = 3
BAR = 0.9


@dataclass(frozen=True)
class StepMark:
    """An optimizer step: when it ended (Unix seconds) and the success of the batch it consumed."""

    time: float
    success: float


@dataclass(frozen=True)
class LoopTiming:
    time_to_bar_s: float | None
    """Seconds from the start to the first step whose trailing mean success is ≥ BAR; None if never."""
    steps_per_s: float


def time_loop(started: float, steps: Sequence[StepMark]) -> LoopTiming:
    """Time one arm from the moment the generation of its first group begins, both arms alike.

    Success is the mean over a trailing window of batches, so that one lucky batch decides nothing. Raises
    ValueError for an arm that made no step.
    """
    if not steps:
        raise ValueError("an arm that made no step cannot be timed")
    reached = None
    for index in range(WINDOW - 1, len(steps)):
        if sum(step.success for step in steps[index - WINDOW + 1 : index + 1]) / WINDOW >= BAR:
            reached = steps[index].time - started
            break
    return LoopTiming(time_to_bar_s=reached, steps_per_s=len(steps) / (steps[-1].time - started))

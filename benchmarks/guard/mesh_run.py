"""One run of a whole mesh, and what it took: CPU seconds and memory by service, seen from outside.

    start ──► first group opened ──► step WARM ──────────────► last step ──► end
    └─── CPU of the start, memory ┘            └─ CPU a step ─┘

Nothing of the checkout's own modules is called but its commands, so any commit can be measured. The policy is the same in
every run and does not learn, so that every run has the same work to do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from benchmarks.harness.processes import running
from benchmarks.harness.revision import Checkout
from services.supervisor.processes import Child
from services.wire.errors import RollmeshError

GROUPS, GROUP_SIZE, MAX_TOKENS = 16, 8, 24
WARM = 10
"""Steps before those that are measured: caches fill, connections are made."""
_SAMPLE_S = 0.1
LEAST_START_S = 0.1
"""CPU time is told in hundredths of a second: starts that take less are not compared."""
_WITHIN_S = 300.0
SERVICES = {
    "weight-bus": "bus",
    "rollout-server": "rollout server",
    "gateway": "gateway",
    "train": "trainer",
    "run-environment": "runner",
}
"""What a service is started as, and what it is called here."""
ENGINE_PROCESS = "rollout_server.engines.torch.process.worker"
"""The module that a rollout server starts for its engine: a part of that service."""
EVENT_LOOP = "event loop"
"""Of rollout servers: the first thread of their first process, and a part of that service."""
_NO_LEARNING = 1e-30


@dataclass(frozen=True)
class Moment:
    """`at`: Unix seconds. CPU seconds so far, by service and of the event loop; resident bytes by service."""

    at: float
    cpu_s: dict[str, float]
    memory: dict[str, int]


# Only what is read here of `StepMetrics`: another commit's may lack the rest.
class _Step(msgspec.Struct, frozen=True):
    step: int
    time: float
    first_opened_at: float
    tokens: int
    stream_ms: float


async def run_mesh(arm: Checkout, folder: Path, *, model: Path | None, steps: int, seed: int) -> dict[str, float]:
    """The figures of one run. `model`: None makes one, as a first run does. Raises RollmeshError for a run that fails."""
    settings = [
        f"rollout.groups_per_step={GROUPS}",
        f"rollout.group_size={GROUP_SIZE}",
        f"rollout.max_tokens={MAX_TOKENS}",
    ]
    if model is not None:
        settings += [f"model.path={model}", f"trainer.learning_rate={_NO_LEARNING}", "gateway.enabled=always"]
    flags = ["--plain", "--engine", "torch", "--steps", str(steps), "--seed", str(seed), "--run-dir", str(folder)]
    command = arm.command("services", "up", *flags, *settings)
    moments: list[Moment] = []
    async with running(f"mesh {arm.name} {folder.name}", command, folder.parent, environment=arm.environ) as child:
        async with asyncio.timeout(_WITHIN_S):
            while child.running:
                moments.append(look(child))
                await asyncio.sleep(_SAMPLE_S)
        if child.process.returncode != 0:
            raise RollmeshError(f"the mesh of {arm.name} ended with {child.process.returncode}", child.tail())
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    made = [msgspec.json.decode(line, type=_Step) for line in lines]
    return figures_of(moments, made)


def look(child: Child) -> Moment:
    """What the mesh's services have taken so far."""
    cpu_s: dict[str, float] = {}
    memory: dict[str, int] = {}
    try:
        started = psutil.Process(child.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        started = []
    for process in started:
        try:
            with process.oneshot():
                command, times, held = process.cmdline(), process.cpu_times(), process.memory_info().rss
            name = name_of(command)
            if name == SERVICES["rollout-server"] and ENGINE_PROCESS not in command:
                loop_s = sum(each.user_time + each.system_time for each in process.threads() if each.id == process.pid)
                cpu_s[EVENT_LOOP] = cpu_s.get(EVENT_LOOP, 0.0) + loop_s
        except psutil.NoSuchProcess:
            continue
        if name is not None:
            cpu_s[name] = cpu_s.get(name, 0.0) + times.user + times.system
            memory[name] = memory.get(name, 0) + held
    return Moment(time.time(), cpu_s, memory)


def name_of(command: Sequence[str]) -> str | None:
    """Which service a command line starts; None for anything else, such as the warm start's jobs."""
    if command and Path(command[0]).name.startswith(("valkey", "redis")):
        return "redis"
    if ENGINE_PROCESS in command:
        return SERVICES["rollout-server"]
    places = [place for place, word in enumerate(command) if word == "services"]
    after = command[places[0] + 1] if places and places[0] + 1 < len(command) else ""
    return SERVICES.get(after)


def figures_of(moments: Sequence[Moment], steps: Sequence[_Step]) -> dict[str, float]:
    """CPU milliseconds a step and at the start (`cpu_ms_per_step.…`, `start_cpu_s.…`), idle memory (`idle_mib.…`).

    Raises RollmeshError where there are too few steps to tell.
    """
    if len(steps) <= WARM + 1:
        raise RollmeshError(f"a run of {len(steps)} steps says nothing", f"measure more than {WARM + 1}")
    began, ended, count = steps[WARM - 1].time, steps[-1].time, len(steps) - WARM
    idle = max((moment for moment in moments if moment.at <= steps[0].first_opened_at), key=lambda each: each.at)
    figures: dict[str, float] = {}

    def step_ms_of(name: str) -> float:
        return 1e3 * (cpu_at(moments, name, ended) - cpu_at(moments, name, began)) / count

    for name in sorted(idle.memory):
        figures[f"cpu_ms_per_step.{name}"] = step_ms_of(name)
        if idle.cpu_s[name] >= LEAST_START_S:
            figures[f"start_cpu_s.{name}"] = idle.cpu_s[name]
        figures[f"idle_mib.{name}"] = idle.memory[name] / (1 << 20)
    measured = steps[WARM:]
    figures["http_cpu_ms_per_trajectory"] = step_ms_of(EVENT_LOOP) / (GROUPS * GROUP_SIZE)
    figures["stream_ms_per_trajectory"] = sum(each.stream_ms for each in measured) / (count * GROUPS * GROUP_SIZE)
    trained = sum(each.tokens for each in measured)
    figures["trainer_cpu_us_per_token"] = 1e3 * figures["cpu_ms_per_step.trainer"] * count / max(1, trained)
    figures["step_ms"] = 1e3 * (ended - began) / count
    return figures


def cpu_at(moments: Sequence[Moment], name: str, at: float) -> float:
    """CPU seconds of a service at a time between two looks, as if it had worked evenly between them."""
    known = [(moment.at, moment.cpu_s[name]) for moment in moments if name in moment.cpu_s]
    before = max((each for each in known if each[0] <= at), default=known[0])
    after = min((each for each in known if each[0] >= at), default=known[-1])
    if after[0] <= before[0]:
        return before[1]
    return before[1] + (after[1] - before[1]) * (at - before[0]) / (after[0] - before[0])

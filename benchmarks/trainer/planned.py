"""`rollmesh memory` against reality and against its formula.

    peak_vs_estimate    predicted peak ÷ the kernel's: most resident memory of a process that makes the very steps, alone
                        or as one of two ranks (of these the one that takes most)
    formula_vs_fake     the formula's peak ÷ that of the fake run

Each process reads its own high-water mark (`/proc/self/status`, Linux), set back when its libraries are loaded and warm.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from benchmarks.harness.processes import LOOPBACK, free_port
from benchmarks.trainer.plan_cases import SOME, SOME_LARGE, Case
from benchmarks.trainer.report import Measured
from services.config.checks import layout_asked
from services.config.load import load_settings
from services.config.settings import RunSettings
from services.policies.training.memory import estimate
from services.policies.training.model_shape import shape_of
from services.wire.errors import RollmeshError
from trainer.memory.options import Machine, options_of
from trainer.model.roles import make_roles
from trainer.parallel.ranks import Ranks, joined
from trainer.planning.fake_run import Plan, run_fake
from trainer.planning.step import full_batch, run_step

_WITHIN_S = 1800.0


def config_of(case: Case) -> Any:
    """As `transformers` has it."""
    said = dict(case.configuration)
    return AutoConfig.for_model(said.pop("model_type"), **said)


def settings_of(case: Case) -> RunSettings:
    return load_settings(None, case.overrides)


def predicted(case: Case, machine: Machine | None = None) -> Plan:
    """By the fake run; left out: for the CPU that would measure it."""
    settings = settings_of(case)
    return run_fake(config_of(case), settings, options_of(settings, machine or Machine(case.ranks)))


def by_formula(case: Case, machine: Machine | None = None) -> int:
    """Bytes."""
    options = options_of(settings_of(case), machine or Machine(case.ranks))
    return estimate(shape_of(case.configuration), options).total


class Trainers:
    """A process whose libraries are loaded, of which every rank of every case is a copy (fork): none loads them again."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def measured(self, case: Case) -> int:
        """Bytes that a process takes for the steps, above those of its libraries; of several ranks the most that one does.

        Raises RollmeshError where one fails, and TimeoutError.
        """
        ask, answer = self._process.stdin, self._process.stdout
        assert ask is not None
        assert answer is not None
        ask.write(msgspec.json.encode(case) + b"\n")
        async with asyncio.timeout(_WITHIN_S):
            said = await answer.readline()
        if not said:
            raise RollmeshError(f"{case.name}: a process that trains it failed", "see above")
        return msgspec.json.decode(said, type=int)


@asynccontextmanager
async def trainers(threads: int = 1) -> AsyncIterator[Trainers]:
    """`threads`: of torch, in each process."""
    command = (sys.executable, "-P", "-m", "benchmarks.trainer.planned", str(threads))
    # Freed memory goes back at once, so that what is resident is what is held.
    environ = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=environ,
        # Ranks are its children: all end together.
        start_new_session=True,
    )
    try:
        yield Trainers(process)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@dataclass
class _Ratios:
    """By case; the figure is the one farthest from 1."""

    found: dict[str, float] = field(default_factory=dict)

    @property
    def farthest(self) -> list[float]:
        return [max(self.found.values(), key=lambda ratio: abs(ratio - 1.0))] if self.found else []

    @property
    def words(self) -> str:
        return ", ".join(f"{name}: {ratio:.3f}" for name, ratio in self.found.items())


async def measure_plans(
    say: Callable[[str], None],
    threads: int = 1,
    cases: Sequence[Case] = SOME,
    large: Sequence[tuple[Case, Machine]] = SOME_LARGE,
) -> Measured:
    """Both figures, of these cases: the ratio farthest from 1. The `large` ones are not trained."""
    real, formula = _Ratios(), _Ratios()
    async with trainers(threads) as them:
        for case in cases:
            plan, taken = predicted(case).tightest.total, await them.measured(case)
            real.found[case.name] = plan / taken
            formula.found[case.name] = by_formula(case) / plan
            say(
                f"{case.name}: {plan >> 20} MiB predicted, {taken >> 20} measured, {by_formula(case) >> 20} by the formula"
            )
    for case, machine in large:
        plan, said = predicted(case, machine).tightest.total, by_formula(case, machine)
        formula.found[case.name] = said / plan
        say(f"{case.name}: {plan >> 20} MiB predicted, {said >> 20} by the formula")
    return Measured(
        rounds={"peak_vs_estimate": real.farthest, "formula_vs_fake": formula.farthest},
        seen={"peak_vs_estimate, by case": real.words, "formula_vs_fake, by case": formula.words},
    )


def _held(which: str) -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which)]
    return int(line.split()[1]) << 10


def _train(case: Case, ranks: Ranks) -> int:
    """The steps that a plan is of, with real tensors. Returns the most bytes that they took, above those before."""
    settings, config, before = settings_of(case), config_of(case), _held("VmRSS")

    def load() -> PreTrainedModel:
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        return model

    roles = make_roles(load, settings, 0, ranks=ranks)
    # 5: set the high-water mark back (Linux, proc(5)). These are steps: how ranks load weights is measured elsewhere.
    Path("/proc/self/clear_refs").write_text("5")
    tokens = settings.trainer.micro_batch_tokens
    # The first makes the optimizer's state, whatever it is of.
    run_step(roles, full_batch(roles, min(64, tokens)))
    run_step(roles, full_batch(roles, tokens, passes=2))
    return _held("VmHWM") - before


def _rank(case: Case, rank: int, port: int, told: Connection) -> None:
    """One rank's part, in a process of its own: tells the bytes that it took."""
    # Some libraries print: standard output is for answers.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    os.environ |= {"MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(port), "WORLD_SIZE": str(case.ranks)}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    torch.manual_seed(0)
    few = [each for each in case.overrides if "micro_batch_tokens" not in each]
    layout = layout_asked(settings_of(case).trainer.parallel, case.ranks)
    with joined(layout) as ranks:
        # Libraries are loaded and warm before memory is read.
        small = {
            **case.configuration,
            "hidden_size": 64,
            "num_hidden_layers": 1,
            "intermediate_size": 64,
            "vocab_size": 128,
        }
        _train(Case("warm", small, [*few, "trainer.micro_batch_tokens=64"]), ranks)
        told.send_bytes(str(_train(case, ranks)).encode())


def main(threads: int) -> None:
    """Answers each case on standard input by a line on standard output. Ends with exit code 1 where a rank fails."""
    torch.set_num_threads(threads)
    context = multiprocessing.get_context("fork")
    for line in sys.stdin.buffer:
        case, port = msgspec.json.decode(line, type=Case), free_port()
        asked = [context.Pipe(duplex=False) for _ in range(case.ranks)]
        ranks = [context.Process(target=_rank, args=(case, rank, port, told)) for rank, (_, told) in enumerate(asked)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit(1)
        sys.stdout.write(f"{max(int(answer.recv_bytes()) for answer, _ in asked)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
